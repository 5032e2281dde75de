"""Index entries, and segments: the entries of a range of a partition's log.

The active segment grows. Once it is closed, its entries are sorted and never change; a closed
segment that is written to a file gives its memory back until some of it is due soon.

An entry is 16 bytes: when a record is due, and its offset. All arrays keep entries with equal times
in the order of their offsets, so that a stable sort by time alone gives the order of delivery,
(deliverAfter, offset).

Closed segments are Parquet files, `<location>/<group>/<topic>-<topic id>/<partition>/...`, on a
disk or in an object store that Arrow knows (s3://, gs://, hdfs://). Another thread writes to an
object store, which takes its time to answer, and 12 s to fail if it is down. A file is a copy of
the log, and may be missing or damaged: checksums detect that, and the log is read instead.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, Self
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Message
from numpy.typing import NDArray
from pyarrow import fs

from duetime.core import headers as H
from duetime.kafka.range_reader import headers_of

log = logging.getLogger(__name__)

#: One record: when it is due in epoch ms, and its offset.
ENTRY = np.dtype([("deliver_after_ms", "<i8"), ("offset", "<i8")])

#: An array of ENTRY; NumPy's types do not know its fields.
Entries = NDArray[Any]

#: The times or offsets of some entries.
Numbers = Sequence[int] | NDArray[np.int64]

#: One boolean for each entry.
Flags = NDArray[np.bool_]

NONE: Entries = np.empty(0, ENTRY)

#: The due time of a record that is to be delivered at once: before all others.
AT_ONCE = 0

#: The most digits of a due time: more could overflow.
MAX_DIGITS = 18

#: The name of a file: 20 digits suffice for each offset, and sort as text.
NAME = "{start:020d}-{end:020d}.parquet"

SCHEMA = pa.schema([(name, pa.int64()) for name in ENTRY.names or ()])

#: The errors of a damaged file or an unavailable store.
FILE_ERRORS = (OSError, ValueError, KeyError, pa.ArrowException)

#: The most operations that may wait for an object store: a process waits for them when it ends, and
#: pending writes take memory.
MAX_PENDING = 16
_SLOTS = BoundedSemaphore(MAX_PENDING)


class SegmentLost(Exception):
    """A file cannot be read any more: its range of the log must be read again."""


def entries_of(deliver_after_ms: Numbers, offsets: Numbers) -> Entries:
    """Return the entries of records with these times and offsets."""
    made = np.empty(len(offsets), ENTRY)
    made["deliver_after_ms"] = deliver_after_ms
    made["offset"] = offsets
    return made


def record_entries(
    records: Iterable[Message], group: str | None, max_delay_ms: int | None = None
) -> Entries:
    """Return the entries of the records, without retries of other groups.

    A record whose delay exceeds `max_delay_ms` is due at once.
    """
    times, offsets = [], []
    for record in records:
        time_ms = deliver_after_ms(record, group)
        if time_ms is not None:
            is_over = max_delay_ms is not None and delay_ms(record, time_ms) > max_delay_ms
            times.append(AT_ONCE if is_over else time_ms)
            offsets.append(record.offset() or 0)
    return entries_of(times, offsets)


def delay_ms(record: Message, time_ms: int) -> int:
    """Return the delay from the record's own timestamp to its due time."""
    return time_ms - record.timestamp()[1]


def deliver_after_ms(record: Message, group: str | None) -> int | None:
    """Return when the record is due for this group, epoch ms; None is never.

    Of several headers the last one counts. One that is no whole number counts as none.
    """
    found = AT_ONCE
    for name, value in headers_of(record):
        if name == H.DELIVER_AFTER_MS:
            found = int(value) if value is not None and is_number(value) else AT_ONCE
        elif name == H.DELIVER_GROUP and value != (group or "").encode():
            return None
    return found


def is_number(text: bytes) -> bool:
    """Return whether this is a whole number that fits into 64 bits, as times and offsets are."""
    return text.isdigit() and len(text) <= MAX_DIGITS


def joined(*pieces: Entries) -> Entries:
    """Concatenate the pieces."""
    filled = [each for each in pieces if each.size]
    return filled[0] if len(filled) == 1 else np.concatenate([NONE, *filled])


def in_order(*pieces: Entries) -> Entries:
    """Return all entries in the order of delivery.

    Entries with equal times must be in the order of their offsets within and between the pieces.
    """
    together = joined(*pieces)
    return together[np.argsort(together["deliver_after_ms"], kind="stable")]


