"""topics, doctor, status: whether everything is there, as it must be, and at work."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from duetime.admin import create_topics, topic_problems, tune_topics
from duetime.cli.connect import connected
from duetime.cli.display import console, facts, when
from duetime.cli.options import Config, Json, Kafka, Store, settings_from
from duetime.clock import SystemClock, format_duration, format_instant
from duetime.config import Settings
from duetime.doctor import Verdict, checkup
from duetime.errors import KafkaError
from duetime.required import required_topics
from duetime.standing import RUNS, Status
from duetime.status import status as ask

#: How what the doctor has found is marked, and its colour.
MARKS = {Verdict.OK: ("✓", "green"), Verdict.ADVICE: ("!", "yellow"), Verdict.WRONG: ("✗", "red")}


def topics(
    *,
    check: Annotated[bool, typer.Option("--check", help="Create nothing, only look.")] = False,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Create the topics that are missing, adjust segments, and check all.

    Exit code 1 if a topic's settings could lose messages.
    """
    settings = connected(kafka, config, store)
    if not check:
        for name in create_topics(settings):
            typer.echo(f"created {name}")
        _tune(settings)
    problems = topic_problems(settings)
    if problems:
        _list_problems(problems)
        raise typer.Exit(1)
    typer.echo(f"✓ all {len(required_topics(settings))} topics are as they must be")


def doctor(*, kafka: Kafka = None, store: Store = None, config: Config = None) -> None:
    """Check Java, jars, Kafka, clocks and topics.

    Exit code 1 if something is wrong. Advice (!) changes no exit code.
    """
    checks = checkup(settings_from(kafka, config, store=store))
    out = console()
    for each in checks:
        mark, style = MARKS[each.verdict]
        out.print(mark, end=" ", style=style)
        out.print(f"{each.name}: {each.detail}")
    if not all(each.ok for each in checks):
        raise typer.Exit(1)


def status(
    *, as_json: Json = False, kafka: Kafka = None, store: Store = None, config: Config = None
) -> None:
    """Say which pipeline delivers, which stand by, and whether anything is late.

    Exit code 1 if none delivers.
    """
    settings, clock = connected(kafka, config, store), SystemClock()
    found = ask(settings, clock)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        typer.echo(facts(_described(found, clock.now_ms())))
    if found.leader is None:
        raise KafkaError("no pipeline leads, so nothing is delivered: start duetime up, or run")


def _described(found: Status, now_ms: int) -> list[tuple[str, str]]:
    since = f", since {when(found.since_ms, now_ms)}" if found.since_ms else ""
    late = f"{found.late:,}, the oldest for {format_duration(found.lag_ms)}"
    return [
        ("leader", f"{found.leader or 'none'}{since}"),
        ("standing by", "\n".join(found.standbys) or "none"),
        ("waiting", f"{found.waiting:,}"),
        ("late", late if found.late else "none"),
        ("rescued", "not known" if found.rescued is None else _rescued(found, now_ms)),
        ("queries", _queries(found) if found.queries else "not known"),
    ]


def _rescued(found: Status, now_ms: int) -> str:
    """How many, and of the latest when they were found and when they were due."""
    latest = [
        f"{when(each.at_ms, now_ms)}: {each.messages:,}, "
        f"due from {format_instant(each.from_ms)} to {format_instant(each.to_ms)}"
        for each in found.rescues
    ]
    return "\n".join([f"{found.rescued:,}", *latest])


def _queries(found: Status) -> str:
    troubled = [f"{name} {how}" for name, how in found.queries.items() if how != RUNS]
    return "\n".join(troubled) or f"all {len(found.queries)} run"


def _tune(settings: Settings) -> None:
    """Change what may be changed at any time. Who may not do so has a pipeline that works."""
    try:
        for each in tune_topics(settings):
            typer.echo(f"changed {each}")
    except KafkaError as error:
        typer.echo(f"! {error.detail}", err=True)


def _list_problems(problems: Sequence[str]) -> None:
    for problem in problems:
        typer.echo(f"✗ {problem}", err=True)
