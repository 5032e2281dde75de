"""One partition of a delayed topic: its index, filled from the log, and its cached records.

A reader opens a partition at the position that its group committed, appends what it fetches from
the log, and takes what is due. `PartitionOpener` does the first for a consumer or a Spark source.

The cache holds the pending records in memory as far as there is room. When it is full, the records
that are due last leave it; they are read from the log again when their time comes.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from confluent_kafka import KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from duetime.core.errors import KafkaError
from duetime.core.metrics import DELAYED_REMOVED
from duetime.delayed.group import ConsumerOptions
from duetime.delayed.index import Cursor, DeliverAfterIndex, DueBatch, SegmentLimits
from duetime.delayed.segments import Entries, SegmentFiles, SegmentLost, joined, record_entries
from duetime.kafka.descriptions import describe_topic_ids
from duetime.kafka.offsets import Partition, runs
from duetime.kafka.range_reader import LogReader

log = logging.getLogger(__name__)

#: Reads the records from a start offset to an end.
ReadRange = Callable[[int, int], Iterable[list[Message]]]

#: A gap of this many offsets may be removed records; a smaller one is a transaction's marker, or
#: not worth a request.
LARGE_GAP = 100

#: Ranges with up to this many offsets between them are read as one: another fetch costs as much as
#: some hundred records.
GAP = 500

#: The size of a record in Python besides its bytes, roughly.
OBJECT_BYTES = 400

#: How long the broker may take to describe a topic, in seconds.
TIMEOUT_S = 20.0


@dataclass(slots=True)
class CacheBudget:
    """The memory that all caches of a reader share, in bytes."""

    limit_bytes: int
    used_bytes: int = 0


@dataclass(slots=True)
class RecordCache:
    """The cached records of one partition."""

    budget: CacheBudget
    #: Records that were read from the log again.
    read_again: int = 0
    #: Records that retention removed before they were delivered; see `count_removed`.
    removed: int = 0
    #: Due time, size and record, by offset.
    _cached: dict[int, tuple[int, int, Message]] = field(default_factory=dict)
    #: The size of the last record: an estimate for how many there is room.
    _size_bytes: int = OBJECT_BYTES

    def add(self, entries: Entries, records: Iterable[Message]) -> None:
        """Cache the records that have an entry, or those of them that are due first."""
        if self.budget.limit_bytes < OBJECT_BYTES:
            return
        times = {offset: time_ms for time_ms, offset in entries.tolist()}
        for record in records:
            offset = record.offset() or 0
            if offset in times and offset not in self._cached and self._make_room():
                payload = len(record.key() or b"") + len(record.value() or b"")
                self._size_bytes = payload + OBJECT_BYTES
                self.budget.used_bytes += self._size_bytes
                self._cached[offset] = times[offset], self._size_bytes, record

    def take(self, entries: Entries, upcoming: Entries, read: ReadRange) -> list[Message | None]:
        """Remove the records of these entries and return them; None is one that was removed.

        If some have to be read again, so are the upcoming entries next to them.
        """
        offsets = entries["offset"].tolist()
        # Removed first: what is read needs room in the cache.
        found = {each: self._remove(each) for each in offsets if each in self._cached}
        missing = [each for each in offsets if each not in found]
        if missing:
            read_again = self._read(missing, upcoming, read)
            self.count_removed(len(missing) - len(read_again))
            found |= read_again
        return [found.get(each) for each in offsets]

    def count_removed(self, count: int) -> None:
        """Count records that retention removed before they were delivered."""
        self.removed += count
        DELAYED_REMOVED.inc(count)

    def clear(self) -> None:
        """Remove all records."""
        for offset in list(self._cached):
            self._remove(offset)

    def _read(
        self, missing: Sequence[int], upcoming: Entries, read: ReadRange
    ) -> dict[int, Message]:
        room_bytes = max(0, self.budget.limit_bytes - self.budget.used_bytes)
        ahead = upcoming[: room_bytes // self._size_bytes]
        ahead = ahead[[each not in self._cached for each in ahead["offset"].tolist()]]
        wanted, found = set(missing), dict[int, Message]()
        for first, last in runs(sorted([*missing, *ahead["offset"].tolist()]), GAP):
            for records in read(first, last + 1):
                found |= {each.offset() or 0: each for each in records if each.offset() in wanted}
                self.read_again += len(records)
                self.add(ahead, records)
        return found

    def _remove(self, offset: int) -> Message | None:
        _, size, record = self._cached.pop(offset, (0, 0, None))
        self.budget.used_bytes -= size
        return record

    def _make_room(self) -> bool:
        """Remove the half that is due last if the cache is full; return whether there is room."""
        if self.budget.used_bytes >= self.budget.limit_bytes and self._cached:
            by_time = sorted(self._cached, key=lambda offset: self._cached[offset][0])
            for offset in by_time[len(by_time) // 2 :]:
                self._remove(offset)
        return self.budget.used_bytes < self.budget.limit_bytes


@dataclass(frozen=True, slots=True)
class CommittedPosition:
    """A reader's position: everything before the offset is delivered, and what the cursor says."""

    offset: int
    cursor: Cursor
    #: A text of the reader, which it gets back after a restart.
    note: str = ""

    @classmethod
    def parse(cls, offset: int, metadata: str) -> "CommittedPosition":
        """Read a commit; the metadata of other tools are ignored."""
        cursor, _, note = metadata.partition(" ")
        found = Cursor.parse(cursor)
        return cls(offset, found, note) if found else cls.start(offset)

    @classmethod
    def start(cls, offset: int) -> "CommittedPosition":
        """Return the position of a reader that begins at this offset."""
        return cls(offset, Cursor.start(offset))

    @property
    def metadata(self) -> str:
        """The text to commit with the offset."""
        return f"{self.cursor} {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class DueRecord:
    """A record that is due, and the cursor once it is returned."""

    record: Message
    deliver_after_ms: int
    cursor: Cursor
    #: Its index in the batch that it was taken with.
    number: int


