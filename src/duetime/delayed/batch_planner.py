"""Plans the batches of Spark's source over the partitions of some topics. Does not import Spark."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import OFFSET_INVALID, TopicPartition

from duetime.core.clock import SystemClock
from duetime.delayed.group import ConsumerOptions
from duetime.delayed.index import Cursor
from duetime.delayed.partition import CommittedPosition, DelayedPartition, PartitionOpener
from duetime.delayed.segments import NONE, Entries, in_order, joined, record_entries
from duetime.kafka.offsets import Partition

#: The position in each partition; its note is the number of records removed from it.
Positions = Mapping[Partition, CommittedPosition]

#: Interval in seconds at which new partitions are discovered.
DISCOVERY_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class EntryRange:
    """The records of one partition between two positions."""

    place: Partition
    entries: Entries
    #: Nothing before this offset is read again.
    first: int
    #: The cursor after these records.
    after: Cursor


class BatchPlanner:
    """Plans batches; each continues where the last one ended. Not thread-safe."""

    def __init__(self, properties: Mapping[str, Any], topics: Sequence[str]) -> None:
        """`properties` are those of a delayed consumer."""
        self._topics = topics
        self._opener = PartitionOpener(ConsumerOptions.of(properties))
        self._reader = self._opener.reader
        self._clock = SystemClock()
        self._partitions: dict[Partition, DelayedPartition] = {}
        #: Start, end and entries of the last batch planned, by partition.
        self._planned: dict[Partition, tuple[CommittedPosition, CommittedPosition, Entries]] = {}
        #: The time and the offsets at which everything ends, if it does.
        self._final: tuple[int, dict[Partition, int]] | None = None
        self._places: list[Partition] = []
        #: Rotates which partition is the first in a batch.
        self._rotation = 0
        self._discovered_s = -DISCOVERY_INTERVAL_S

    def first(self) -> dict[Partition, CommittedPosition]:
        """Return the positions of a query without a checkpoint."""
        return {
            place: self._opener.position(TopicPartition(*place, OFFSET_INVALID))
            for place in self._all_places()
        }

    def latest(self, start: Positions, limit: int | None) -> dict[Partition, CommittedPosition]:
        """Return the end of a batch that begins there, of up to `limit` records due now."""
        now_ms, ends = self._final or (self._clock.now_ms(), {})
        known = dict(start) | {
            place: self._beginning(place) for place in self._all_places() if place not in start
        }
        opened = {place: self._partition(place, at, now_ms) for place, at in known.items()}
        self._read_logs(opened, ends, now_ms)
        found = self._take(opened, now_ms, sys.maxsize if limit is None else limit)
        result = {}
        for place, at in known.items():
            result[place] = _position_after(at, opened[place])
            self._planned[place] = at, result[place], found[place]
        return result

    def end_here(self) -> None:
        """End with what is in the logs and due now."""
        ends = {place: self._reader.bounds(place)[1] for place in self._all_places()}
        self._final = self._clock.now_ms(), ends

    def between(self, start: Positions, end: Positions) -> list[EntryRange]:
        """Return what is delivered at the end and was not at the start."""
        ranges = []
        for place, after in end.items():
            before = start[place] if place in start else self._beginning(place)
            found = self._between(place, before, after)
            if found.size:
                ranges.append(EntryRange(place, found, before.offset, after.cursor))
        return ranges

    def committed(self, positions: Positions) -> None:
        """Free what is before these positions."""
        for place, position in positions.items():
            if place in self._partitions:
                self._partitions[place].committed(position)

    def close(self) -> None:
        """Close the connections."""
        self._opener.close()

    def _partition(
        self, place: Partition, start: CommittedPosition, now_ms: int
    ) -> DelayedPartition:
        known = self._partitions.get(place)
        if known is None or known.position().cursor != start.cursor:
            # The first batch, or one after a batch that another process planned.
            known = self._partitions[place] = self._opener.open(place, start, now_ms)
        return known

    def _read_logs(
        self,
        partitions: Mapping[Partition, DelayedPartition],
        ends: Mapping[Partition, int],
        now_ms: int,
    ) -> None:
        """Append what the logs have next, up to these ends or the present ones."""
        bounds = self._reader.all_bounds(list(partitions))
        missing = {
            place: partitions[place].missing(first, ends.get(place, end))
            for place, (first, end) in bounds.items()
        }
        for place, records in self._reader.all_batches(missing):
            partitions[place].append(records, now_ms)

    def _take(
        self, partitions: Mapping[Partition, DelayedPartition], now_ms: int, limit: int
    ) -> dict[Partition, Entries]:
        """Take due entries: an equal share of each partition, then what others leave over."""
        # In rotation, because some get nothing if there are more partitions than `limit`.
        self._rotation = (self._rotation + 1) % len(partitions)
        order = [*partitions][self._rotation :] + [*partitions][: self._rotation]
        found, left = dict.fromkeys(order, NONE), limit
        for share in (limit // len(order), limit):
            for place in order:
                more = partitions[place].take_entries(now_ms, min(share, left))
                found[place], left = joined(found[place], more), left - more.size
        return found

    def _between(
        self, place: Partition, start: CommittedPosition, end: CommittedPosition
    ) -> Entries:
        if start.cursor == end.cursor:
            return NONE
        planned = self._planned.get(place)
        if planned and (planned[0].cursor, planned[1].cursor) == (start.cursor, end.cursor):
            return planned[2]
        # After a restart Spark repeats the batch that was planned last.
        group = self._opener.options.group
        batches = self._reader.batches(place, start.offset, end.cursor.known_end)
        known = in_order(*(record_entries(records, group) for records in batches))
        return known[end.cursor.delivered(known) & ~start.cursor.delivered(known)]

    def _beginning(self, place: Partition) -> CommittedPosition:
        """Return the position of a partition that was added to its topic."""
        return CommittedPosition.start(self._reader.bounds(place)[0])

    def _all_places(self) -> list[Partition]:
        if time.monotonic() - self._discovered_s >= DISCOVERY_INTERVAL_S:
            self._discovered_s = time.monotonic()
            self._places = [
                place for topic in self._topics for place in self._reader.partitions(topic)
            ]
        return self._places


def _position_after(start: CommittedPosition, partition: DelayedPartition) -> CommittedPosition:
    at, removed = partition.position(), partition.cache.removed
    partition.cache.removed = 0
    if at.cursor == start.cursor and not removed:
        # A new offset alone would make an empty batch each time the log grows.
        return start
    return replace(at, note=str(int(start.note or 0) + removed))
