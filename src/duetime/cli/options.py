"""Options of several commands, and the settings that result from them."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from duetime.core.clock import parse_instant
from duetime.core.errors import ConfigError
from duetime.core.settings import Settings, is_file, load_settings
from duetime.kafka.connection import ensure_reachable

#: An option that may be omitted.
Text = str | None

Kafka = Annotated[Text, Option("--kafka", metavar="HOST:PORT", help="Kafka's bootstrap servers.")]
Config = Annotated[
    Path | None, Option("--config", metavar="FILE", help="Settings, in place of duetime.toml.")
]
Store = Annotated[
    Text,
    Option("--store", metavar="URL", help="Pending messages: kafka, redis:// or aerospike://."),
]
StartFrom = Annotated[
    Text,
    Option(
        "--from",
        metavar="WHERE",
        help="Where the first start reads intake topics from: earliest, latest, a time such as "
        "2026-12-24T18:00:00Z, or a consumer group whose offsets are taken over.",
    ),
]
Id = Annotated[str, Argument(metavar="ID", help="Full id, as `duetime send` printed it.")]
In = Annotated[
    Text, Option("--in", metavar="DURATION", help="Delay from now: 250ms, 5s, 1h30m, 7d.")
]
At = Annotated[
    Text, Option("--at", metavar="TIME", help="Due time with a zone: 2026-12-24T18:00:00+01:00.")
]
OnlyValue = Annotated[bool, Option("--value", help="Write only the payload, byte for byte.")]
Json = Annotated[bool, Option("--json", help="Write JSON.")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Log details as well.")]

#: Maximum of --limit: one more, which detects that there are more, still fits an int of Java.
MAX_LIMIT = 1_000_000_000


def limit_option(text: str) -> Any:  # noqa: ANN401 (Typer's type)
    """Return the option `--limit` of a command that lists."""
    return Option("--limit", min=1, max=MAX_LIMIT, help=text)


def port_option(name: str, text: str) -> Any:  # noqa: ANN401 (Typer's type)
    """Return an option that takes a port."""
    return Option(name, min=1, max=65_535, help=text)


class BadInput(typer.TyperException):
    """The arguments contradict each other, or name a file that cannot be read. One sentence."""

    exit_code = 2


def settings_from(
    kafka: str | None, config: Path | None, **overrides: str | int | None
) -> Settings:
    """Return the settings: options over environment over file over defaults. Raises ConfigError."""
    if config:
        if not is_file(config):
            raise ConfigError(f"--config names {config}, which is no file: correct it")
        os.environ["DUETIME_CONFIG"] = str(config)
    return load_settings(bootstrap=kafka, **overrides)


def connected(kafka: str | None, config: Path | None, **overrides: str | int | None) -> Settings:
    """Return the settings once their cluster has answered. Raises ConfigError, KafkaError."""
    settings = settings_from(kafka, config, **overrides)
    ensure_reachable(settings)
    return settings


def instant_option_ms(text: str | None) -> int | None:
    """Return a bound such as `--from` in epoch ms. Raises InvalidMessage."""
    return None if text is None else parse_instant(text)
