"""Segments: stretches of a partition's log, and the entries of their records.

The active one grows; once it is closed its entries are sorted and never change. A closed segment
that is written to a file gives its memory back until some of it comes near.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from duetime.delayed.entries import ENTRY, NONE, Entries, in_order

#: Entries that an active segment has room for at first.
ROOM = 1_024


@dataclass(slots=True)
class Active:
    """The segment that is written to: entries in the order of their offsets."""

    start: int
    begun_ms: int = 0
    count: int = 0
    #: Where the records that it knows end.
    end: int = field(init=False)
    _room: Entries = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start
        self._room = np.empty(ROOM, ENTRY)

    @property
    def entries(self) -> Entries:
        """What it holds; a view, that is only good until something is added."""
        return self._room[: self.count]

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""
        return self._room.nbytes

    def add(self, entries: Entries, now_ms: int) -> None:
        """Add entries, one or more, behind those that are there."""
        if not self.count:
            self.begun_ms = now_ms
        needed = self.count + entries.size
        if needed > self._room.size:
            # A quarter more: doubled, it would be a quarter empty on average.
            larger = np.empty(max(needed, self._room.size * 5 // 4), ENTRY)
            larger[: self.count] = self.entries
            self._room = larger
        self._room[self.count : needed] = entries
        self.count = needed
        self.end = int(entries["offset"][-1]) + 1

    def between(self, after_ms: int, until_ms: int) -> Entries:
        """Those due later than the first instant, and not later than the second."""
        times = self.entries["deliver_after_ms"]
        return self.entries[(times > after_ms) & (times <= until_ms)]

    def first_behind(self, after_ms: int) -> int | None:
        """The smallest offset of those due later; None where there is none."""
        behind = self.entries["deliver_after_ms"] > after_ms
        return int(self.entries["offset"][np.argmax(behind)]) if behind.any() else None


@dataclass(slots=True, kw_only=True)
class Closed:
    """A segment that is full: entries in the order of delivery, in memory or in a file."""

    start: int
    end: int
    count: int
    #: The times of its first and last entry; with them, it is known without looking inside whether
    #: it holds anything for some stretch of time.
    first_ms: int
    last_ms: int
    #: Reads the entries from the file; None where there is none.
    load: Callable[[], Entries] | None = None
    _entries: Entries | None = None

    @classmethod
    def of(cls, active: Active) -> "Closed":
        """The active segment, closed. It must not be empty."""
        ordered = in_order(active.entries)
        times = ordered["deliver_after_ms"]
        return cls(
            start=active.start,
            end=active.end,
            count=active.count,
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            _entries=ordered,
        )

    @property
    def entries(self) -> Entries:
        """What it holds, read from its file where it was put away."""
        if self._entries is None:
            self._entries = self.load() if self.load else NONE
        return self._entries

    @property
    def nbytes(self) -> int:
        """Memory that it takes now, in bytes."""
        return 0 if self._entries is None else self._entries.nbytes

    def put_away(self, until_ms: int) -> None:
        """Give the memory back if all is due later than this, and there is a file by now."""
        if self.first_ms > until_ms and self.load is not None:
            self._entries = None

    def between(self, after_ms: int, until_ms: int) -> Entries:
        """Those due later than the first instant, and not later than the second, in order."""
        if self.last_ms <= after_ms or self.first_ms > until_ms:
            return NONE
        times = self.entries["deliver_after_ms"]
        begin, end = np.searchsorted(times, (after_ms, until_ms), side="right")
        found: Entries = self.entries[begin:end]
        return found

    def passed(self, until_ms: int) -> None:
        """Nobody asks for this time or an earlier one again."""
        if self.last_ms <= until_ms:
            self._entries = NONE

    def first_behind(self, after_ms: int) -> int | None:
        """The smallest offset of those due later; at most that, where it would have to be read."""
        if self.last_ms <= after_ms:
            return None
        if self._entries is None:
            return self.start
        begin = np.searchsorted(self._entries["deliver_after_ms"], after_ms, side="right")
        return int(self._entries["offset"][begin:].min())
