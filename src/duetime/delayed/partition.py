"""One partition of a delayed topic: its index, filled from the log, and the records that wait."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from confluent_kafka import Message

from duetime.delayed.cursor import Cursor
from duetime.delayed.entries import Entries, joined
from duetime.delayed.files import SegmentFiles, SegmentLost
from duetime.delayed.index import Batch, DeliverAfterIndex, Limits
from duetime.delayed.log import LogReader, Place, entries
from duetime.delayed.payloads import Payloads

log = logging.getLogger(__name__)

#: So many offsets without a record may be removed ones; fewer are marks of a transaction, or not
#: worth the question.
LARGE_GAP = 100

#: Records that are upcoming, when some are read again: as many as there may be room for.
UPCOMING = 1_000_000


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader is: everything before the offset is delivered, and what the cursor says."""

    offset: int
    cursor: Cursor
    #: Whatever the reader wants to know again after a restart.
    note: str = ""

    @classmethod
    def committed(cls, offset: int, metadata: str) -> "Position":
        """What was committed; metadata that are none of ours are a plain reader's."""
        cursor, _, note = metadata.partition(" ")
        found = Cursor.parse(cursor)
        return cls(offset, found, note) if found else cls(offset, Cursor.start(offset))

    @property
    def metadata(self) -> str:
        """The text to commit with the offset."""
        return f"{self.cursor} {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Due:
    """A record whose time has come, and the cursor once it is returned."""

    record: Message
    deliver_after_ms: int
    cursor: Cursor
    #: Its place in the batch that it was taken with.
    number: int