@dataclass(slots=True, kw_only=True, eq=False)
class DelayedPartition:
    """Reads the log once, from the reader's position on, and returns what is due."""

    place: Partition
    reader: LogReader
    cache: RecordCache
    #: Retries of other groups are skipped.
    group: str | None = None
    #: A record with a longer delay is due at once, for the reader to refuse; None is no limit.
    max_delay_ms: int | None = None
    files: SegmentFiles | None = None
    limits: SegmentLimits = field(default_factory=SegmentLimits)
    index: DeliverAfterIndex = field(init=False)
    #: What was noted with the last commit.
    note: str = field(default="", init=False)
    #: What is taken, and how much of it is returned.
    _taken: DueBatch | None = field(default=None, init=False)
    _returned: int = field(default=0, init=False)
    #: What is taken from the index, and could not be read from the log.
    _unread: DueBatch | None = field(default=None, init=False)
    _cursor: Cursor = field(init=False)
    _committed: CommittedPosition = field(init=False)
    #: The first offset that the log has, as far as is known.
    _first: int = field(default=0, init=False)

    def open(self, position: CommittedPosition, now_ms: int) -> None:
        """Fill the index from files, and from the log up to its present end. Raises KafkaError."""
        first, end = self.reader.bounds(self.place)
        if max(position.offset, position.cursor.known_end) > end:
            log.warning(
                "topic was recreated or truncated, reading from its beginning "
                "topic=%s partition=%s end=%d",
                *self.place,
                end,
            )
            position = CommittedPosition.start(first)
        self._taken = self._unread = None
        self._cursor, self._committed, self.note = position.cursor, position, position.note
        self.index = DeliverAfterIndex(
            position.cursor, position.offset, files=self.files, limits=self.limits
        )
        for segment in self.files.segments(position.offset) if self.files else ():
            # The log is read in place of a segment that retention has cut, and of one of a longer
            # log that has lost its end.
            if segment.start >= max(self.index.end, first) and segment.end <= end:
                self._read(first, segment.start, now_ms)
                self.index.close()
                # The file was there a moment ago.
                with suppress(SegmentLost):
                    self.index.adopt(segment)
        self._read(first, end, now_ms)

    def missing(self, first: int, end: int) -> tuple[int, int]:
        """Return the range to append next, given the bounds of the log."""
        self._first = first
        if first > self.index.end:
            log.warning(
                "retention removed records before they were read "
                "topic=%s partition=%s offsets=%d..%d",
                *self.place,
                self.index.end,
                first - 1,
            )
            self.cache.count_removed(first - self.index.end)
            self.index.pass_over(first)
        return self.index.end, end

    def append(self, records: Sequence[Message], now_ms: int) -> None:
        """Add the next records of the log; known ones are ignored. Raises KafkaError."""
        new = [each for each in records if (each.offset() or 0) >= self.index.end]
        if new and (new[0].offset() or 0) - self.index.end >= LARGE_GAP:
            self.missing(*self.reader.bounds(self.place))
        found = record_entries(new, self.group, self.max_delay_ms)
        self.index.append(found, now_ms)
        self.cache.add(found[~self._cursor.delivered(found)], new)

    def next_ms(self) -> int:
        """Return when to take again unless something is appended before, epoch ms."""
        return self.index.next_ms() if self._unread is None else 0

    def take(self, now_ms: int, limit: int) -> list[DueRecord]:
        """Return up to `limit` due records in order; return all of them before the next call.

        Raises KafkaError if the records cannot be read; the next call tries the same again.
        """
        batch = self._unread or self._take_batch(now_ms, limit)
        if not batch.entries.size:
            return []
        self._taken, self._returned, self._unread = batch, 0, batch
        read = partial(self.reader.batches, self.place)
        records = self.cache.take(batch.entries, self.index.upcoming, read)
        self._unread = None
        if removed := records.count(None):
            self._warn_of_removed(removed)
        times = batch.entries["deliver_after_ms"].tolist()
        return [
            DueRecord(record, times[number], batch.cursor(number), number)
            for number, record in enumerate(records)
            if record is not None
        ]

    def take_entries(self, now_ms: int, limit: int) -> Entries:
        """Return the entries of what is due and still in the log, as if they were returned."""
        found = []
        while (batch := self._take_batch(now_ms, limit)).entries.size:
            found.append(batch.entries)
            limit -= batch.entries.size
            self._cursor, self._taken = self.index.cursor, None
        all_entries = joined(*found)
        remaining: Entries = all_entries[all_entries["offset"] >= self._first]
        if removed := all_entries.size - remaining.size:
            self._warn_of_removed(removed)
            self.cache.count_removed(removed)
        return remaining

    def returned(self, due: DueRecord) -> None:
        """Note that this record of those taken has been returned."""
        self._cursor, self._returned = due.cursor, due.number + 1

    def position(self) -> CommittedPosition:
        """Return the position after all records returned."""
        first = self.index.first_pending()
        left = self._taken.entries["offset"][self._returned :] if self._taken else ()
        return CommittedPosition(min([first, *left]), self._cursor)

    def to_commit(
        self, due: DueRecord | None = None, note: str | None = None
    ) -> CommittedPosition | None:
        """Return the position after this record, or after all returned; None if it is committed.

        If others were returned after the record, the offset stays: it may only be too small.
        """
        position = self.position()
        if due is not None and due.cursor != self._cursor:
            position = CommittedPosition(self._committed.offset, due.cursor)
        self.note = self.note if note is None else note
        position = replace(position, note=self.note)
        return None if position == self._committed else position

    def committed(self, position: CommittedPosition) -> None:
        """Note that this is committed, and free what is before it."""
        self._committed = position
        self.index.free(position.offset)

    def _take_batch(self, now_ms: int, limit: int) -> DueBatch:
        try:
            return self.index.take(now_ms, limit)
        except SegmentLost as lost:
            log.warning("segment file lost, reading the log again file=%s", lost)
            self._reopen(now_ms)
            return self.index.take(now_ms, limit)

    def _reopen(self, now_ms: int) -> None:
        index, taken, committed, note = self.index, self._taken, self._committed, self.note
        try:
            self.open(self.position(), now_ms)
        except BaseException:
            # Entries that half an index lacks would count as delivered.
            self.index, self._taken = index, taken
            raise
        finally:
            # What was returned since the last commit is in no commit.
            self._committed, self.note = committed, note

    def _read(self, first: int, end: int, now_ms: int) -> None:
        """Fill the index from the log up to the end offset."""
        for records in self.reader.batches(self.place, *self.missing(first, end)):
            self.append(records, now_ms)

    def _warn_of_removed(self, count: int) -> None:
        log.warning(
            "retention removed records before they were due topic=%s partition=%s records=%d",
            *self.place,
            count,
        )


