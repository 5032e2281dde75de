"""queue stats, peek, dead, redrive: a work queue, for those who look after it."""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from confluent_kafka import Message

from duetime.cli.connect import connected
from duetime.cli.dead import Limit, bring_back, show_letters
from duetime.cli.display import console, facts, printable, size, table, when
from duetime.cli.options import BadInput, Config, Json, Kafka
from duetime.clock import SystemClock, format_instant
from duetime.dead import DeadLetters, Selection
from duetime.kmq.markers import REDELIVERY_COUNT, decoded_count
from duetime.kmq.stats import Stats
from duetime.kmq.stats import peek as peek_at
from duetime.kmq.stats import stats as stats_of
from duetime.stores.records import headers_of

app = typer.Typer(
    no_args_is_help=True, help="A work queue: how it does, what waits, and what was given up."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The queue's topic.")]


@app.command()
def stats(name: Name, *, as_json: Json = False, kafka: Kafka = None, config: Config = None) -> None:
    """What waits, is worked on, came again and was given up; the exit code is 0."""
    found = stats_of(connected(kafka, config), name)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    typer.echo(facts(_facts(found, SystemClock().now_ms())))


@app.command()
def peek(
    name: Name,
    *,
    limit: Limit = 10,
    value: Annotated[bool, typer.Option("--value", help="Payloads alone, a line each.")] = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Look at messages that no worker has read yet; they stay where they are."""
    waiting = peek_at(connected(kafka, config), name, limit)
    if value:
        sys.stdout.buffer.writelines((each.value() or b"") + b"\n" for each in waiting)
        return
    shown = table("place", "since", "attempt", "key", "size")
    for each in waiting:
        shown.add_row(*_row(each))
    console().print(shown if shown.rows else "nothing waits")


@app.command()
def dead(
    name: Name,
    *,
    limit: Limit = 50,
    as_json: Json = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """List the latest messages that were given up and not brought back."""
    letters = DeadLetters(connected(kafka, config), name)
    show_letters(letters.latest(Selection(), limit), as_json=as_json)


@app.command()
def redrive(
    name: Name,
    numbers: Annotated[
        list[int] | None, typer.Argument(metavar="[NUMBER]...", help="As queue dead has them.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Put messages that were given up into the queue once more, as new; each is so once.

    Exit code 4 if none of the numbers is such a message's.
    """
    if not (numbers or everything):
        raise BadInput("say which: their numbers, or --all")
    selection = Selection(numbers=frozenset(numbers) if numbers else None)
    bring_back(DeadLetters(connected(kafka, config), name), selection)


def _facts(found: Stats, now_ms: int) -> list[tuple[str, str]]:
    oldest = "none" if found.oldest_ms is None else f"since {when(found.oldest_ms, now_ms)}"
    return [
        ("waiting", f"{found.waiting:,}"),
        ("in flight", f"{found.in_flight:,}"),
        ("oldest", oldest),
        ("redelivered", f"{found.redelivered:,}"),
        ("dead", f"{found.dead:,}"),
    ]


def _row(message: Message) -> tuple[str, ...]:
    counts = (value for name, value in headers_of(message) if name == REDELIVERY_COUNT)
    return (
        f"{message.partition()}/{message.offset()}",
        format_instant(message.timestamp()[1]),
        str(decoded_count(next(counts, None)) + 1),
        printable(message.key()),
        size(len(message.value() or b"")),
    )
