"""The state of a queue, from offsets and the tracker's notes. No Spark.

The consumer group `duetime.redelivery` commits, on a queue's markers topic, the first start marker
that is still valid, as kmq's tracker does, and with it a `TrackerState` as JSON. The notes are for
monitoring: the tracker itself continues from its checkpoint.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, Self

from confluent_kafka import Message

from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import OffsetRange, Offsets, Partition
from duetime.kafka.range_reader import RangeReader

log = logging.getLogger(__name__)

#: How often redeliveries are logged, in seconds.
LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerState:
    """The state of a partition or a queue, as of the tracker's last commit."""

    #: Messages that are being processed.
    in_flight: int = 0
    #: When the oldest of them was started, epoch ms; None if there is none.
    oldest_ms: int | None = None
    #: Messages that were ever redelivered or became dead letters.
    redelivered_total: int = 0
    #: The next timeout, epoch ms; None if there is none.
    next_ms: int | None = None

    def text(self) -> str:
        """Return the state as a commit's metadata."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | None) -> Self:
        """Parse a commit's metadata. Unknown fields are ignored, missing ones have defaults."""
        noted = json.loads(text) if text else {}
        return cls(**{each.name: noted[each.name] for each in fields(cls) if each.name in noted})

    def __add__(self, other: "TrackerState") -> "TrackerState":
        return TrackerState(
            in_flight=self.in_flight + other.in_flight,
            oldest_ms=_earliest(self.oldest_ms, other.oldest_ms),
            redelivered_total=self.redelivered_total + other.redelivered_total,
            next_ms=_earliest(self.next_ms, other.next_ms),
        )


def _earliest(*instants: int | None) -> int | None:
    return min((each for each in instants if each is not None), default=None)


class TrackerOffsets:
    """The tracker's states, by partition of the markers topics. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._offsets = Offsets(settings, TopicNames(settings).redelivery_group)
        self._known: dict[Partition, TrackerState] = {}
        self._logged_total = 0
        self._logged_s = time.monotonic()

    def of(self, queue: str) -> TrackerState:
        """Return the last committed state of a queue. Raises KafkaError."""
        notes = self._offsets.notes(self._partitions(queue))
        return sum((TrackerState.of(text) for text in notes.values()), TrackerState())

    def next_ms(self) -> dict[Partition, int | None]:
        """Return the next timeout of each partition. Raises KafkaError."""
        self._load(each for queue in self._settings.queues for each in self._partitions(queue))
        return {partition: state.next_ms for partition, state in self._known.items()}

    def note(self, rows: Iterable[Any]) -> None:
        """Commit the result of a tracker's batch: rows of partitions, and of redelivered messages.

        A row with an offset is a message. A failure is logged: the next batch commits it all.
        """
        partitions = {self._partition(row): row for row in rows if row.offset is None}
        try:
            self._load(partitions)
            for row in rows:
                if row.offset is not None:
                    self._known[self._partition(row)] += TrackerState(redelivered_total=1)
            for partition, row in partitions.items():
                self._known[partition] = replace(
                    self._known[partition],
                    in_flight=row.open,
                    oldest_ms=row.oldest_ms,
                    next_ms=row.next_ms,
                )
            self._offsets.commit(
                {each: row.position for each, row in partitions.items()},
                {each: self._known[each].text() for each in partitions},
            )
        except KafkaError as error:
            log.warning("queue state not committed error=%s", error)
        self._log_redelivered()

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _load(self, partitions: Iterable[Partition]) -> None:
        unknown = [each for each in partitions if each not in self._known]
        if unknown:
            notes = self._offsets.notes(unknown)
            loaded = {each: TrackerState.of(notes.get(each)) for each in unknown}
            self._logged_total += sum(each.redelivered_total for each in loaded.values())
            self._known |= loaded

    def _log_redelivered(self) -> None:
        if time.monotonic() < self._logged_s + LOG_INTERVAL_S:
            return
        self._logged_s = time.monotonic()
        state = sum(self._known.values(), TrackerState())
        if messages := state.redelivered_total - self._logged_total:
            log.info("redelivered messages=%d in_flight=%d", messages, state.in_flight)
        self._logged_total = state.redelivered_total

    def _partition(self, row: Any) -> Partition:  # noqa: ANN401 (a Spark row)
        return self._settings.queues[row.topic].markers_topic(row.topic), row.partition

    def _partitions(self, queue: str) -> list[Partition]:
        settings = self._settings.queues[queue]
        return [(settings.markers_topic(queue), each) for each in range(settings.partitions)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The state of a queue, as of the tracker's last batch."""

    queue: str
    #: Messages that no worker has read.
    waiting: int
    #: Messages that are being processed.
    in_flight: int
    #: When the oldest of them was started, epoch ms; None if there is none.
    oldest_ms: int | None
    #: Messages that were ever redelivered.
    redelivered: int
    #: Messages that ever became dead letters.
    dead: int


def stats(settings: Settings, queue: str) -> QueueStats:
    """Return the state of a queue. Raises KafkaError, and ConfigError if there is none."""
    waiting = sum(each.count for each in unread(settings, queue))
    with closing(Offsets(settings)) as offsets:
        partitions = offsets.readable_partitions(settings.queue(queue).dead_topic(queue))
        dead = sum(offsets.ends(partitions).values())
    with closing(TrackerOffsets(settings)) as tracker:
        state = tracker.of(queue)
    return QueueStats(
        queue=queue,
        waiting=waiting,
        in_flight=state.in_flight,
        oldest_ms=state.oldest_ms,
        redelivered=max(state.redelivered_total - dead, 0),
        dead=dead,
    )


def peek(settings: Settings, queue: str, limit: int) -> Iterator[Message]:
    """Yield messages that no worker has read, by offset within each partition."""
    ranges = unread(settings, queue)
    with RangeReader(settings) as reader:
        yield from islice(reader.records(ranges), limit)


def unread(settings: Settings, queue: str) -> list[OffsetRange]:
    """Return the ranges that the queue's workers have not committed. Raises as `stats` does."""
    with closing(Offsets(settings, settings.queue(queue).group)) as offsets:
        partitions = offsets.readable_partitions(queue)
        starts, ends = offsets.starts(partitions), offsets.ends(partitions)
        committed = offsets.committed(partitions)
    return [
        OffsetRange(*each, max(committed.get(each, 0), starts[each]), ends[each])
        for each in partitions
    ]
