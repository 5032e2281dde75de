"""How a queue is doing, and what waits in it: from offsets and the tracker's notes. No Spark."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from confluent_kafka import Message

from duetime.config import Settings
from duetime.kmq.notes import Notes
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import RangeReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The state of a queue, as of the tracker's last batch."""

    queue: str
    #: Messages that no worker has read yet.
    waiting: int
    #: Messages that somebody works on, or did when he was last heard of.
    in_flight: int
    #: Since when the oldest of them is worked on, epoch ms; None where there is none.
    oldest_ms: int | None
    #: Messages that were delivered again, ever.
    redelivered: int
    #: Messages that were given up, ever.
    dead: int


def stats(settings: Settings, queue: str) -> Stats:
    """Ask Kafka. Raises KafkaError, and ConfigError where there is no such queue."""
    waiting = sum(each.count for each in unread(settings, queue))
    dead = _dead(settings, queue)
    notes = Notes(settings)
    try:
        known = notes.of(queue)
    finally:
        notes.close()
    return Stats(
        queue=queue,
        waiting=waiting,
        in_flight=known.open,
        oldest_ms=known.oldest_ms,
        redelivered=max(known.out - dead, 0),
        dead=dead,
    )


def peek(settings: Settings, queue: str, limit: int) -> Iterator[Message]:
    """Messages that no worker has read yet, in order within each partition; they stay unread."""
    ranges = unread(settings, queue)
    with RangeReader(settings) as reader:
        yield from islice(reader.records(ranges), limit)


def unread(settings: Settings, queue: str) -> list[OffsetRange]:
    """What the queue's workers have not committed. Raises as `stats` does."""
    offsets = Offsets(settings, settings.queue(queue).group)
    try:
        places = offsets.readable_places(queue)
        starts, ends = offsets.starts(places), offsets.ends(places)
        committed = offsets.committed(places)
    finally:
        offsets.close()
    firsts = {place: max(committed.get(place, 0), starts[place]) for place in places}
    return [OffsetRange(*place, firsts[place], ends[place]) for place in places]


def _dead(settings: Settings, queue: str) -> int:
    """How many dead letters it ever had."""
    offsets = Offsets(settings, f"{settings.namespace}.reader")
    try:
        places = offsets.readable_places(settings.queue(queue).dead_topic(queue))
        return sum(offsets.ends(places).values())
    finally:
        offsets.close()
