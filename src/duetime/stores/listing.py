"""Messages that wait, in the order in which they are due, without holding all of them.

A partition's waiting records are one or two *stretches*: what is due in the slot that it is filling
with now, and before that what an earlier turn of the ring has left. Stretches of different levels
overlap in time, so they are merged. A stretch is read when its time has come in the merge: then
every record that can have the same due time is known, cancels too, whatever level it waits on.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from duetime.message import LATEST_MS
from duetime.stores import Found, OffsetRange
from duetime.stores.records import Entry, RangeReader
from duetime.stores.selection import Position, Selection
from duetime.wheel import Slot

#: The most of one stretch that is held in memory, in bytes. A longer one is read several times.
HELD_BYTES = 64 * 1024 * 1024

#: Before any message, and behind any.
BEFORE_ALL, BEHIND_ALL = Position(-1, ""), Position(LATEST_MS + 1, "")

#: A message and where it comes.
Placed = tuple[Position, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Records of one partition that are due from `start_ms` up to, not including, `end_ms`."""

    slot: Slot
    start_ms: int
    end_ms: int
    range: OffsetRange

    def overlaps(self, from_ms: int, to_ms: int) -> bool:
        """Whether a record in it may be due from `from_ms` up to, not including, `to_ms`."""
        return self.start_ms < to_ms and self.end_ms > from_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One look through some stretches."""

    reader: RangeReader
    stretches: Sequence[Stretch]
    selection: Selection
    held_bytes: int = HELD_BYTES
    #: By their positions: a cancel of another instant than its message's cancels nothing.
    _cancelled: set[Position] = field(default_factory=set, init=False)

    def __iter__(self) -> Iterator[Found]:
        """Messages by their positions, each once."""
        last: Position | None = None
        streams = [self._stream(stretch) for stretch in self.stretches]
        for position, entry in heapq.merge(*streams, key=_position):
            if entry is not None and position != last and position not in self._cancelled:
                last = position
                yield entry.found(cancelled=False)

    def _stream(self, stretch: Stretch) -> Iterator[tuple[Position, Entry | None]]:
        # The merge takes a stream's first element at once and the second when the first's time has
        # come: until then nothing is read.
        yield Position(stretch.start_ms, ""), None
        after, complete = BEFORE_ALL, False
        while not complete:
            entries, complete = self._part(stretch, after)
            yield from entries
            after = entries[-1][0] if entries else after

    def _part(self, stretch: Stretch, after: Position) -> tuple[list[Placed], bool]:
        """The next messages after these, as many as may be held, and whether they are the last."""
        held, size_bytes, last = list[Placed](), 0, BEHIND_ALL
        for position, entry in self._selected(stretch):
            if not after < position < last:
                continue
            held.append((position, entry))
            size_bytes += entry.size_bytes
            if size_bytes > self.held_bytes and len(held) > 1:
                held, size_bytes = _nearest(held, self.held_bytes // 2)
                last = held[-1][0]
        held.sort(key=_position)
        return held, last is BEHIND_ALL

    def _selected(self, stretch: Stretch) -> Iterator[Placed]:
        """The messages asked for; cancels are noted on the way."""
        for entry in self.reader.entries([stretch.range]):
            position = entry.position
            if not self.selection.takes(entry.topic, position):
                continue
            if entry.topic is None:
                self._cancelled.add(position)
            else:
                yield position, entry


def merged(streams: Iterable[Iterator[Found]]) -> Iterator[Found]:
    """The messages of all, each of which has them by their positions; each once."""
    last: Position | None = None
    for each in heapq.merge(*streams, key=lambda found: found.position):
        if each.position != last:
            last = each.position
            yield each


def _nearest(held: list[Placed], most_bytes: int) -> tuple[list[Placed], int]:
    """The first of them, as many as have so many bytes, and how many those are; one at least."""
    # A sort that keeps the order of what is alike: of duplicates, the first.
    held.sort(key=_position)
    kept, size_bytes = list[Placed](), 0
    for each in held:
        if kept and size_bytes + each[1].size_bytes > most_bytes:
            break
        kept.append(each)
        size_bytes += each[1].size_bytes
    return kept, size_bytes


def _position(placed: tuple[Position, object]) -> Position:
    return placed[0]
