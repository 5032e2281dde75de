"""Options that many commands take, and the settings made of them."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from duetime.clock import parse_instant
from duetime.config import Settings, is_file, load_settings
from duetime.errors import ConfigError

Kafka = Annotated[
    str | None,
    typer.Option("--kafka", metavar="HOST:PORT", help="Kafka's bootstrap servers."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings, as TOML, in place of duetime.toml."),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="Where messages wait: kafka, redis://... or aerospike://...."
    ),
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="WHERE",
        help="Where the first start begins to read intake topics: earliest, latest, a time such as "
        "2026-12-24T18:00:00Z, or a consumer group whose offsets are taken over.",
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="As `duetime send` printed it.")]
In = Annotated[
    str | None,
    typer.Option("--in", metavar="DURATION", help="Due so long from now: 250ms, 5s, 1h30m, 7d."),
]
At = Annotated[
    str | None,
    typer.Option(
        "--at", metavar="TIME", help="Due then, with a zone: 2026-12-24T18:00:00+01:00, or ...Z."
    ),
]
OnlyValue = Annotated[
    bool, typer.Option("--value", help="Only the payload, byte for byte, for a pipe.")
]
Json = Annotated[bool, typer.Option("--json", help="For programs, not for people.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more in the log.")]


#: The most that may be asked for: with one more, which tells that there are more, it is still a
#: number of Java's.
MOST_LISTED = 1_000_000_000


def limit(says: str) -> Any:  # noqa: ANN401 (as typer has it)
    """The option `--limit` of a command that lists."""
    return typer.Option("--limit", min=1, max=MOST_LISTED, help=says)


class BadInput(typer.TyperException):
    """The arguments contradict each other, or name what cannot be read. One sentence."""

    exit_code = 2


def settings_from(
    kafka: str | None, config: Path | None, **overrides: str | int | None
) -> Settings:
    """The settings: options over environment over file over defaults. Raises ConfigError."""
    if config:
        if not is_file(config):
            raise ConfigError(f"--config names {config}, which is no file: correct it")
        os.environ["DUETIME_CONFIG"] = str(config)
    return load_settings(bootstrap=kafka, **overrides)


def instant_option_ms(text: str | None) -> int | None:
    """A bound such as `--from` in epoch ms. Raises InvalidMessage."""
    return None if text is None else parse_instant(text)
