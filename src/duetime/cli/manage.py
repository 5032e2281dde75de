"""dead-letters, queue, schedules: commands that list, show and change what is there."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from typer import Argument, Option

from duetime.cli.terminal import (
    BadInput,
    Config,
    Json,
    Kafka,
    OnlyValue,
    Text,
    connected,
    console,
    facts,
    instant_option_ms,
    limit_option,
    printable,
    record_facts,
    size,
    table,
    when,
)
from duetime.client.dead_letters import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetters,
    unknown_dead_letter,
)
from duetime.client.schedules import (
    find_schedule,
    list_schedules,
    pause_schedule,
    resume_schedule,
    stop_schedule,
)
from duetime.core.clock import SystemClock, format_instant
from duetime.core.cron import Misfire
from duetime.core.errors import InvalidMessage, escaped
from duetime.core.schedules import Schedule
from duetime.kafka.range_reader import headers_of
from duetime.queue.message import REDELIVERY_COUNT, decoded_count
from duetime.queue.stats import peek as peek_queue
from duetime.queue.stats import stats as queue_stats

dead_letters_app = typer.Typer(no_args_is_help=True, help="List, show and redrive dead letters.")

queue_app = typer.Typer(no_args_is_help=True, help="Inspect a work queue, and redrive messages.")

schedules_app = typer.Typer(no_args_is_help=True, help="List, pause, resume and stop schedules.")

#: Fields that may be secret, or large.
PAYLOAD = ("key", "value", "headers")

#: Fields of a schedule that are internal to the pipeline.
INTERNAL = ("resumed_ms", "resumed_at", "ended_ms")

Limit = Annotated[int, limit_option("Maximum number of items to list.")]
Topic = Annotated[Text, Option("--topic", help="Only those for this destination.")]
OfReason = Annotated[Text, Option("--reason", help="Only those of this reason.")]
Since = Annotated[Text, Option("--since", metavar="TIME", help="Only those dead since then.")]
Offsets = Annotated[list[int] | None, Argument(metavar="OFFSET", help="Offsets of dead letters.")]
Everything = Annotated[bool, Option("--all", help="Redrive all dead letters.")]
QueueName = Annotated[str, Argument(metavar="NAME", help="Topic of the queue.")]
ScheduleName = Annotated[str, Argument(metavar="NAME", help="Id that it was sent with.")]


@dead_letters_app.command("list")
def list_dead_letters(  # noqa: PLR0913 (an option each)
    *,
    topic: Topic = None,
    reason: OfReason = None,
    since: Since = None,
    limit: Limit = 50,
    as_json: Json = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """List the latest dead letters.

    Those that were redriven are left out.
    """
    wanted = DeadLetterFilter(topic=topic, reason=reason, since_ms=instant_option_ms(since))
    _print_letters(DeadLetters(connected(kafka, config)).latest(wanted, limit), as_json=as_json)


@dead_letters_app.command("show")
def show_dead_letter(
    offset: Annotated[int, Argument(metavar="OFFSET", help="As `list` shows it.")],
    *,
    value: OnlyValue = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Show all parts of a dead letter."""
    letter, now_ms = DeadLetters(connected(kafka, config)).find(offset), SystemClock().now_ms()
    if value:
        sys.stdout.buffer.write(letter.value or b"")
        return
    pairs = [
        ("offset", str(letter.offset)),
        ("id", letter.id),
        ("reason", escaped(f"{letter.reason}: {letter.detail}")),
        ("attempts", str(letter.attempts)),
        ("failed first", when(letter.first_ms, now_ms)),
        ("failed last", when(letter.last_ms, now_ms)),
        ("was due", when(letter.due_ms, now_ms)),
        ("topic", escaped(letter.topic)),
    ]
    typer.echo(facts(pairs + record_facts(letter)))


