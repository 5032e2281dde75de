"""The records themselves, kept in memory while they wait, as far as there is room.

What is due last goes first when it is full: it is read from the log again when its time comes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from confluent_kafka import Message

from duetime.delayed.entries import Entries
from duetime.delayed.log import merged
from duetime.metrics import DELAYED_REMOVED

#: Reads the records of a stretch of the log.
Read = Callable[[int, int], Iterable[list[Message]]]

#: What a record weighs in Python besides its bytes, roughly.
OBJECT_BYTES = 400


@dataclass(slots=True)
class Room:
    """How many bytes all partitions of a reader may keep, and do."""

    limit_bytes: int
    used_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more."""
        return self.used_bytes >= self.limit_bytes


@dataclass(slots=True)
class Payloads:
    """The records of one partition that are kept, by offset."""

    room: Room
    #: Records that were read from the log once more.
    read_again: int = 0
    #: Records that were gone from it when their time came; see `count_removed`.
    removed: int = 0
    #: When it is due, its size and the record, by offset.
    _kept: dict[int, tuple[int, int, Message]] = field(default_factory=dict)
    #: The size of the last one, for a guess at how many there is room for.
    _size_bytes: int = OBJECT_BYTES

    def keep(self, entries: Entries, records: Iterable[Message]) -> None:
        """Keep those of the records that have an entry, or what of them is due first."""
        if self.room.limit_bytes < OBJECT_BYTES:
            return
        times = {offset: time_ms for time_ms, offset in entries.tolist()}
        for record in records:
            offset = record.offset() or 0
            if offset in times and offset not in self._kept and self._has_room():
                self._size_bytes = size_bytes(record)
                self.room.used_bytes += self._size_bytes
                self._kept[offset] = times[offset], self._size_bytes, record

    def take(self, entries: Entries, upcoming: Entries, read: Read) -> list[Message | None]:
        """The records of these entries, no longer kept; None of what retention has removed.

        Where some have to be read again, what is upcoming is read with them.
        """
        offsets = entries["offset"].tolist()
        # Out first: what is read makes room for itself among what is kept.
        found = {each: self._taken(each) for each in offsets if each in self._kept}
        missing = [each for each in offsets if each not in found]
        if missing:
            read_now = self._read(missing, upcoming, read)
            self.count_removed(len(missing) - len(read_now))
            found |= read_now
        return [found.get(each) for each in offsets]

    def count_removed(self, count: int) -> None:
        """Note that retention has removed so many that were not delivered."""
        self.removed += count
        DELAYED_REMOVED.inc(count)

    def clear(self) -> None:
        """Keep nothing."""
        for offset in list(self._kept):
            self._taken(offset)

    def _read(self, missing: Sequence[int], upcoming: Entries, read: Read) -> dict[int, Message]:
        ahead = upcoming[: max(0, self.room.limit_bytes - self.room.used_bytes) // self._size_bytes]
        ahead = ahead[[each not in self._kept for each in ahead["offset"].tolist()]]
        wanted, found = set(missing), dict[int, Message]()
        for start, end in merged(sorted([*missing, *ahead["offset"].tolist()])):
            for records in read(start, end):
                now = {each.offset() or 0: each for each in records if each.offset() in wanted}
                found |= now
                self.read_again += len(records)
                self.keep(ahead, records)
        return found

    def _taken(self, offset: int) -> Message | None:
        _, size, record = self._kept.pop(offset, (0, 0, None))
        self.room.used_bytes -= size
        return record

    def _has_room(self) -> bool:
        if self.room.is_full and self._kept:
            times = np.fromiter((time_ms for time_ms, *_ in self._kept.values()), np.int64)
            half_ms = int(np.median(times))
            for offset in [
                each for each, (time_ms, *_) in self._kept.items() if time_ms >= half_ms
            ]:
                self._taken(offset)
        return not self.room.is_full


def size_bytes(record: Message) -> int:
    """What a record takes in memory, roughly."""
    return len(record.key() or b"") + len(record.value() or b"") + OBJECT_BYTES
