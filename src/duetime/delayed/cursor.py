"""The cursor: which records of one partition are delivered, in a few numbers.

A delayed topic is not read in the order of its offsets, so one offset cannot say how far a reader
is. KIP-1277 takes the place of the last record returned in the order of delivery, (deliverAfter,
offset). That alone would lose what is produced *late*: with a deliverAfter before that place, after
the reader has passed it. So the cursor also says up to which offset records were known:

    deliver_after_ms, offset    the last record that was returned in order
    end                         it was chosen from the records before this offset

Delivered is what is before `end` and not behind (deliver_after_ms, offset). What is found at or
after `end` and is not behind that place is late: it is returned at once, before anything else.
While the late records of one look are being returned, in their own order, the cursor carries a
second such place for them, and nobody looks further until the last of them is out.

    offset          0    1    2    3    4         cursor after it
    deliver after   30   10   20   5    15
    at 25, three known      1 (10)                10:1:3
                            2 (20)                20:2:3
    then five known         3 (5), late           20:2:3 and 5:3:5
                            4 (15), late          20:2:5
    at 30                   0 (30)                30:0:5

Whatever the cursor is, a restart from it goes on with exactly the records that are not delivered.
"""

from dataclasses import dataclass
from typing import Self

from duetime.delayed.entries import Entries, Flags, until

#: Marks the text of a cursor, and its version.
MARK = "deliver-after-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How far the late records of a look are returned: those from the cursor's end to this one."""

    deliver_after_ms: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Which records are delivered. See above."""

    deliver_after_ms: int
    offset: int
    end: int
    late: Late | None = None

    @classmethod
    def start(cls, offset: int) -> Self:
        """Before anything was returned, of a reader that begins at this offset."""
        return cls(deliver_after_ms=-1, offset=-1, end=offset)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what `str(cursor)` gave; None of anything else."""
        mark, *parts = text.split(":")
        if mark != MARK or len(parts) not in (3, 6) or not all(map(_is_whole, parts)):
            return None
        place, late = [int(part) for part in parts[:3]], [int(part) for part in parts[3:]]
        return cls(
            deliver_after_ms=place[0],
            offset=place[1],
            end=place[2],
            late=Late(deliver_after_ms=late[0], offset=late[1], end=late[2]) if late else None,
        )

    def __str__(self) -> str:
        numbers = [self.deliver_after_ms, self.offset, self.end]
        if self.late:
            numbers += [self.late.deliver_after_ms, self.late.offset, self.late.end]
        return ":".join([MARK, *map(str, numbers)])

    @property
    def known_end(self) -> int:
        """The offset that ends the records which were known, late ones included."""
        return self.late.end if self.late else self.end

    def passed(self, entries: Entries) -> Flags:
        """Which are not behind the place in order, delivered or late."""
        return until(entries, self.deliver_after_ms, self.offset)

    def delivered(self, entries: Entries) -> Flags:
        """Which are delivered."""
        done = self.passed(entries) & (entries["offset"] < self.end)
        if self.late is None:
            return done
        late = (entries["offset"] >= self.end) & (entries["offset"] < self.late.end)
        return done | late & until(entries, self.late.deliver_after_ms, self.late.offset)

    def after_late(self, deliver_after_ms: int, offset: int, end: int) -> "Cursor":
        """Once this late record was returned, of those known up to `end`, with more to come."""
        late = Late(deliver_after_ms=deliver_after_ms, offset=offset, end=end)
        return Cursor(
            deliver_after_ms=self.deliver_after_ms, offset=self.offset, end=self.end, late=late
        )

    def known_to(self, end: int) -> "Cursor":
        """Once all late records before this offset were returned."""
        return Cursor(deliver_after_ms=self.deliver_after_ms, offset=self.offset, end=end)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdecimal()