class PartitionOpener:
    """Opens partitions, which share a cache budget and a reader of the log."""

    def __init__(self, options: ConsumerOptions) -> None:
        self.options = options
        self.budget = CacheBudget(options.kept_bytes)
        self.reader = LogReader(options.librdkafka)
        self._topic_ids: dict[str, str] = {}

    def open(self, place: Partition, position: CommittedPosition, now_ms: int) -> DelayedPartition:
        """Return the partition, read up to its present end. Raises KafkaError."""
        opened = DelayedPartition(
            place=place,
            reader=self.reader,
            cache=RecordCache(self.budget),
            group=self.options.group,
            max_delay_ms=self.options.delivery_max_ms,
            files=self._files(*place),
            limits=self.options.limits,
        )
        opened.open(position, now_ms)
        return opened

    def close(self) -> None:
        """Close the connection."""
        self.reader.close()

    def position(self, committed: TopicPartition) -> CommittedPosition:
        """Return where to begin: at the commit, or by `auto.offset.reset` if there is none."""
        if committed.error is not None:
            raise KafkaError(f"the committed offset is unknown: {committed.error.str()}")
        if committed.offset >= 0:
            return CommittedPosition.parse(committed.offset, committed.metadata or "")
        first, end = self.reader.bounds((committed.topic, committed.partition))
        return CommittedPosition.start(first if self.options.from_beginning else end)

    def _files(self, topic: str, partition: int) -> SegmentFiles | None:
        if self.options.index_location is None:
            return None
        if topic not in self._topic_ids:
            admin = AdminClient(self.options.shared())
            try:
                self._topic_ids |= describe_topic_ids(admin, [topic], TIMEOUT_S)
            except KafkaException as error:
                reason = error.args[0].str()
                raise KafkaError(f"topic {topic} cannot be described ({reason})") from error
        return SegmentFiles(
            location=self.options.index_location,
            group=self.options.group,
            topic=topic,
            topic_id=self._topic_ids[topic],
            partition=partition,
        )
