"""recurring list, show, pause, resume, stop: messages that come again and again."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from duetime.asking import all_series, ask, find_series
from duetime.cli.connect import connected
from duetime.cli.display import console, facts, table, when
from duetime.cli.options import Config, Json, Kafka
from duetime.clock import SystemClock, format_instant
from duetime.config import Settings
from duetime.message import PAUSE, RESUME, STOP
from duetime.series import Series

app = typer.Typer(
    no_args_is_help=True, help="Messages that come again: list them, pause, resume and stop them."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The id that it was sent with.")]


@app.command("list")
def list_(*, as_json: Json = False, kafka: Kafka = None, config: Config = None) -> None:
    """All series, and when each comes next."""
    found, now_ms = all_series(connected(kafka, config)), SystemClock().now_ms()
    if as_json:
        listed = [asdict(each) | {"next_ms": each.next_ms(now_ms)} for each in found]
        typer.echo(json.dumps(listed))
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
    """Let a series that was paused go on, with its next run."""
    _ask(name, RESUME, connected(kafka, config))
    typer.echo(f"resumed: {name}")


@app.command()
def stop(name: Name, *, kafka: Kafka = None, config: Config = None) -> None:
    """End a series for good. A run that is due in less than 10 s comes yet."""
    _ask(name, STOP, connected(kafka, config))
    typer.echo(f"stopped: {name}")


def _ask(name: str, operation: str, settings: Settings) -> None:
    ask(find_series(name, settings), operation, settings)


def _next(series: Series, now_ms: int) -> str:
    if series.is_paused:
        return "paused"
    next_ms = series.next_ms(now_ms)
    return "over" if next_ms is None else format_instant(next_ms)


def _facts(series: Series, now_ms: int) -> list[tuple[str, str]]:
    next_ms, recurrence = series.next_ms(now_ms), series.recurrence
    said = {
        "name": series.name,
        "topic": series.topic,
        "cron": series.cron,
        "zone": recurrence.cron.zone,
        "next": _next(series, now_ms) if next_ms is None else when(next_ms, now_ms),
        "until": series.until and when(recurrence.until_ms, now_ms),
        "misfire": recurrence.misfire,
        "partition": series.partition,
        "cluster": series.cluster,
    }
    return [(name, text) for name, text in said.items() if text]
