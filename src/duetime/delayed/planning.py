"""What a batch of Spark's source has: plans over the partitions of some topics, without Spark."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import OFFSET_INVALID, TopicPartition

from duetime.clock import SystemClock
from duetime.delayed.cursor import Cursor
from duetime.delayed.entries import NONE, Entries, in_order, joined
from duetime.delayed.log import Place, entries
from duetime.delayed.opening import Opening
from duetime.delayed.options import ConsumerOptions
from duetime.delayed.partition import DelayedPartition, Position

#: Where each partition is, and as its note how many records were removed from it.
Positions = Mapping[Place, Position]

#: How often is looked for new partitions, in seconds.
LOOK_S = 30.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """The records of one partition between two positions."""

    place: Place
    entries: Entries
    #: Nothing before this offset is asked for again.
    first: int
    #: What is delivered with these.
    after: Cursor


class Planner:
    """Plans batches; each goes on where the one before ended. Not thread-safe."""

    def __init__(self, properties: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._topics = topics
        self._opening = Opening(ConsumerOptions.of(properties))
        self._clock = SystemClock()
        self._partitions: dict[Place, DelayedPartition] = {}
        #: What was planned last, for each partition.
        self._planned: dict[Place, tuple[Position, Position, Entries]] = {}
        #: When and where everything ends, if it does.
        self._final: tuple[int, dict[Place, int]] | None = None
        self._places: list[Place] = []
        #: Whose turn it is to be the first.
        self._turn = 0
        self._looked_s = -LOOK_S

    def first(self) -> dict[Place, Position]:
        """Where to begin with nothing."""
        return {place: self._first(place) for place in self._all_places()}

    def latest(self, start: Positions, most: int | None) -> dict[Place, Position]:
        """Where a batch ends that begins there and has what is due now, at most so many."""
        now_ms, ends = self._final or (self._clock.now_ms(), {})
        known = dict(start) | {
            place: self._beginning(place) for place in self._all_places() if place not in start
        }
        opened = {place: self._partition(place, at, now_ms) for place, at in known.items()}
        self._read_on(opened, ends, now_ms)
        found = self._due(opened, now_ms, most)
        return {place: self._plan(place, at, found[place]) for place, at in known.items()}

    def end_here(self) -> None:
        """From now on, what is due now and there now is all."""
        ends = {place: self._opening.reader.bounds(place)[1] for place in self._all_places()}
        self._final = self._clock.now_ms(), ends

    def between(self, start: Positions, end: Positions) -> list[Stretch]:
        """What is delivered at the end and was not at the start."""
        stretches = []
        for place, after in end.items():
            before = start[place] if place in start else self._beginning(place)
            found = self._between(place, before, after)
            if found.size:
                stretches.append(Stretch(place, found, before.offset, after.cursor))
        return stretches

    def committed(self, positions: Positions) -> None:
        """Forget what is before these."""
        for place, position in positions.items():
            if place in self._partitions:
                self._partitions[place].committed(position)

    def close(self) -> None:
        """Close the connections."""
        self._opening.close()

    def _read_on(
        self, partitions: Mapping[Place, DelayedPartition], ends: Mapping[Place, int], now_ms: int
    ) -> None:
        """Tell the indexes what their logs have got, up to these ends or the present ones."""
        reader = self._opening.reader
        bounds = reader.all_bounds(list(partitions))
        missing = {
            place: partitions[place].missing(first, ends.get(place, end))
            for place, (first, end) in bounds.items()
        }
        for place, records in reader.all_batches(missing):
            partitions[place].append(records, now_ms)

    def _due(
        self, partitions: Mapping[Place, DelayedPartition], now_ms: int, most: int | None
    ) -> dict[Place, Entries]:
        """What is due in each, at most so many: as many of each, then what others leave over."""
        if most is None:
            return {place: each.take_entries(now_ms, None) for place, each in partitions.items()}
        # In turn, because where there are more partitions than that, some get nothing.
        self._turn = (self._turn + 1) % len(partitions)
        order = [*partitions][self._turn :] + [*partitions][: self._turn]
        found, left = dict.fromkeys(order, NONE), most
        for share in (most // len(order), most):
            for place in order:
                more = partitions[place].take_entries(now_ms, min(share, left))
                found[place], left = joined(found[place], more), left - more.size
        return found

    def _plan(self, place: Place, start: Position, found: Entries) -> Position:
        after = _after(start, self._partitions[place])
        self._planned[place] = start, after, found
        return after

    def _partition(self, place: Place, start: Position, now_ms: int) -> DelayedPartition:
        known = self._partitions.get(place)
        if known is None or known.position().cursor != start.cursor:
            # The first batch, or one that was planned by another process.
            known = self._opening.open(_asked(place, start), now_ms)
            self._partitions[place] = known
        return known

    def _between(self, place: Place, start: Position, end: Position) -> Entries:
        if start.cursor == end.cursor:
            return NONE
        planned = self._planned.get(place)
        if planned and (planned[0].cursor, planned[1].cursor) == (start.cursor, end.cursor):
            return planned[2]
        # After a restart Spark asks for the batch that was planned before.
        reader, group = self._opening.reader, self._opening.options.policy.group
        found = [
            entries(records, group)
            for records in reader.batches(place, start.offset, end.cursor.known_end)
        ]
        known = in_order(*found)
        return known[end.cursor.delivered(known) & ~start.cursor.delivered(known)]

    def _first(self, place: Place) -> Position:
        return self._opening.position(TopicPartition(*place, OFFSET_INVALID))

    def _beginning(self, place: Place) -> Position:
        """Of a partition that was added since: where the log begins, or records were lost."""
        first, _ = self._opening.reader.bounds(place)
        return Position(first, Cursor.start(first))

    def _all_places(self) -> list[Place]:
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            self._places = [
                place for topic in self._topics for place in self._opening.reader.places(topic)
            ]
        return self._places


def _after(start: Position, partition: DelayedPartition) -> Position:
    at, removed = partition.position(), partition.payloads.removed
    partition.payloads.removed = 0
    if at.cursor == start.cursor and not removed:
        # The offset alone would make a batch of nothing each time the log moves.
        return start
    return replace(at, note=str(int(start.note or 0) + removed))


def _asked(place: Place, position: Position) -> TopicPartition:
    return TopicPartition(*place, position.offset, metadata=position.metadata)
