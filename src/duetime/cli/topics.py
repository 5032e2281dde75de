"""topics, doctor: whether everything is there, and as it must be."""

from collections.abc import Sequence
from typing import Annotated

import typer

from duetime.admin import create_topics, topic_problems
from duetime.cli.connect import connected
from duetime.cli.display import console
from duetime.cli.options import Config, Kafka, settings_from
from duetime.doctor import checkup
from duetime.topics import required_topics


def topics(
    *,
    check: Annotated[bool, typer.Option("--check", help="Create nothing, only look.")] = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Create the topics that are missing, and check all.

    Exit code 1 if a topic's settings could lose messages.
    """
    settings = connected(kafka, config)
    if not check:
        for name in create_topics(settings):
            typer.echo(f"created {name}")
    problems = topic_problems(settings)
    if problems:
        _list_problems(problems)
        raise typer.Exit(1)
    typer.echo(f"✓ all {len(required_topics(settings))} topics are as they must be")


def doctor(*, kafka: Kafka = None, config: Config = None) -> None:
    """Check Java, jars, Kafka, clocks and topics.

    Exit code 1 if something is wrong.
    """
    checks = checkup(settings_from(kafka, config))
    out = console()
    for each in checks:
        mark, style = ("✓", "green") if each.ok else ("✗", "red")
        out.print(mark, end=" ", style=style)
        out.print(f"{each.name}: {each.detail}")
    if not all(each.ok for each in checks):
        raise typer.Exit(1)


def _list_problems(problems: Sequence[str]) -> None:
    for problem in problems:
        typer.echo(f"✗ {problem}", err=True)
