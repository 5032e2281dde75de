"""send, show, cancel, reschedule: one message at a time. pending: count or list messages."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from duetime import client
from duetime.cli.terminal import (
    At,
    BadInput,
    Config,
    Id,
    In,
    Json,
    Kafka,
    OnlyValue,
    Store,
    Text,
    connected,
    console,
    facts,
    histogram,
    instant_option_ms,
    limit_option,
    printable,
    record_facts,
    settings_from,
    size,
    table,
    when,
)
from duetime.client.cancellation import find_pending
from duetime.client.producer import Producer
from duetime.core.clock import (
    UNITS_MS,
    SystemClock,
    delay,
    format_duration,
    format_instant,
    instant,
)
from duetime.core.cron import Recurrence
from duetime.core.errors import InvalidMessage, KafkaError, Reason, RecordRefused
from duetime.core.messages import MessageId, PendingMessage, payload_json
from duetime.core.records import IntakeRecord, MessageSpec, intake_record, new_unique
from duetime.kafka.connection import create_on_demand, ensure_intake_topics
from duetime.stores import PendingSlot, overlapping
from duetime.stores.factory import open_reader

HOUR_MS, DAY_MS = UNITS_MS["h"], UNITS_MS["d"]

#: Upper ends of the histogram's rows, in ms from now. A distant message is in a wide slot: finer
#: steps could not be told apart.
STEPS_MS = (
    *(10_000, 60_000, 600_000),
    *(HOUR_MS, 6 * HOUR_MS),
    *(DAY_MS, 7 * DAY_MS, 30 * DAY_MS, 365 * DAY_MS),
)

#: Default of `pending --list --limit`.
LISTED = 50

OVERDUE, LATER = "overdue", "later"


def send(  # noqa: PLR0913 (an option each)
    topic: Annotated[str, Argument(metavar="TOPIC", help="Destination topic.")],
    *,
    in_: In = None,
    at: At = None,
    key: Annotated[Text, Option("--key", help="Key of the record.")] = None,
    value: Annotated[Text, Option("--value", help="Payload, as text.")] = None,
    file: Annotated[Path | None, Option("--file", help="File with the payload.")] = None,
    header: Annotated[
        list[str] | None, Option("--header", metavar="NAME=VALUE", help="May be repeated.")
    ] = None,
    own_id: Annotated[Text, Option("--id", help="Idempotency key, with the due time.")] = None,
    partition: Annotated[int | None, Option("--partition", help="Of the destination.")] = None,
    cluster: Annotated[
        Text, Option("--cluster", metavar="NAME", help="Of the destination.")
    ] = None,
    cron: Annotated[
        Text, Option("--cron", metavar="FIELDS", help="Make a schedule: '0 9 * * 1-5', @hourly.")
    ] = None,
    zone: Annotated[Text, Option("--zone", help="Of --cron, such as Europe/Berlin. [UTC]")] = None,
    until: Annotated[Text, Option("--until", metavar="TIME", help="End of the schedule.")] = None,
    misfire: Annotated[
        Text, Option("--misfire", help="Missed runs: skip, once, all. [once]")
    ] = None,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Schedule a message, and print its id.

    The payload is --value, --file or stdin, byte for byte. With --cron, the message is sent by a
    schedule, from now or from --at on, and its name is printed (duetime schedules).
    """
    recurrence = _recurrence(cron, zone, until, misfire)
    due_at, due_in = _due(at, in_, is_required=recurrence is None)
    headers = [_header(each) for each in header or []]
    spec = MessageSpec(
        topic=topic,
        value=_payload(value, file),
        key=None if key is None else os.fsencode(key),
        headers=headers,
        partition=partition,
        cluster=cluster,
    )
    settings = settings_from(kafka, config)
    # A bad message is refused before connecting.
    now_ms, unique = SystemClock().now_ms(), new_unique() if own_id is None else own_id
    record = intake_record(
        spec, recurrence, settings, at=due_at, in_=due_in, now_ms=now_ms, unique=unique
    )
    known_topics = ensure_intake_topics(settings).topics
    failed: list[KafkaError] = []
    with Producer(settings) as producer:
        producer.send(record, lambda error, _: failed.extend([error] if error else []))
    if failed:
        raise _with_repeat_options(failed[0], record)
    typer.echo(record.name)
    if cluster is not None and cluster not in settings.clusters:
        # The settings of the pipeline are what counts.
        typer.echo(
            f"note: no cluster {cluster} in these settings: check that those of the pipeline have "
            "it before this is due",
            err=True,
        )
    if cluster is None and topic not in known_topics and not create_on_demand(settings, topic):
        # A broker that creates topics has done so now, and not only when the message is due.
        typer.echo(f"note: topic {topic} does not exist: create it before this is due", err=True)