@dead_letters_app.command("redrive")
def redrive_dead_letters(  # noqa: PLR0913 (an option each)
    offsets: Offsets = None,
    *,
    everything: Everything = False,
    topic: Topic = None,
    reason: OfReason = None,
    since: Since = None,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Schedule dead letters again, due now.

    Each is redriven once, also by two callers at a time.

    Exit code 4 if none of the offsets has a dead letter.
    """
    if not (offsets or everything or topic or reason or since):
        raise BadInput("no dead letters selected: add offsets, --topic, --reason, --since or --all")
    wanted = DeadLetterFilter(
        topic=topic,
        reason=reason,
        since_ms=instant_option_ms(since),
        offsets=frozenset(offsets) if offsets else None,
    )
    _redrive(DeadLetters(connected(kafka, config)), wanted)


@queue_app.command()
def stats(
    name: QueueName, *, as_json: Json = False, kafka: Kafka = None, config: Config = None
) -> None:
    """Count the messages of a queue.

    Shows how many are waiting, in flight, redelivered and dead.
    """
    found = queue_stats(connected(kafka, config), name)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    since = found.oldest_ms and f"since {when(found.oldest_ms, SystemClock().now_ms())}"
    pairs = {
        "waiting": f"{found.waiting:,}",
        "in flight": f"{found.in_flight:,}",
        "oldest": since or "none",
        "redelivered": f"{found.redelivered:,}",
        "dead": f"{found.dead:,}",
    }
    typer.echo(facts(pairs.items()))


@queue_app.command()
def peek(
    name: QueueName,
    *,
    limit: Limit = 10,
    value: Annotated[bool, Option("--value", help="Write only payloads, a line each.")] = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Show unread messages of a queue.

    They stay in the queue.
    """
    waiting = peek_queue(connected(kafka, config), name, limit)
    if value:
        sys.stdout.buffer.writelines((each.value() or b"") + b"\n" for each in waiting)
        return
    rows = table("place", "since", "attempt", "key", "size")
    for each in waiting:
        counts = (text for header, text in headers_of(each) if header == REDELIVERY_COUNT)
        rows.add_row(
            f"{each.partition()}/{each.offset()}",
            format_instant(each.timestamp()[1]),
            str(decoded_count(next(counts, None)) + 1),
            printable(each.key()),
            size(len(each.value() or b"")),
        )
    console().print(rows if rows.rows else "no waiting messages")


@queue_app.command("dead")
def list_queue_dead_letters(
    name: QueueName,
    *,
    limit: Limit = 50,
    as_json: Json = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """List the latest dead letters of a queue.

    Those that were redriven are left out.
    """
    letters = DeadLetters(connected(kafka, config), name).latest(DeadLetterFilter(), limit)
    _print_letters(letters, as_json=as_json)


@queue_app.command("redrive")
def redrive_queue(
    name: QueueName,
    offsets: Offsets = None,
    *,
    everything: Everything = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Put dead letters into the queue again.

    Each is redriven once, as a new message.

    Exit code 4 if none of the offsets has a dead letter.
    """
    if not (offsets or everything):
        raise BadInput("no dead letters selected: add offsets, or --all")
    wanted = DeadLetterFilter(offsets=frozenset(offsets) if offsets else None)
    _redrive(DeadLetters(connected(kafka, config), name), wanted)


@schedules_app.command("list")
def list_all_schedules(
    *, as_json: Json = False, kafka: Kafka = None, config: Config = None
) -> None:
    """List all schedules.

    Shows the first run of each that is more than 10 s away.
    """
    found, now_ms = list_schedules(connected(kafka, config)), SystemClock().now_ms()
    if as_json:
        typer.echo(json.dumps([_schedule_json(each, now_ms) for each in found]))
        return
    if not found:
        typer.echo("no schedules")
        return
    rows = table("name", "topic", "cron", "zone", "next")
    for each in found:
        rows.add_row(each.name, each.topic, each.cron, each.zone or "UTC", _next_run(each, now_ms))
    console().print(rows)


@schedules_app.command()
def show(name: ScheduleName, *, kafka: Kafka = None, config: Config = None) -> None:
    """Show a schedule without its message."""
    schedule, now_ms = find_schedule(name, connected(kafka, config)), SystemClock().now_ms()
    next_ms, until_ms = schedule.next_ms(now_ms), schedule.until_ms
    texts = {
        "name": schedule.name,
        "topic": schedule.topic,
        "cron": schedule.cron,
        "zone": schedule.zone or "UTC",
        "next": _next_run(schedule, now_ms) if next_ms is None else when(next_ms, now_ms),
        "until": until_ms and when(until_ms, now_ms),
        "misfire": schedule.misfire or Misfire.ONCE,
        "partition": schedule.partition,
        "cluster": schedule.cluster,
    }
    typer.echo(facts((name, text) for name, text in texts.items() if text))


@schedules_app.command()
def pause(name: ScheduleName, *, kafka: Kafka = None, config: Config = None) -> None:
    """Skip the runs of a schedule until it resumes.

    A run that is due in less than 10 s is still delivered.
    """
    pause_schedule(name, connected(kafka, config))
    typer.echo(f"paused: {name}")


@schedules_app.command()
def resume(name: ScheduleName, *, kafka: Kafka = None, config: Config = None) -> None:
    """Resume a paused schedule.

    A run that is due in less than 10 s is already skipped.
    """
    resume_schedule(name, connected(kafka, config))
    typer.echo(f"resumed: {name}")


@schedules_app.command()
def stop(name: ScheduleName, *, kafka: Kafka = None, config: Config = None) -> None:
    """End a schedule for good.

    A run that is due in less than 10 s is still delivered.
    """
    stop_schedule(name, connected(kafka, config))
    typer.echo(f"stopped: {name}")


def _print_letters(letters: Sequence[DeadLetter], *, as_json: bool) -> None:
    """Print a line for each, without payloads."""
    if as_json:
        names = [each.name for each in fields(DeadLetter) if each.name not in PAYLOAD]
        typer.echo(json.dumps([{name: getattr(each, name) for name in names} for each in letters]))
        return
    if not letters:
        typer.echo("no dead letters")
        return
    rows = table("offset", "dead since", "topic", "reason", "attempts", "id")
    for each in letters:
        died, topic, reason = (
            format_instant(each.last_ms),
            escaped(each.topic),
            escaped(each.reason),
        )
        rows.add_row(str(each.offset), died, topic, reason, str(each.attempts), each.id)
    console().print(rows)


def _redrive(letters: DeadLetters, wanted: DeadLetterFilter) -> None:
    """Redrive, and print the number. Raises UnknownMessage if no offset has a letter."""
    asked = wanted.offsets or ()
    missing = letters.missing(asked) if asked else []
    if missing and len(missing) == len(asked):
        raise unknown_dead_letter(missing)
    typer.echo(f"redriven: {letters.redrive(wanted, SystemClock()):,}")
    if missing:
        typer.echo(unknown_dead_letter(missing).detail, err=True)


def _schedule_json(schedule: Schedule, now_ms: int) -> dict[str, Any]:
    shown = {name: value for name, value in asdict(schedule).items() if name not in INTERNAL}
    return shown | {"next_ms": schedule.next_ms(now_ms)}


def _next_run(schedule: Schedule, now_ms: int) -> str:
    if schedule.is_paused:
        return "paused"
    try:
        _ = schedule.recurrence
    except InvalidMessage as error:
        # Its time zone is known where it was taken in, and not on this machine.
        return error.reason
    next_ms = schedule.next_ms(now_ms)
    return "over" if next_ms is None else format_instant(next_ms)
