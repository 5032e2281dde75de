"""dead list, show, redrive: what could not be delivered, and bringing it back."""

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated

import typer

from duetime.cli.connect import connected
from duetime.cli.display import console, facts, record_facts, table, when
from duetime.cli.options import BadInput, Config, Json, Kafka, OnlyValue, instant_option_ms, limit
from duetime.clock import SystemClock, format_instant
from duetime.dead import DeadLetter, DeadLetters, Selection
from duetime.errors import UnknownMessage
from duetime.wording import escaped

app = typer.Typer(
    no_args_is_help=True, help="What could not be delivered: list it, show it, bring it back."
)

#: What may be secret, or large.
PAYLOAD = ("key", "value", "headers")

Limit = Annotated[int, limit("The most that are listed.")]
Topic = Annotated[str | None, typer.Option("--topic", help="Those for this destination.")]
Why = Annotated[str | None, typer.Option("--reason", help="Those that died of this.")]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Dead since then; with a zone.")
]


@app.command("list")
def list_(  # noqa: PLR0913 (an option each)
    *,
    topic: Topic = None,
    reason: Why = None,
    since: Since = None,
    limit: Limit = 50,
    as_json: Json = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """List the latest dead letters that were not brought back."""
    selection = _selection(topic, reason, since)
    letters = DeadLetters(connected(kafka, config)).latest(selection, limit)
    show_letters(letters, as_json=as_json)


def show_letters(letters: Sequence[DeadLetter], *, as_json: bool) -> None:
    """A line each, without payloads."""
    if as_json:
        typer.echo(json.dumps([_as_json(each) for each in letters]))
        return
    if not letters:
        typer.echo("no dead letters")
        return
    shown = table("number", "dead since", "topic", "reason", "tries", "id")
    for each in letters:
        died = format_instant(each.last_ms)
        topic, reason = escaped(each.topic), escaped(each.reason)
        shown.add_row(str(each.number), died, topic, reason, str(each.attempts), each.id)
    console().print(shown)


@app.command()
def show(
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="As dead list has it.")],
    *,
    value: OnlyValue = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Show all about a dead letter."""
    letter = DeadLetters(connected(kafka, config)).find(number)
    if value:
        sys.stdout.buffer.write(letter.value or b"")
        return
    typer.echo(facts(_facts(letter, SystemClock().now_ms())))


@app.command()
def redrive(  # noqa: PLR0913 (an option each)
    numbers: Annotated[
        list[int] | None, typer.Argument(metavar="[NUMBER]...", help="As dead list has them.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
    topic: Topic = None,
    reason: Why = None,
    since: Since = None,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Send dead letters once more, due now; each is brought back once, also by two at a time.

    Exit code 4 if none of the numbers is a dead letter's.
    """
    if not (numbers or everything or topic or reason or since):
        raise BadInput("say which: their numbers, --topic, --reason, --since or --all")
    selection = _selection(topic, reason, since, numbers)
    bring_back(DeadLetters(connected(kafka, config)), selection)


def bring_back(letters: DeadLetters, selection: Selection) -> None:
    """Bring them back, and say how many. Raises UnknownMessage where no number is a letter's."""
    asked = selection.numbers or ()
    absent = letters.absent(asked) if asked else []
    told = f"no dead letter has the number {', '.join(map(str, absent))}, or it was brought back"
    if absent and len(absent) == len(asked):
        raise UnknownMessage(told)
    typer.echo(f"brought back {letters.redrive(selection, SystemClock()):,}")
    if absent:
        typer.echo(told, err=True)


def _selection(
    topic: str | None, reason: str | None, since: str | None, numbers: list[int] | None = None
) -> Selection:
    return Selection(
        topic=topic,
        reason=reason,
        since_ms=instant_option_ms(since),
        numbers=frozenset(numbers) if numbers else None,
    )


def _as_json(letter: DeadLetter) -> dict[str, object]:
    """All but what may be secret: the payload and the headers."""
    names = [each.name for each in fields(letter) if each.name not in PAYLOAD]
    return {name: getattr(letter, name) for name in names}


def _facts(letter: DeadLetter, now_ms: int) -> list[tuple[str, str]]:
    return [
        ("number", str(letter.number)),
        ("id", letter.id),
        ("reason", escaped(f"{letter.reason}: {letter.detail}")),
        ("tries", str(letter.attempts)),
        ("failed first", when(letter.first_ms, now_ms)),
        ("failed last", when(letter.last_ms, now_ms)),
        ("was due", when(letter.due_ms, now_ms)),
        ("topic", escaped(letter.topic)),
        *record_facts(letter),
    ]