def pending(  # noqa: PLR0913 (an option each)
    *,
    topic: Annotated[Text, Option("--topic", metavar="TOPIC", help="List those for it.")] = None,
    from_: Annotated[Text, Option("--from", metavar="TIME", help="Earliest due time.")] = None,
    to: Annotated[Text, Option("--to", metavar="TIME", help="End of the due times.")] = None,
    list_: Annotated[bool, Option("--list", help="Read and list the messages.")] = False,
    limit: Annotated[
        int | None, limit_option("Maximum number of messages to list. [50; with --json all]")
    ] = None,
    as_json: Json = False,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Count or list the pending messages.

    Counts are by due time. They come from offsets alone, and include cancels and what they cancel
    until their time. With --list or --topic the messages are read, without those that are
    cancelled.
    """
    from_ms, to_ms = instant_option_ms(from_), instant_option_ms(to)
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        raise BadInput("--from is not before --to: nothing is due in between")
    settings, now_ms = connected(kafka, config, store=store), SystemClock().now_ms()
    with closing(open_reader(settings)) as reader:
        if not (list_ or topic):
            _count(overlapping(reader.pending(now_ms), from_ms, to_ms), now_ms, as_json=as_json)
            return
        shown = limit or LISTED
        # For people, one more shows that there are more.
        limit = limit if as_json else shown + 1
        found = reader.messages(now_ms, topic=topic, from_ms=from_ms, to_ms=to_ms, limit=limit)
        if not as_json:
            _list(list(found), now_ms, shown)
            return
        # Line by line: there may be millions.
        for each in found:
            typer.echo(json.dumps(_message_json(each)))


def show(
    message_id: Id,
    *,
    value: OnlyValue = False,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Show all parts of a pending message."""
    identity = MessageId.parse(message_id)
    settings, now_ms = connected(kafka, config, store=store), SystemClock().now_ms()
    with closing(open_reader(settings)) as reader:
        found = find_pending(identity, reader, settings, now_ms)
    if value:
        sys.stdout.buffer.write(found.value or b"")
        return
    pairs = [
        ("id", str(found.id)),
        ("state", "cancelled" if found.cancelled else "waiting"),
        ("due", when(found.id.due_ms, now_ms)),
        ("topic", found.topic),
    ]
    if found.expires_ms is not None:
        pairs.append(("expires", when(found.expires_ms, now_ms)))
    typer.echo(facts(pairs + record_facts(found)))


def cancel(
    message_id: Id, *, kafka: Kafka = None, store: Store = None, config: Config = None
) -> None:
    """Cancel a message, with a definite answer.

    The pending retry of a message that could not be delivered is cancelled as well.

    Exit code 0: it will not be delivered. 3: too late. 4: no such message is pending.
    """
    identity = MessageId.parse(message_id)
    client.cancel_and_confirm(identity, connected(kafka, config, store=store))
    typer.echo(f"cancelled: {identity} will not be delivered")


def reschedule(  # noqa: PLR0913 (an option each)
    message_id: Id,
    *,
    in_: In = None,
    at: At = None,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Give a message another due time.

    Prints its new id. Atomic: one record schedules the new message and cancels the old one.
    """
    identity, (due_at, due_in) = MessageId.parse(message_id), _due(at, in_)
    settings = connected(kafka, config, store=store)
    typer.echo(client.reschedule(str(identity), at=due_at, in_=due_in, settings=settings))


def by_distance(slots: Iterable[PendingSlot], now_ms: int) -> list[tuple[str, int]]:
    """Count the records by distance of their due time, without empty rows at either end."""
    labels = [f"under {format_duration(end_ms)}" for end_ms in STEPS_MS]
    counts = dict.fromkeys([OVERDUE, *labels, LATER], 0)
    for slot in slots:
        # The middle of what is left of the slot: nothing nearer is known without reading.
        ahead_ms = (max(slot.start_ms, now_ms) + slot.end_ms) // 2 - now_ms
        steps = zip(labels, STEPS_MS, strict=True)
        label = next((label for label, end_ms in steps if ahead_ms < end_ms), LATER)
        counts[OVERDUE if slot.end_ms <= now_ms else label] += slot.count
    rows = list(counts.items())
    filled = [number for number, (_, count) in enumerate(rows) if count]
    return rows[filled[0] : filled[-1] + 1] if filled else []


def _count(slots: Sequence[PendingSlot], now_ms: int, *, as_json: bool) -> None:
    total = sum(slot.count for slot in slots)
    if as_json:
        spans = [
            {"from_ms": slot.start_ms, "to_ms": slot.end_ms, "count": slot.count} for slot in slots
        ]
        typer.echo(json.dumps({"pending": total, "slots": spans}))
    elif not total:
        typer.echo("no pending messages")
    else:
        out = console()
        out.print(f"{total:,} pending record{'s' if total > 1 else ''}, cancels included\n")
        out.print(histogram(by_distance(slots, now_ms)))


def _list(found: Sequence[PendingMessage], now_ms: int, limit: int) -> None:
    if not found:
        typer.echo("no pending messages")
        return
    out, rows = console(), table("id", "due", "topic", "key", "size")
    for each in found[:limit]:
        key = "" if each.key is None else printable(each.key)
        due = when(each.due_ms, now_ms)
        rows.add_row(str(each.id), due, each.topic, key, size(len(each.value or b"")))
    out.print(rows)
    if len(found) > limit:
        out.print(f"... the first {limit}: --limit shows more")


def _message_json(found: PendingMessage) -> dict[str, object]:
    return {
        "id": str(found.id),
        "due_at_ms": found.due_ms,
        "due": format_instant(found.due_ms),
        "topic": found.topic,
        "partition": found.partition,
        "cluster": found.cluster,
        **payload_json("key", found.key),
        "value_bytes": None if found.value is None else len(found.value),
    }


def _recurrence(
    cron: str | None, zone: str | None, until: str | None, misfire: str | None
) -> Recurrence | None:
    if cron is not None:
        return Recurrence.of(cron, zone=zone, until=instant(until), misfire=misfire)
    if zone or until or misfire:
        raise BadInput("--zone, --until and --misfire need --cron: add it")
    return None


def _due(
    at: str | None, in_: str | None, *, is_required: bool = True
) -> tuple[datetime | None, timedelta | None]:
    if at is not None and in_ is not None:
        raise InvalidMessage(Reason.TWO_DUE_TIMES, "both --in and --at are given: omit one")
    if is_required and at is None and in_ is None:
        raise InvalidMessage(Reason.NO_DUE_TIME, "no due time: add --in 5s, or --at and a time")
    return instant(at), delay(in_)


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"--header {text!r} is no header: write it as name=value"
        )
    return name, os.fsencode(value)


def _payload(value: str | None, file: Path | None) -> bytes:
    if value is not None and file is not None:
        raise BadInput("both --value and --file are given: omit one")
    if value is not None:
        return os.fsencode(value)
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise BadInput(f"--file {file} cannot be read ({error.strerror})") from error
    if sys.stdin.isatty():
        raise BadInput("no payload: give --value or --file, or pipe it in")
    return sys.stdin.buffer.read()


def _with_repeat_options(error: KafkaError, record: IntakeRecord) -> KafkaError:
    """Add the options that make it the same message: the caller has not seen its id."""
    if isinstance(error, RecordRefused):
        return error
    if record.schedule is not None:
        return KafkaError(f"{error.detail}: --id {record.schedule}")
    due = format_instant(record.id.due_ms)
    return KafkaError(f"{error.detail}: --id {record.id.unique} --at {due}")
