r"""The deliver-after index of one partition: which records are to be returned next.

The log is in the order of its offsets, and is read once. Each record leaves an entry, (deliver
after, offset), in the active segment. A segment that is full or old is closed, sorted, and written
to a file, so that the log need not be read again after a crash. Closed segments are runs, each in
the order of delivery, and a merge of them gives the order of the whole partition:

    log       offsets 0..65535      65536..131071       131072 ...
    entries   closed, in a file     closed, in a file   active, in memory
                    \                     |                 /
    near            what is due within a second, merged and in order
                                          |
    take            what is due now

Only the near entries are merged, a second's worth at a time: everything due up to `near_until` is
near or returned already, and everything later is in the segments alone. A new entry that is due
soon therefore joins the near ones, and the segments are read twice a second.

Time is an argument, and Kafka is not here: a reader of the log appends its entries in the order of
the offsets.
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from duetime.delayed.segments import (
    NONE,
    ActiveSegment,
    ClosedSegment,
    Entries,
    Flags,
    SegmentFiles,
    due,
    in_order,
    joined,
    until,
)

#: How far ahead the near entries reach when the segments are read, and how long before their end
#: the segments are read again, in ms.
NEAR_MS = 1_000
READ_AGAIN_MS = NEAR_MS // 2

#: The text of a cursor: its version, the three numbers of a place, and those of a late one.
TEXT = re.compile("deliver-after-1(:-?[0-9]+){3}((:-?[0-9]+){3})?")


class Late(NamedTuple):
    """The last late record returned, of those from the cursor's end to this end."""

    deliver_after_ms: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """The records of a partition that are delivered, in a few numbers.

    A delayed topic is not read in the order of its offsets, so one offset cannot say how far a
    reader is. KIP-1277 takes the place of the last record returned in the order of delivery,
    (deliverAfter, offset). That alone would lose what is produced *late*: with a deliverAfter
    before that place, after the reader has passed it. The cursor therefore also has the offset up
    to which records were known:

        deliver_after_ms, offset    the last record that was returned in order
        end                         it was chosen among the records before this offset

    A record before `end` that is not behind (deliver_after_ms, offset) is delivered. A record at or
    after `end` that is not behind that place is late: it is returned at once, before all others.
    While the late records of one check are being returned, in their own order, the cursor carries a
    second place for them, and no later records are checked until the last of them is returned.

        offset          0    1    2    3    4         cursor after it
        deliver after   30   10   20   5    15
        at 25, three known      1 (10)                10:1:3
                                2 (20)                20:2:3
        then five known         3 (5), late           20:2:3 and 5:3:5
                                4 (15), late          20:2:5
        at 30                   0 (30)                30:0:5

    A restart from any cursor continues with exactly the records that are not delivered.
    """

    deliver_after_ms: int
    offset: int
    end: int
    late: Late | None = None

    @classmethod
    def start(cls, offset: int) -> Self:
        """Return the cursor of a reader that begins at this offset."""
        return cls(-1, -1, offset)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the result of `str(cursor)`; None for anything else."""
        if not TEXT.fullmatch(text):
            return None
        deliver_after_ms, offset, end, *late = map(int, text.split(":")[1:])
        return cls(deliver_after_ms, offset, end, Late(*late) if late else None)

    def __str__(self) -> str:
        numbers = self.deliver_after_ms, self.offset, self.end, *(self.late or ())
        return ":".join(["deliver-after-1", *map(str, numbers)])

    @property
    def known_end(self) -> int:
        """The end of the records that were known, late ones included."""
        return self.late.end if self.late else self.end

    def passed(self, entries: Entries) -> Flags:
        """Flag the entries that are not behind the place in order, delivered or late."""
        return until(entries, self.deliver_after_ms, self.offset)

    def delivered(self, entries: Entries) -> Flags:
        """Flag the delivered entries."""
        done = self.passed(entries) & (entries["offset"] < self.end)
        if self.late is None:
            return done
        late = (entries["offset"] >= self.end) & (entries["offset"] < self.late.end)
        return done | late & until(entries, self.late.deliver_after_ms, self.late.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """The active segment is closed when it has this many records or this age."""

    records: int = 65_536
    age_ms: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DueBatch:
    """Due records in the order of delivery: either all late or none."""

    entries: Entries
    #: The cursor before the first of them.
    before: Cursor
    #: They were chosen among the records before this offset.
    end: int
    late: bool = False
    #: True if more late records follow in the next batch.
    more: bool = False

    def cursor(self, number: int) -> Cursor:
        """Return the cursor after the record at this index of the batch."""
        deliver_after_ms, offset = self.entries[number].tolist()
        if not self.late:
            return Cursor(deliver_after_ms, offset, self.end)
        if self.more or number < self.entries.size - 1:
            return replace(self.before, late=Late(deliver_after_ms, offset, self.end))
        return replace(self.before, end=self.end, late=None)


class DeliverAfterIndex:
    """The index of one partition, with the place of its reader. Not thread-safe.

    After a restart, `adopt` the segments in files and `append` what the log has between and after
    them, from the committed offset on, and at least as far as the cursor knew.
    """

    def __init__(
        self,
        cursor: Cursor,
        start: int,
        *,
        files: SegmentFiles | None = None,
        limits: SegmentLimits | None = None,
    ) -> None:
        """`start` is the committed offset: everything before it is delivered."""
        self.cursor = cursor
        self._files = files
        self._limits = limits or SegmentLimits()
        self._segments: list[ClosedSegment] = []
        self._active = ActiveSegment(start)
        #: Everything due up to then is near, late, arrived or returned; the rest is in segments.
        self._near_until_ms = cursor.deliver_after_ms
        self._near = NONE
        self._late = NONE
        #: Entries from `known_end` on: not checked so far whether they are late.
        self._arrived = NONE
        self._known_end = cursor.known_end
        self._resumed = False

    @property
    def end(self) -> int:
        """The first offset that is not appended."""
        return self._active.end

    @property
    def count(self) -> int:
        """The number of entries of all segments, in memory or in files."""
        return sum(each.count for each in self._all_segments())

    @property
    def nbytes(self) -> int:
        """The memory used, in bytes."""
        outside = self._near, self._late, self._arrived
        return sum(each.nbytes for each in [*self._all_segments(), *outside])

    def append(self, entries: Entries, now_ms: int) -> None:
        """Add the next entries of the log, in the order of the offsets."""
        self._arrive(entries[entries["deliver_after_ms"] <= self._near_until_ms])
        while entries.size:
            room = self._limits.records - self._active.count
            self._active.add(entries[:room], now_ms)
            entries = entries[room:]
            if self._active.count == self._limits.records:
                self.close()

    def adopt(self, segment: ClosedSegment) -> None:
        """Add the next entries from a file. Raises SegmentLost, and changes nothing then."""
        if segment.start < self.end or self._active.count:
            raise ValueError("segments must follow each other: close the active one first")
        near = segment.between(-1, self._near_until_ms)
        self._segments.append(segment)
        self._active = ActiveSegment(segment.end)
        self._arrive(near)
        segment.free_until(self._near_until_ms)

    def pass_over(self, end: int) -> None:
        """Skip to this offset: the log has nothing more before it."""
        self._active.end = max(self._active.end, end)

    def close(self) -> None:
        """Close the active segment and write its file, unless it is empty."""
        if not self._active.count:
            return
        active = self._active
        closed = ClosedSegment.of(active.start, active.end, in_order(active.entries))
        if self._files:
            self._files.write(closed)
            closed.unload(self._near_until_ms)
        self._segments.append(closed)
        self._active = ActiveSegment(closed.end)

    def take(self, now_ms: int, limit: int) -> DueBatch:
        """Return up to `limit` due entries, late ones first and alone; move the cursor past them.

        Raises SegmentLost.
        """
        if self._active.count and now_ms - self._active.started_ms >= self._limits.age_ms:
            self.close()
        self._check_arrived()
        is_late = self._late.size > 0
        if is_late:
            # All late ones are due, unless the clock went back.
            count = min(due(self._late, now_ms), limit)
            taken, self._late = self._late[:count], self._late[count:]
        else:
            self._read_segments(now_ms)
            count = min(due(self._near, now_ms), limit)
            taken, self._near = self._near[:count], self._near[count:]
        batch = DueBatch(
            entries=taken,
            before=self.cursor,
            end=self._known_end,
            late=is_late,
            more=self._late.size > 0,
        )
        if taken.size:
            self.cursor = batch.cursor(taken.size - 1)
        return batch

    def next_ms(self) -> int:
        """Return when to take again unless something is appended before, epoch ms."""
        if self._late.size:
            return int(self._late["deliver_after_ms"][0])
        if self._known_end < self.end:
            return 0
        read_ms = self._near_until_ms - READ_AGAIN_MS
        return min(int(self._near["deliver_after_ms"][0]), read_ms) if self._near.size else read_ms

    @property
    def upcoming(self) -> Entries:
        """The next entries in order, as far as they are near."""
        return self._late if self._late.size else self._near

    def first_pending(self) -> int:
        """Return an offset before which everything was taken: to commit with the cursor."""
        outside = self._near, self._late, self._arrived
        candidates = [int(each["offset"].min()) for each in outside if each.size]
        for segment in self._all_segments():
            first = segment.first_after(self._near_until_ms)
            if first is not None:
                candidates.append(first)
                # Later segments have higher offsets.
                break
        return min(candidates, default=self.end)

    def free(self, committed: int) -> None:
        """Drop the segments before the committed offset, and remove their files."""
        for segment in [each for each in self._segments if each.end <= committed]:
            self._segments.remove(segment)
            if self._files:
                self._files.remove(segment)

    def _all_segments(self) -> list[ClosedSegment | ActiveSegment]:
        return [*self._segments, self._active]

    def _arrive(self, entries: Entries) -> None:
        if entries.size:
            self._arrived = joined(self._arrived, entries)

    def _check_arrived(self) -> None:
        """Tell late entries from others; not before the last late ones are taken.

        After a restart, check first what the cursor knew: it may have been amid late ones.
        """
        if not self._resumed:
            self._resumed = True
            self._check_until(self._known_end)
        if not self._late.size and self._known_end < self.end:
            self._check_until(self.end)

    def _check_until(self, end: int) -> None:
        self._known_end = end
        if not self._arrived.size:
            return
        is_known = self._arrived["offset"] < end
        found, self._arrived = self._arrived[is_known], self._arrived[~is_known]
        found = found[~self.cursor.delivered(found)]
        is_late = self.cursor.passed(found)
        self._late = in_order(found[is_late])
        self._near = in_order(self._near, found[~is_late])

    def _read_segments(self, now_ms: int) -> None:
        """Add the entries of the segments that are due soon to the near ones."""
        if now_ms < self._near_until_ms - READ_AGAIN_MS:
            return
        until_ms = max(now_ms + NEAR_MS, self._near_until_ms)
        found = [each.between(self._near_until_ms, until_ms) for each in self._all_segments()]
        # Not before all are read: a segment may be lost.
        for each in self._segments:
            each.free_until(until_ms)
            each.unload(until_ms)
        self._near = in_order(self._near, *found)
        self._near_until_ms = until_ms
