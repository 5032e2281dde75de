"""pending: what waits, counted from offsets alone, or listed by reading it."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from duetime.cli.connect import connected
from duetime.cli.display import console, histogram, printable, size, table, when
from duetime.cli.options import BadInput, Config, Json, Kafka, Store, instant_option_ms, limit
from duetime.clock import UNITS_MS, SystemClock, format_duration, format_instant
from duetime.payload import payload_json
from duetime.stores import Found, Pending
from duetime.stores.opening import open_reader
from duetime.stores.reader import within

HOUR_MS, DAY_MS = UNITS_MS["h"], UNITS_MS["d"]

#: Upper ends of the histogram's rows, in ms from now. What waits long is in wide slots: finer steps
#: could not be told apart.
STEPS_MS = (
    10_000,
    60_000,
    600_000,
    HOUR_MS,
    6 * HOUR_MS,
    DAY_MS,
    7 * DAY_MS,
    30 * DAY_MS,
    365 * DAY_MS,
)

#: How many are listed for people, unless they say.
LISTED = 50

OVERDUE, LATER = "overdue", "later"


def pending(  # noqa: PLR0913 (an option each)
    *,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="List those for this topic.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Due then or later; with a zone.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Due before then; with a zone.")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the messages, which reads them.")
    ] = False,
    limit: Annotated[int | None, limit("The most that are listed: 50; with --json all.")] = None,
    as_json: Json = False,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Show how many messages wait until when, or which.

    Counts come from offsets alone, and include cancels and what they cancel until their time.
    With --list or --topic the messages themselves are read, without those that are cancelled.
    """
    from_ms, to_ms = instant_option_ms(from_), instant_option_ms(to)
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        raise BadInput("--from is not before --to: nothing is due in between")
    settings, now_ms = connected(kafka, config, store), SystemClock().now_ms()
    reader = open_reader(settings)
    try:
        if list_ or topic:
            shown = limit or LISTED
            # For people, one more tells that there are more.
            most = limit if as_json else shown + 1
            found = reader.messages(now_ms, topic=topic, from_ms=from_ms, to_ms=to_ms, limit=most)
            if as_json:
                _list_json(found)
            else:
                _list(list(found), now_ms, shown)
        else:
            slots = within(reader.pending(now_ms), from_ms, to_ms)
            _count(slots, now_ms, as_json=as_json)
    finally:
        reader.close()


def by_distance(slots: Iterable[Pending], now_ms: int) -> list[tuple[str, int]]:
    """How many are due how soon; from the first to the last row that has any."""
    counts = dict.fromkeys([OVERDUE, *map(_label, STEPS_MS), LATER], 0)
    for slot in slots:
        counts[_step(slot, now_ms)] += slot.count
    rows = list(counts.items())
    filled = [number for number, (_, count) in enumerate(rows) if count]
    return rows[filled[0] : filled[-1] + 1] if filled else []


def _step(slot: Pending, now_ms: int) -> str:
    if slot.end_ms <= now_ms:
        return OVERDUE
    # The middle of what is left of the slot: nothing nearer is known without reading.
    ahead_ms = (max(slot.start_ms, now_ms) + slot.end_ms) // 2 - now_ms
    return next((_label(end_ms) for end_ms in STEPS_MS if ahead_ms < end_ms), LATER)


def _label(end_ms: int) -> str:
    return f"under {format_duration(end_ms)}"


def _count(slots: Sequence[Pending], now_ms: int, *, as_json: bool) -> None:
    total = sum(slot.count for slot in slots)
    if as_json:
        typer.echo(json.dumps({"pending": total, "slots": [_slot_json(slot) for slot in slots]}))
        return
    if not total:
        typer.echo("nothing waits")
        return
    out = console()
    out.print(f"{total:,} {'record waits' if total == 1 else 'records wait'}, cancels included\n")
    out.print(histogram(by_distance(slots, now_ms)))


def _slot_json(slot: Pending) -> dict[str, int]:
    return {"from_ms": slot.start_ms, "to_ms": slot.end_ms, "count": slot.count}


def _list_json(messages: Iterable[Found]) -> None:
    """A line each, as they are found: there may be millions."""
    for each in messages:
        typer.echo(json.dumps(_message_json(each)))


def _list(found: Sequence[Found], now_ms: int, limit: int) -> None:
    if not found:
        typer.echo("nothing waits")
        return
    out, rows = console(), table("id", "due", "topic", "key", "size")
    for each in found[:limit]:
        rows.add_row(*_row(each, now_ms))
    out.print(rows)
    if len(found) > limit:
        out.print(f"... the first {limit}: --limit shows more")


def _row(found: Found, now_ms: int) -> tuple[str, ...]:
    return (
        str(found.id),
        when(found.due_ms, now_ms),
        found.topic,
        "" if found.key is None else printable(found.key),
        size(len(found.value or b"")),
    )


def _message_json(found: Found) -> dict[str, Any]:
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