@dataclass(slots=True, kw_only=True, eq=False)
class DelayedPartition:
    """Reads the log once from where its reader was, and gives what is due. Raises KafkaError."""

    place: Place
    reader: LogReader
    payloads: Payloads
    #: For whom: retries of other groups are nobody's business.
    group: str | None = None
    #: What waits for longer comes at once, in ms, and is the reader's to refuse; None is no limit.
    longest_ms: int | None = None
    files: SegmentFiles | None = None
    limits: Limits = field(default_factory=Limits)
    index: DeliverAfterIndex = field(init=False)
    #: What is taken and not returned yet.
    _taken: Batch | None = field(default=None, init=False)
    _returned: int = field(default=0, init=False)
    #: What is taken from the index, and whose records could not be read yet.
    _unread: Batch | None = field(default=None, init=False)
    _cursor: Cursor = field(init=False)
    _committed: Position = field(init=False)
    _note: str = field(default="", init=False)
    #: The first offset that the log still has, as far as is known.
    _first: int = field(default=0, init=False)

    def open(self, position: Position, now_ms: int) -> None:
        """Fill the index from files, and from the log up to its present end."""
        first, end = self.reader.bounds(self.place)
        if max(position.offset, position.cursor.known_end) > end:
            log.warning("the topic is not what it was: read from its beginning end=%d", end)
            position = Position(first, Cursor.start(first))
        self._taken = self._unread = None
        self._cursor, self._committed, self._note = position.cursor, position, position.note
        self.index = DeliverAfterIndex(
            position.cursor, position.offset, files=self.files, limits=self.limits
        )
        for segment in self.files.segments(position.offset) if self.files else ():
            # One that retention has cut is read from the log, like what follows; and one of a log
            # that was longer, before it lost its end.
            if segment.start >= max(self.index.end, first) and segment.end <= end:
                self._read(first, segment.start, now_ms)
                self.index.close()
                # It was there a moment ago.
                with suppress(SegmentLost):
                    self.index.adopt(segment)
        self._read(first, end, now_ms)

    def missing(self, first: int, end: int) -> tuple[int, int]:
        """The stretch to append next, of a log with these bounds; more may be removed by now."""
        self._first = first
        if first > self.index.end:
            log.warning("retention has removed records offsets=%d..%d", self.index.end, first - 1)
            self.payloads.count_removed(first - self.index.end)
            self.index.pass_over(first)
        return self.index.end, end

    def append(self, records: Sequence[Message], now_ms: int) -> None:
        """What the log has next. What is known already is passed over."""
        new = [each for each in records if (each.offset() or 0) >= self.index.end]
        if new and (new[0].offset() or 0) - self.index.end >= LARGE_GAP:
            self.missing(*self.reader.bounds(self.place))
        found = entries(new, self.group, self.longest_ms)
        self.index.append(found, now_ms)
        self.payloads.keep(found[~self._cursor.delivered(found)], new)

    def next_ms(self) -> int:
        """When to take again, unless something is appended before; epoch ms."""
        return self.index.next_ms() if self._unread is None else 0

    def take(self, now_ms: int, limit: int) -> list[Due]:
        """What is due, in order, at most so many. Take all of it before the next one.

        Where its records cannot be read, the next call tries the same again.
        """
        batch = self._unread or self._batch(now_ms, limit)
        if not batch.entries.size:
            return []
        self._taken, self._returned, self._unread = batch, 0, batch
        upcoming = self.index.upcoming(UPCOMING)
        records = self.payloads.take(batch.entries, upcoming, self._batches)
        self._unread = None
        return self._found(batch, records)

    def take_entries(self, now_ms: int, most: int | None) -> Entries:
        """The entries of what is due and still there, without the records.

        They are as good as returned.
        """
        found, left = [], sys.maxsize if most is None else most
        while (batch := self._batch(now_ms, left)).entries.size:
            found.append(batch.entries)
            left -= batch.entries.size
            self._cursor, self._taken = self.index.cursor, None
        return self._there(joined(*found))

    def returned(self, due: Due) -> None:
        """Note that this record of those taken has been returned."""
        self._cursor, self._returned = due.cursor, due.number + 1

    def position(self) -> Position:
        """Where the reader is after what it has returned."""
        first = self.index.first_pending()
        left = self._taken.entries["offset"][self._returned :] if self._taken else ()
        return Position(min([first, *left]), self._cursor)

    @property
    def note(self) -> str:
        """What was noted last."""
        return self._note

    def to_commit(self, due: Due | None = None, note: str | None = None) -> Position | None:
        """The position after this record, or after all that were returned; None of nothing new.

        After one that others followed, the offset stays where it is: it may only be too small.
        """
        position = self.position()
        if due is not None and due.cursor != self._cursor:
            position = Position(self._committed.offset, due.cursor)
        self._note = self._note if note is None else note
        position = replace(position, note=self._note)
        return None if position == self._committed else position

    def committed(self, position: Position) -> None:
        """Note that this is committed: nobody asks for what is before it."""
        self._committed = position
        self.index.free(position.offset)

    def close(self) -> None:
        """Let go of what is kept."""
        self.payloads.clear()

    def _batch(self, now_ms: int, limit: int) -> Batch:
        try:
            return self.index.take(now_ms, limit)
        except SegmentLost as lost:
            log.warning("segment is lost, and read from the log again file=%s", lost)
            self._open_again(now_ms)
            return self.index.take(now_ms, limit)

    def _open_again(self, now_ms: int) -> None:
        index, taken, committed, note = self.index, self._taken, self._committed, self._note
        try:
            self.open(self.position(), now_ms)
        except BaseException:
            # Half an index would take what is missing in it for delivered.
            self.index, self._taken = index, taken
            raise
        finally:
            # What was returned since is in nobody's commit yet.
            self._committed, self._note = committed, note

    def _batches(self, start: int, end: int) -> Iterator[list[Message]]:
        return self.reader.batches(self.place, start, end)

    def _read(self, first: int, end: int, now_ms: int) -> None:
        """Fill the index from the log up to an offset."""
        for records in self._batches(*self.missing(first, end)):
            self.append(records, now_ms)

    def _there(self, entries: Entries) -> Entries:
        is_there = entries["offset"] >= self._first
        gone = entries.size - int(np.count_nonzero(is_there))
        if gone:
            _tell_removed(gone)
            self.payloads.count_removed(gone)
        kept: Entries = entries[is_there]
        return kept

    def _found(self, batch: Batch, records: Sequence[Message | None]) -> list[Due]:
        gone = sum(1 for each in records if each is None)
        if gone:
            _tell_removed(gone)
        times = batch.entries["deliver_after_ms"].tolist()
        return [
            Due(record, at_ms, cursor, number)
            for number, (record, at_ms, cursor) in enumerate(
                zip(records, times, batch.cursors(), strict=True)
            )
            if record is not None
        ]


def _tell_removed(count: int) -> None:
    log.warning("retention has removed records before their time records=%d", count)
