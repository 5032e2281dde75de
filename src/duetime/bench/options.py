"""What the benchmarks' commands have in common: options that mean the same in all of them."""

from enum import StrEnum
from typing import Annotated

import typer

from duetime.clock import parse_duration
from duetime.errors import InvalidMessage, Reason

Kafka = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Use this cluster; else a temporary broker is started."),
]
Store = Annotated[
    str,
    typer.Option(
        metavar="STORE",
        help="Where messages wait: kafka, redis for a temporary server, or redis://host:port/db.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON line at the end of stdout instead of a table.")
]
Messages = Annotated[int, typer.Option(min=1, help="How many messages.")]
ValueBytes = Annotated[int, typer.Option(min=100, help="Size of each message's value.")]
Runs = Annotated[int, typer.Option(min=1, help="Repeat, and show medians and their spread.")]


class Mode(StrEnum):
    """What keeps the destination from taking anything."""

    LEADERLESS = "leaderless"
    REFUSING = "refusing"
    MISSING = "missing"


def parse_range(text: str) -> tuple[int, int]:
    """Read `5s..30s`, or one duration, as the least and the most in ms. Raises InvalidMessage."""
    least, _, most = text.partition("..")
    least_ms, most_ms = parse_duration(least), parse_duration(most or least)
    if least_ms > most_ms:
        raise InvalidMessage(
            Reason.BAD_DUE_TIME, f"{text!r} goes backwards: write the shorter duration first"
        )
    return least_ms, most_ms
