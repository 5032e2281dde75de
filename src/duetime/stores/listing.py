"""Messages that wait, in the order in which they are due, without holding all of them.

A partition's waiting records are one or two *stretches*: what is due in the slot that it is filling
with now, and before that what an earlier turn of the ring has left. Stretches of different levels
overlap in time, so they are merged. A stretch is read when its time has come in the merge: then
every record that can have the same due time is known, cancels too, whatever level it waits on.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from duetime.message import MessageId
from duetime.stores import Found, OffsetRange
from duetime.stores.records import Entry, RangeReader
from duetime.wheel import Slot

#: The most of one stretch that is held in memory, in bytes. A longer one is read several times.
HELD_BYTES = 64 * 1024 * 1024

#: Before any record: offsets begin at 0.
BEFORE_ALL = (-1, -1)


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
class Selection:
    """Which messages are asked for: due from `from_ms` up to, not including, `to_ms`."""

    from_ms: int
    to_ms: int
    topic: str | None = None

    def takes(self, entry: Entry) -> bool:
        """Whether the message is one of them. A cancel, which names no topic, counts too."""
        to_topic = entry.topic is None or self.topic in (None, entry.topic)
        return to_topic and self.from_ms <= entry.due_ms < self.to_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One look through some stretches."""

    reader: RangeReader
    stretches: Sequence[Stretch]
    selection: Selection
    held_bytes: int = HELD_BYTES
    _cancelled: set[MessageId] = field(default_factory=set, init=False)

    def __iter__(self) -> Iterator[Found]:
        """Messages by due time, and by arrival where that is the same; each id once."""
        due_ms, seen = -1, set[str]()
        for entry in self._merged():
            if entry.due_ms != due_ms:
                due_ms, seen = entry.due_ms, set()
            if entry.id.unique not in seen and entry.id not in self._cancelled:
                seen.add(entry.id.unique)
                yield entry.found(cancelled=False)

    def _merged(self) -> Iterator[Entry]:
        streams = [self._stream(stretch) for stretch in self.stretches]
        for _, entry in heapq.merge(*streams, key=lambda each: each[0]):
            if entry is not None:
                yield entry

    def _stream(self, stretch: Stretch) -> Iterator[tuple[tuple[int, int], Entry | None]]:
        # The merge takes a stream's first element at once and the second when the first's time has
        # come: until then nothing is read.
        yield (stretch.start_ms, -1), None
        after, complete = BEFORE_ALL, False
        while not complete:
            entries, complete = self._part(stretch, after)
            for entry in entries:
                yield entry.order, entry
            after = entries[-1].order if entries else after

    def _part(self, stretch: Stretch, after: tuple[int, int]) -> tuple[list[Entry], bool]:
        """The next messages after these, as many as may be held, and whether they are the last."""
        held: list[tuple[int, int, Entry]] = []
        room, complete = self.held_bytes, True
        for entry in self._selected(stretch):
            if entry.order > after:
                heapq.heappush(held, (-entry.due_ms, -entry.offset, entry))
                room -= entry.size_bytes
            while room < 0 and len(held) > 1:
                room += heapq.heappop(held)[-1].size_bytes
                complete = False
        return [entry for *_, entry in sorted(held, reverse=True)], complete

    def _selected(self, stretch: Stretch) -> Iterator[Entry]:
        """The messages asked for; cancels are noted on the way."""
        for entry in self.reader.entries([stretch.range]):
            if not self.selection.takes(entry):
                continue
            if entry.topic is None:
                self._cancelled.add(entry.id)
            else:
                yield entry


def place(found: Found) -> MessageId:
    """Where it is in a listing: its id, but with the time at which it is due now."""
    return MessageId(due_ms=found.due_ms, unique=found.id.unique)


def after(messages: Iterator[Found], last: MessageId) -> Iterator[Found]:
    """Of messages that begin at the due time of `last`, a place, those that follow it.

    Where it waits no more, all of them: a message may be seen twice, but none is passed over.
    """
    same: list[Found] = []
    for each in messages:
        if place(each) == last:
            break
        same.append(each)
        if each.due_ms > last.due_ms:
            yield from same
            break
    else:
        yield from same
    yield from messages
