r"""The deliver-after index of one partition: which records are to be returned next.

The log is in the order of its offsets, and is read once. Each record leaves an entry, (deliver
after, offset), in the active segment. A segment that is full or old is closed, sorted, and written
to a file, so that after a crash the log need not be read again. Closed segments are runs, each in
the order of delivery, and a merge of them gives the order of the whole partition:

    log       offsets 0..65535      65536..131071       131072 ...
    entries   closed, in a file     closed, in a file   active, in memory
                    \                     |                 /
    near            what is due within a second, merged and in order
                                          |
    take            what is due now

Only the near is merged, a second's worth at a time: everything that is due up to `near_until` is in
it, or returned already, and everything later is in the segments alone. So what comes in and is due
soon joins the near, and the segments are looked at twice a second.

Time is an argument. Kafka is not here: who reads the log tells what is in it, in the order of the
offsets. What the cursor means, and how it admits what is produced late, is told in `cursor`.
"""

from dataclasses import dataclass

from duetime.delayed.cursor import Cursor
from duetime.delayed.entries import NONE, Entries, due, in_order, joined
from duetime.delayed.files import SegmentFiles
from duetime.delayed.segments import Active, Closed

#: How far ahead the near reaches when the segments are looked at, in ms, and when that is next.
NEAR_MS = 1_000
LOOK_AGAIN_MS = NEAR_MS // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the active segment is closed: once it is as large or as old as this."""

    records: int = 65_536
    age_ms: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records that are due, in the order of delivery: late ones, or others."""

    entries: Entries
    #: The cursor before the first of them.
    before: Cursor
    #: They were chosen from the records before this offset.
    end: int
    late: bool = False
    #: Whether more late ones follow in the next batch.
    more: bool = False

    def cursor(self, position: int) -> Cursor:
        """The cursor once the record at this position of the batch was returned."""
        return self._after(position, *self.entries[position].tolist())

    def cursors(self) -> list[Cursor]:
        """The same of all positions."""
        return [self._after(number, *each) for number, each in enumerate(self.entries.tolist())]

    def _after(self, position: int, deliver_after_ms: int, offset: int) -> Cursor:
        if not self.late:
            return Cursor(deliver_after_ms=deliver_after_ms, offset=offset, end=self.end)
        if self.more or position < len(self.entries) - 1:
            return self.before.after_late(deliver_after_ms, offset, self.end)
        return self.before.known_to(self.end)


class DeliverAfterIndex:
    """The index of one partition, and a reader's place in it. Not thread-safe.

    After a restart, `adopt` the segments that are in files and `append` what the log has between
    and behind them, from the committed offset on, and at least as far as the cursor knew.
    """

    def __init__(
        self,
        cursor: Cursor,
        start: int,
        *,
        files: SegmentFiles | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`start` is the committed offset: what is before it is delivered, or nobody's."""
        self.cursor = cursor
        self._files = files
        self._limits = limits or Limits()
        self._segments: list[Closed] = []
        self._active = Active(start)
        #: Everything due up to then is near, late, just arrived or returned; the rest in segments.
        self._near_until_ms = cursor.deliver_after_ms
        self._near = NONE
        self._late = NONE
        self._arrived = NONE
        #: What has arrived before this offset was looked at.
        self._known_end = cursor.known_end
        self._resumed = False

    @property
    def end(self) -> int:
        """The offset from which on the log was not read yet."""
        return self._active.end

    @property
    def count(self) -> int:
        """How many entries its segments have, in memory or in files."""
        return sum(each.count for each in self._all_segments())

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""
        in_segments = sum(each.nbytes for each in self._all_segments())
        return in_segments + sum(each.nbytes for each in self._outside_segments())

    def append(self, entries: Entries, now_ms: int) -> None:
        """What the log has next, in the order of the offsets."""
        self._arrive(entries[entries["deliver_after_ms"] <= self._near_until_ms])
        while entries.size:
            room = self._limits.records - self._active.count
            self._active.add(entries[:room], now_ms)
            entries = entries[room:]
            if self._active.count == self._limits.records:
                self.close()

    def adopt(self, segment: Closed) -> None:
        """What the log has next, from a file. Raises SegmentLost, and nothing is changed then."""
        if segment.start < self.end or self._active.count:
            raise ValueError("segments follow each other: close the active one first")
        near = segment.between(-1, self._near_until_ms)
        self._segments.append(segment)
        self._active = Active(segment.end)
        self._arrive(near)
        segment.passed(self._near_until_ms)

    def pass_over(self, end: int) -> None:
        """The log has nothing more before this offset."""
        self._active.end = max(self._active.end, end)

    def close(self) -> None:
        """Close the active segment, and write it to its file; nothing if it is empty."""
        if not self._active.count:
            return
        closed = Closed.of(self._active)
        if self._files:
            self._files.write(closed)
            closed.put_away(self._near_until_ms)
        self._segments.append(closed)
        self._active = Active(closed.end)

    def take(self, now_ms: int, limit: int) -> Batch:
        """What is to be returned next, at most so many; late ones first, and by themselves.

        The cursor moves behind them.
        """
        if self._active.count and now_ms - self._active.begun_ms >= self._limits.age_ms:
            self.close()
        self._look_at_arrived()
        if self._late.size:
            return self._take_late(now_ms, limit)
        self._look_ahead(now_ms)
        count = min(due(self._near, now_ms), limit)
        taken, self._near = self._near[:count], self._near[count:]
        return self._moved(Batch(entries=taken, before=self.cursor, end=self._known_end))

    def next_ms(self) -> int:
        """When to take again, unless something is appended before; epoch ms."""
        if self._late.size:
            return int(self._late["deliver_after_ms"][0])
        if self._known_end < self.end:
            return 0
        look_ms = self._near_until_ms - LOOK_AGAIN_MS
        return min(int(self._near["deliver_after_ms"][0]), look_ms) if self._near.size else look_ms

    def upcoming(self, count: int) -> Entries:
        """The next records in order, as far as they are near, at most so many."""
        return (self._late if self._late.size else self._near)[:count]

    def first_pending(self) -> int:
        """An offset before which everything was taken: the one to commit with the cursor."""
        candidates = [int(each["offset"].min()) for each in self._outside_segments() if each.size]
        for segment in self._all_segments():
            first = segment.first_behind(self._near_until_ms)
            if first is not None:
                candidates.append(first)
                # What follows has higher offsets.
                break
        return min(candidates, default=self.end)

    def free(self, committed: int) -> None:
        """Forget the segments before the committed offset, and remove their files."""
        for segment in [each for each in self._segments if each.end <= committed]:
            self._segments.remove(segment)
            if self._files:
                self._files.remove(segment)

    def _all_segments(self) -> list[Closed | Active]:
        return [*self._segments, self._active]

    def _outside_segments(self) -> tuple[Entries, Entries, Entries]:
        return self._near, self._late, self._arrived

    def _arrive(self, entries: Entries) -> None:
        if entries.size:
            self._arrived = joined(self._arrived, entries)

    def _look_at_arrived(self) -> None:
        """Tell late ones from others; not before the last late ones are out.

        After a restart first at what the cursor knew: it may have been amid late ones.
        """
        if not self._resumed:
            self._resumed = True
            self._look_at(self._known_end)
        if not self._late.size and self._known_end < self.end:
            self._look_at(self.end)

    def _look_at(self, end: int) -> None:
        self._known_end = end
        if not self._arrived.size:
            return
        seen = self._arrived["offset"] < end
        found, self._arrived = self._arrived[seen], self._arrived[~seen]
        found = found[~self.cursor.delivered(found)]
        late = self.cursor.passed(found)
        self._late = in_order(found[late])
        self._near = in_order(self._near, found[~late])

    def _look_ahead(self, now_ms: int) -> None:
        """Bring what is due soon into the near."""
        if now_ms < self._near_until_ms - LOOK_AGAIN_MS:
            return
        until_ms = max(now_ms + NEAR_MS, self._near_until_ms)
        found = [each.between(self._near_until_ms, until_ms) for each in self._all_segments()]
        # Not before all are found: a segment may be lost.
        for each in self._segments:
            each.passed(until_ms)
            each.put_away(until_ms)
        self._near = in_order(self._near, *found)
        self._near_until_ms = until_ms

    def _take_late(self, now_ms: int, limit: int) -> Batch:
        # They are due, unless the clock went back.
        count = min(due(self._late, now_ms), limit)
        taken, self._late = self._late[:count], self._late[count:]
        batch = Batch(
            entries=taken,
            before=self.cursor,
            end=self._known_end,
            late=True,
            more=self._late.size > 0,
        )
        return self._moved(batch)

    def _moved(self, batch: Batch) -> Batch:
        if batch.entries.size:
            self.cursor = batch.cursor(len(batch.entries) - 1)
        return batch
