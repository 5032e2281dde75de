"""What cannot be a setting, told in words that a user knows."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from duetime.errors import ConfigError
from duetime.wording import words

#: What a setting's name begins with in the environment.
PREFIX = "DUETIME_"

#: What is called so there and is no setting: the last one is for tests, on a server of one's own.
OTHERS = frozenset({"config", "jars", "debug", "fault", "spark_log", "aerospike"})

#: What Kubernetes puts there for a service that is called duetime, or duetime-...
SERVICE = re.compile(r"(\w+_)?(service_host|service_port(_\w+)?|port_\d+_(tcp|udp|sctp)(_\w+)?)")

#: What it says of the port of one.
LINK = re.compile(r"(tcp|udp|sctp)://")


def check_environment(environment: Mapping[str, str], known: Collection[str]) -> None:
    """Raise ConfigError for what is called as settings are, and is none of those that there are."""
    settings = {*known, *OTHERS}
    for variable, value in environment.items():
        prefix, name = variable[: len(PREFIX)].upper(), variable[len(PREFIX) :].lower()
        if prefix != PREFIX or name in settings:
            continue
        if not (SERVICE.fullmatch(name) or LINK.match(value)):
            raise ConfigError(f"{variable} in the environment: {_no_such(name, known)}")


def told(found: Mapping[str, Any], known: Collection[str]) -> str:
    """What pydantic has found, by the setting's name; of several settings, as it is."""
    name = ".".join(str(part) for part in found["loc"] if part != "[key]")
    if found["type"] == "extra_forbidden" and len(found["loc"]) == 1:
        return _no_such(name, known)
    said = words(found, named="a table")
    return f"setting {name}: {said}" if name else said


def _no_such(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md has them all"
    return f"there is no setting {name}: {hint}"
