"""recurring list, show, pause, resume, stop: messages that come again and again."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from duetime.asking import all_series, ask, find_series, find_series_soon
from duetime.cli.connect import connected
from duetime.cli.display import console, facts, table, when
from duetime.cli.options import Config, Json, Kafka
from duetime.clock import SystemClock, format_instant
from duetime.config import Settings
from duetime.errors import InvalidMessage
from duetime.message import PAUSE, RESUME, STOP
from duetime.recurrence import Misfire
from duetime.series import Series

app = typer.Typer(
    no_args_is_help=True, help="Messages that come again: list them, pause, resume and stop them."
)

#: What is nothing to whoever asks about a series.
BOOKKEEPING = ("resumed_ms", "resumed_at", "ended_ms", "replaced")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The id that it was sent with.")]


@app.command("list")
def list_(*, as_json: Json = False, kafka: Kafka = None, config: Config = None) -> None:
    """All series, and when each comes next: the first run that is more than 10 s away."""
    found, now_ms = all_series(connected(kafka, config)), SystemClock().now_ms()
    if as_json:
        typer.echo(json.dumps([_listed(each, now_ms) for each in found]))
        return
    if not found:
        typer.echo("no series")
        return
    shown = table("name", "topic", "cron", "zone", "next")
    for each in found:
        shown.add_row(each.name, each.topic, each.cron, each.zone or "UTC", _next(each, now_ms))
    console().print(shown)


@app.command()
def show(name: Name, *, kafka: Kafka = None, config: Config = None) -> None:
    """Show all about a series but what is in its message."""
    series, now_ms = find_series(name, connected(kafka, config)), SystemClock().now_ms()
    typer.echo(facts(_facts(series, now_ms)))


@app.command()
def pause(name: Name, *, kafka: Kafka = None, config: Config = None) -> None:
    """Leave runs out until it is resumed. One that is due in less than 10 s comes yet."""
    _ask(name, PAUSE, connected(kafka, config))
    typer.echo(f"paused: {name}")


@app.command()
def resume(name: Name, *, kafka: Kafka = None, config: Config = None) -> None:
    """Let a series that was paused go on. A run due in less than 10 s was left out already."""
    _ask(name, RESUME, connected(kafka, config))
    typer.echo(f"resumed: {name}")


@app.command()
def stop(name: Name, *, kafka: Kafka = None, config: Config = None) -> None:
    """End a series for good. A run that is due in less than 10 s comes yet."""
    _ask(name, STOP, connected(kafka, config))
    typer.echo(f"stopped: {name}")


def _ask(name: str, operation: str, settings: Settings) -> None:
    ask(find_series_soon(name, settings), operation, settings)


def _listed(series: Series, now_ms: int) -> dict[str, Any]:
    told = {name: value for name, value in asdict(series).items() if name not in BOOKKEEPING}
    return told | {"next_ms": series.next_ms(now_ms)}


def _next(series: Series, now_ms: int) -> str:
    if series.is_paused:
        return "paused"
    try:
        _ = series.recurrence
    except InvalidMessage as error:
        # With other time zones than those of the machine where it was taken in.
        return error.reason
    next_ms = series.next_ms(now_ms)
    return "over" if next_ms is None else format_instant(next_ms)


def _facts(series: Series, now_ms: int) -> list[tuple[str, str]]:
    next_ms, until_ms = series.next_ms(now_ms), series.until_ms
    said = {
        "name": series.name,
        "topic": series.topic,
        "cron": series.cron,
        "zone": series.zone or "UTC",
        "next": _next(series, now_ms) if next_ms is None else when(next_ms, now_ms),
        "until": until_ms and when(until_ms, now_ms),
        "misfire": series.misfire or Misfire.ONCE,
        "partition": series.partition,
        "cluster": series.cluster,
    }
    return [(name, text) for name, text in said.items() if text]
