"""Closed segments as Parquet files: `<location>/<group>/<topic>-<its id>/<partition>/...`.

On a disk, or in an object store that Arrow knows (s3://, gs://, hdfs://), which is written to
beside the reader: it answers in its own time, and one that is away takes 12 s to say so. A file is
a copy of what the log says, and may be missing or damaged: its checksums tell, and the log is read
instead.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import BoundedSemaphore
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from duetime.delayed.entries import ENTRY, Entries
from duetime.delayed.segments import Closed

log = logging.getLogger(__name__)

#: What a file is called: 20 digits are enough for any offset, and sort as text.
NAME = "{start:020d}-{end:020d}.parquet"

SCHEMA = pa.schema([(name, pa.int64()) for name in ENTRY.names or ()])

#: What can be wrong with a file or its place.
DAMAGED = (OSError, ValueError, KeyError, pa.ArrowException)

#: How much may be left to be done in an object store. A process waits for that when it ends, and
#: what is to be written takes memory.
MOST_BESIDE = 16
_ROOM = BoundedSemaphore(MOST_BESIDE)


class SegmentLost(Exception):
    """A file that was there before cannot be read: its stretch of the log has to be read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFiles:
    """The files of one partition, of one group: another's retries are not in its index.

    The topic's id tells it from an earlier one of its name.
    """

    location: str
    group: str
    topic: str
    topic_id: str
    partition: int

    def write(self, segment: Closed) -> None:
        """Write it down. What cannot be written is told, and stays in memory."""
        # Its arrays are its reader's own.
        columns = {name: pa.array(segment.entries[name]) for name in SCHEMA.names}
        self._do(partial(self._write, segment, pa.table(columns, schema=SCHEMA)))

    def _write(self, segment: Closed, table: pa.Table) -> None:
        name = _name(segment)
        try:
            system, directory = self._place()
            path = f"{directory}/{name}"
            system.create_dir(directory, recursive=True)
            pq.write_table(table, path, filesystem=system, write_page_checksum=True)
        except DAMAGED as error:
            log.warning("segment stays in memory file=%s/%s error=%s", self._below, name, error)
            return
        segment.load = partial(_loaded, system, path)

    def segments(self, first: int) -> Iterator[Closed]:
        """Those that reach beyond this offset, in order; others, and damaged ones, are removed."""
        try:
            system, directory = self._place()
            selector = fs.FileSelector(directory, allow_not_found=True)
            paths = sorted(each.path for each in system.get_file_info(selector))
        except DAMAGED as error:
            log.warning("all is read from the log place=%s error=%s", self._below, error)
            return
        for path in paths:
            segment = _opened(system, path)
            if segment is None or segment.end <= first:
                self._do(partial(self._remove, Path(path).name))
            else:
                yield segment

    def remove(self, segment: Closed) -> None:
        """Remove its file. Safe to repeat."""
        self._do(partial(self._remove, _name(segment)))

    def _remove(self, name: str) -> None:
        try:
            system, directory = self._place()
            system.delete_file(f"{directory}/{name}")
        except FileNotFoundError:
            return
        except DAMAGED as error:
            log.warning("segment's file stays file=%s/%s error=%s", self._below, name, error)

    def _do(self, step: Callable[[], None]) -> None:
        """Now on a disk, else behind what is to be done before it."""
        if _is_directory(self.location):
            step()
        elif _ROOM.acquire(blocking=False):
            _beside().submit(step).add_done_callback(lambda _: _ROOM.release())
        else:
            # A segment stays in memory then, and a file is removed at the next start.
            log.warning("object store is too slow, or away place=%s", self._below)

    def _place(self) -> tuple[fs.FileSystem, str]:
        system, root = _system(self.location)
        return system, f"{root}/{self._below}"

    @property
    def _below(self) -> str:
        """The directory of its files, below the location."""
        return f"{quote(self.group, safe='')}/{self.topic}-{self.topic_id}/{self.partition}"


def _name(segment: Closed) -> str:
    return NAME.format(start=segment.start, end=segment.end)


@cache
def _system(location: str) -> tuple[fs.FileSystem, str]:
    if "://" in location:
        system, root = fs.FileSystem.from_uri(location)
        return system, root
    return fs.LocalFileSystem(), str(Path(location).absolute())


def _is_directory(location: str) -> bool:
    return urlsplit(location).scheme in ("", "file")


@cache
def _beside() -> ThreadPoolExecutor:
    """One thread of this process: what is written is not removed before."""
    return ThreadPoolExecutor(1, "segments")


def _opened(system: fs.FileSystem, path: str) -> Closed | None:
    """The segment in this file, read to see that it is whole; None where it is not."""
    try:
        start, end = (int(part) for part in Path(path).stem.split("-"))
        entries = _read(system, path)
        times, offsets = entries["deliver_after_ms"], entries["offset"]
        if not entries.size or offsets.min() < start or offsets.max() >= end:
            raise ValueError("it does not hold what its name says")
    except DAMAGED as error:
        log.warning("segment is read from the log again file=%s error=%s", path, error)
        return None
    return Closed(
        start=start,
        end=end,
        count=entries.size,
        first_ms=int(times[0]),
        last_ms=int(times[-1]),
        load=partial(_loaded, system, path),
    )


def _loaded(system: fs.FileSystem, path: str) -> Entries:
    try:
        return _read(system, path)
    except DAMAGED as error:
        raise SegmentLost(path) from error


def _read(system: fs.FileSystem, path: str) -> Entries:
    table = pq.read_table(path, filesystem=system, page_checksum_verification=True)
    if not table.schema.equals(SCHEMA):
        # The footer has no checksum.
        raise ValueError(f"its columns are {table.schema.names}, of {table.schema.types}")
    entries = np.empty(table.num_rows, ENTRY)
    for name in SCHEMA.names:
        entries[name] = table.column(name).to_numpy()
    return entries