def until(entries: Entries, deliver_after_ms: int, offset: int) -> Flags:
    """Flag the entries that are not behind this place in the order of delivery."""
    times = entries["deliver_after_ms"]
    is_tie = (times == deliver_after_ms) & (entries["offset"] <= offset)
    flags: Flags = (times < deliver_after_ms) | is_tie
    return flags


def due(ordered: Entries, now_ms: int) -> int:
    """Return how many of these ordered entries are due."""
    return int(np.searchsorted(ordered["deliver_after_ms"], now_ms, side="right"))


@dataclass(slots=True, kw_only=True)
class ClosedSegment:
    """A full segment: entries in the order of delivery, in memory or in a file."""

    start: int
    end: int
    count: int
    #: The times of the first and last entry: they show without reading the file whether the segment
    #: has anything due in some interval.
    first_ms: int
    last_ms: int
    #: Reads the entries from the file; None if there is none.
    load: Callable[[], Entries] | None = None
    _entries: Entries | None = None

    @classmethod
    def of(
        cls, start: int, end: int, ordered: Entries, load: Callable[[], Entries] | None = None
    ) -> Self:
        """Return the segment of one or more entries, in memory unless `load` reads them."""
        first_ms, last_ms = ordered["deliver_after_ms"][[0, -1]].tolist()
        return cls(
            start=start,
            end=end,
            count=ordered.size,
            first_ms=first_ms,
            last_ms=last_ms,
            load=load,
            _entries=None if load else ordered,
        )

    @property
    def entries(self) -> Entries:
        """The entries, read from the file if they were unloaded. Raises SegmentLost."""
        if self._entries is None:
            self._entries = self.load() if self.load else NONE
        return self._entries

    @property
    def nbytes(self) -> int:
        """The memory used now, in bytes."""
        return 0 if self._entries is None else self._entries.nbytes

    def unload(self, until_ms: int) -> None:
        """Give the memory back if all is due later than this and the file is written."""
        if self.first_ms > until_ms and self.load is not None:
            self._entries = None

    def free_until(self, until_ms: int) -> None:
        """Drop the entries if all are due by then: they are not requested again."""
        if self.last_ms <= until_ms:
            self._entries = NONE

    def between(self, after_ms: int, until_ms: int) -> Entries:
        """Return the entries due after the first instant and by the second, in order."""
        if self.last_ms <= after_ms or self.first_ms > until_ms:
            return NONE
        times = self.entries["deliver_after_ms"]
        start, end = np.searchsorted(times, (after_ms, until_ms), side="right")
        found: Entries = self.entries[start:end]
        return found

    def first_after(self, after_ms: int) -> int | None:
        """Return the lowest offset due later, or a lower one if the file would have to be read."""
        if self.last_ms <= after_ms:
            return None
        if self._entries is None:
            return self.start
        start = np.searchsorted(self._entries["deliver_after_ms"], after_ms, side="right")
        return int(self._entries["offset"][start:].min())


