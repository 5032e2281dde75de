"""The index of large slots: finds the records of one id without reading the slot.

A *block* indexes a range of a slot: one sorted entry of 8 bytes per record.

    31 bits fingerprint of the id | 32 bits offset, counted from the start of the block

It is cut into *pages* by the first bits of the fingerprint, so that a look-up reads one page of
each block. The *directory* lists the blocks and the offset of each page. The offset that the group
`<namespace>.index` has committed for a slot's partition is that of its directory.

Pages and directories are records of the slot itself, so they are deleted with it. A log is only
appended to: an index record that is present describes the records before it, and a topic that was
created again, or a log that was truncated, has lost its index too. An unexpected record in place of
a page makes a look-up slower, because that range is read instead, but never wrong. To every other
reader an index record is a cancel that is overdue: release jobs drop it.
"""

import hashlib
import json
import logging
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Self

from duetime.core import headers as H
from duetime.core.errors import KafkaError, error_text
from duetime.core.messages import MessageId
from duetime.kafka.offsets import OffsetRange, Partition, runs
from duetime.kafka.range_reader import RangeReader, headers_of

log = logging.getLogger(__name__)

#: Bits of a fingerprint: with the 32 bits of an offset, a signed number of 64 bits.
FINGERPRINT_BITS = 31

#: Bits of an offset within its block.
OFFSET_BITS = 32

ENTRY_BYTES = 8

#: Fewer records than this are read faster than they are looked up in an index.
MIN_INDEXED_RECORDS = 5_000

#: A run of at least as many pages, some MiB, is skipped where a range without index is read.
MIN_SKIPPED_PAGES = 64

#: The fetch size for reading single records, in bytes: a page has 32 KiB.
FETCH_BYTES = 64 * 1024

#: Candidates at most as many offsets apart are read as one range: as fast as a seek.
NEAR_OFFSETS = 200


def fingerprint(message_id: MessageId) -> int:
    """Return the first 31 bits of the id's MD5, which Spark computes as well.

    Not for security, but not CRC-32 either: a sender could choose many ids with one CRC, and slow
    down look-ups of another sender's id.
    """
    digest = hashlib.md5(str(message_id).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def page_of(fingerprint: int, pages: int) -> int:
    """Return the number of the page that holds the fingerprint; `pages` is a power of 2."""
    return fingerprint * pages >> FINGERPRINT_BITS


def matches(page: bytes, fingerprint: int) -> list[int]:
    """Return the offsets within the block of the records with this fingerprint."""

    def entry(number: int) -> int:
        return int.from_bytes(page[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES], "little")

    entries = range(len(page) // ENTRY_BYTES)
    first = bisect_left(entries, fingerprint << OFFSET_BITS, key=entry)
    end = bisect_left(entries, fingerprint + 1 << OFFSET_BITS, key=entry)
    return [entry(each) & (1 << OFFSET_BITS) - 1 for each in range(first, end)]


def _record_id(name: str) -> bytes:
    return str(MessageId(due_ms=0, unique=f"@index:{name}")).encode()


@dataclass(frozen=True, slots=True)
class Block:
    """An indexed range of a slot, with the offset of each page.

    The number of pages is a power of 2. A page that would be too large is None.
    """

    start: int
    end: int
    pages: tuple[int | None, ...]

    @property
    def count(self) -> int:
        """The number of offsets."""
        return self.end - self.start

    def page_id(self, number: int) -> bytes:
        """Return the DUE_ID of this page's record."""
        return _record_id(f"{self.start}.{self.end}.{number}.{len(self.pages)}")


@dataclass(frozen=True, slots=True)
class Directory:
    """The blocks of one slot, in order of offset, without overlap."""

    blocks: tuple[Block, ...]

    def encoded(self) -> bytes:
        """Return the value of the directory's record: JSON."""
        blocks = [[each.start, each.end, each.pages] for each in self.blocks]
        return json.dumps({"blocks": blocks}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Parse a record's value. Raises ValueError, TypeError or LookupError."""
        blocks = json.loads(value)["blocks"]
        return cls(tuple(Block(start, end, tuple(pages)) for start, end, pages in blocks))


NO_BLOCKS = Directory(())

#: The DUE_ID of a directory's record.
DIRECTORY_ID = _record_id("directory")


def index_headers(due_id: bytes) -> list[H.Header]:
    """Return the headers of an index record: those of a cancel that was due in 1970."""
    values = {H.DUE_AT_MS: b"0", H.DUE_ID: due_id}
    return [(name, values.get(name)) for name in H.SCHEDULED]


class IndexReader:
    """Looks up ids. `reader` must use the group that commits the offsets of directories."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader

    def narrowed(self, message_id: MessageId, unsettled: OffsetRange) -> list[OffsetRange]:
        """Return the parts of a range that may have records with this id. Raises KafkaError."""
        partition = unsettled.topic, unsettled.partition
        blocks = self.directory(partition).blocks
        parts, at, pages_found = list[OffsetRange](), unsettled.start, list[bool]()
        for block in blocks:
            if block.end <= at or block.start >= unsettled.end:
                continue
            parts.append(replace(unsettled, start=at, end=max(at, block.start)))
            indexed = replace(
                unsettled, start=max(at, block.start), end=min(block.end, unsettled.end)
            )
            found = self._in_block(partition, block, message_id, indexed)
            pages_found.append(found is not None)
            parts += [indexed] if found is None else found
            at = indexed.end
        # A directory whose pages are missing is a copy from another log, such as a mirror's.
        is_own = bool(pages_found) and all(pages_found)
        pages = sorted(page for block in blocks for page in block.pages if page is not None)
        for first, last in runs(pages, 1) if is_own else ():
            if last - first >= MIN_SKIPPED_PAGES and at <= first and last < unsettled.end:
                parts.append(replace(unsettled, start=at, end=first))
                at = last + 1
        parts.append(replace(unsettled, start=at))
        return [each for each in parts if each.count > 0]

    def directory(self, partition: Partition) -> Directory:
        """Return the directory of this partition; an empty one if it cannot be read."""
        try:
            offset = self._reader.committed(partition)
            value = None if offset is None else self._value(partition, offset, DIRECTORY_ID)
            return NO_BLOCKS if value is None else Directory.decode(value)
        except (KafkaError, ValueError, TypeError, LookupError) as error:
            log.warning(
                "index not usable, reading the slot instead topic=%s partition=%d error=%s",
                *partition,
                error_text(error),
            )
            return NO_BLOCKS

    def _in_block(
        self, partition: Partition, block: Block, message_id: MessageId, indexed: OffsetRange
    ) -> list[OffsetRange] | None:
        """Return the parts of an indexed range with the id; None if its page is missing."""
        wanted = fingerprint(message_id)
        number = page_of(wanted, len(block.pages))
        offset = block.pages[number]
        page = None if offset is None else self._value(partition, offset, block.page_id(number))
        if page is None:
            return None
        offsets = [block.start + each for each in matches(page, wanted)]
        inside = [each for each in offsets if indexed.start <= each < indexed.end]
        return [
            replace(indexed, start=first, end=last + 1)
            for first, last in runs(inside, NEAR_OFFSETS)
        ]

    def _value(self, partition: Partition, offset: int, due_id: bytes) -> bytes | None:
        """Return the value of the index record at an offset; None if it is another record."""
        # One record only: where the log is shorter, the range would be read from its start.
        record = next(self._reader.records([OffsetRange(*partition, offset, offset + 1)]), None)
        if record and record.offset() == offset and headers_of(record) == index_headers(due_id):
            return record.value()
        return None