@dataclass(slots=True)
class ActiveSegment:
    """The segment that grows: entries in the order of their offsets."""

    start: int
    started_ms: int = 0
    count: int = 0
    #: The end of the log that it covers.
    end: int = field(init=False)
    _pieces: list[Entries] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.start

    @property
    def entries(self) -> Entries:
        """All entries."""
        self._pieces = [joined(*self._pieces)]
        return self._pieces[0]

    @property
    def nbytes(self) -> int:
        """The memory used, in bytes."""
        return sum(each.nbytes for each in self._pieces)

    def add(self, entries: Entries, now_ms: int) -> None:
        """Append one or more entries."""
        if not self.count:
            self.started_ms = now_ms
        self._pieces.append(entries)
        self.count += entries.size
        self.end = int(entries["offset"][-1]) + 1

    def between(self, after_ms: int, until_ms: int) -> Entries:
        """Return the entries due after the first instant and by the second."""
        times = self.entries["deliver_after_ms"]
        return self.entries[(times > after_ms) & (times <= until_ms)]

    def first_after(self, after_ms: int) -> int | None:
        """Return the lowest offset due later, if there is one."""
        is_later = self.entries["deliver_after_ms"] > after_ms
        return int(self.entries["offset"][np.argmax(is_later)]) if is_later.any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFiles:
    """The files of one partition for one group: retries of other groups are not in its index.

    The topic id distinguishes the topic from an earlier one of the same name.
    """

    location: str
    group: str
    topic: str
    topic_id: str
    partition: int

    def write(self, segment: ClosedSegment) -> None:
        """Write the segment's file. A failure is logged, and the segment stays in memory."""
        # Copied here: another thread must not touch the reader's arrays.
        columns = {name: pa.array(segment.entries[name]) for name in SCHEMA.names}
        self._do(partial(self._write, segment, pa.table(columns, schema=SCHEMA)))

    def segments(self, first: int) -> Iterator[ClosedSegment]:
        """Yield the segments that end after this offset, in order; remove other files."""
        try:
            system, directory = self._directory()
            selector = fs.FileSelector(directory, allow_not_found=True)
            paths = sorted(each.path for each in system.get_file_info(selector))
        except FILE_ERRORS as error:
            log.warning(
                "segment files unavailable, reading the log path=%s error=%s", self._path, error
            )
            return
        for path in paths:
            segment = _opened(system, path)
            if segment is None or segment.end <= first:
                self._do(partial(self._remove, Path(path).name))
            else:
                yield segment

    def remove(self, segment: ClosedSegment) -> None:
        """Remove the segment's file. Safe to repeat."""
        self._do(partial(self._remove, _name(segment)))

    def _do(self, operation: Callable[[], None]) -> None:
        """Run the operation: at once on a disk, else in the thread for object stores."""
        if urlsplit(self.location).scheme in ("", "file"):
            operation()
        elif _SLOTS.acquire(blocking=False):
            _store_thread().submit(operation).add_done_callback(lambda _: _SLOTS.release())
        else:
            # The segment stays in memory, and a file is removed at the next start.
            log.warning("object store too slow or unavailable path=%s", self._path)

    def _write(self, segment: ClosedSegment, table: pa.Table) -> None:
        name = _name(segment)
        try:
            system, directory = self._directory()
            path = f"{directory}/{name}"
            system.create_dir(directory, recursive=True)
            pq.write_table(table, path, filesystem=system, write_page_checksum=True)
        except FILE_ERRORS as error:
            log.warning("segment not written file=%s/%s error=%s", self._path, name, error)
            return
        segment.load = partial(_load, system, path)

    def _remove(self, name: str) -> None:
        try:
            system, directory = self._directory()
            system.delete_file(f"{directory}/{name}")
        except FileNotFoundError:
            return
        except FILE_ERRORS as error:
            log.warning("segment file not removed file=%s/%s error=%s", self._path, name, error)

    def _directory(self) -> tuple[fs.FileSystem, str]:
        system, root = _system(self.location)
        return system, f"{root}/{self._path}"

    @property
    def _path(self) -> str:
        """The directory of the files below the location."""
        return f"{quote(self.group, safe='')}/{self.topic}-{self.topic_id}/{self.partition}"


def _name(segment: ClosedSegment) -> str:
    return NAME.format(start=segment.start, end=segment.end)


@cache
def _system(location: str) -> tuple[fs.FileSystem, str]:
    if "://" in location:
        system, root = fs.FileSystem.from_uri(location)
        return system, root
    return fs.LocalFileSystem(), str(Path(location).absolute())


@cache
def _store_thread() -> ThreadPoolExecutor:
    """One thread for the process: a file is written before it is removed."""
    return ThreadPoolExecutor(1, "segments")


def _opened(system: fs.FileSystem, path: str) -> ClosedSegment | None:
    """Return the segment of this file, which is read and checked; None if it is damaged."""
    try:
        start, end = (int(part) for part in Path(path).stem.split("-"))
        entries = _read(system, path)
        offsets = entries["offset"]
        if not entries.size or offsets.min() < start or offsets.max() >= end:
            raise ValueError("its entries are outside the range of its name")
    except FILE_ERRORS as error:
        log.warning("segment file damaged, reading the log file=%s error=%s", path, error)
        return None
    return ClosedSegment.of(start, end, entries, partial(_load, system, path))


def _load(system: fs.FileSystem, path: str) -> Entries:
    try:
        return _read(system, path)
    except FILE_ERRORS as error:
        raise SegmentLost(path) from error


def _read(system: fs.FileSystem, path: str) -> Entries:
    table = pq.read_table(path, filesystem=system, page_checksum_verification=True)
    if not table.schema.equals(SCHEMA):
        # The footer has no checksum.
        raise ValueError(f"its columns are {table.schema.names}, of {table.schema.types}")
    return entries_of(*(table.column(name).to_numpy() for name in SCHEMA.names))
