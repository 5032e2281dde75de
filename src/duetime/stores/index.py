"""The index of large slots: where the records with one id are, without reading the slot.

A *block* indexes a range of a slot: one entry a record, sorted, of 8 bytes:

    31 bits fingerprint of the id | 32 bits offset, counted from the start of the block

It is cut into *pages* by the first bits of the fingerprint, so that a look-up reads one page of
each block. The *directory* says which blocks there are, and at which offset each page is. What the
group `<namespace>.index` has committed for a slot's partition is the offset of its directory.

Pages and directories are records of the slot itself. So they are freed with it; and since a log is
only ever appended to, an index record that is there speaks of the records before it, while a topic
that was created again, or a log that was cut, has lost its index as well. A record that is
not the one that was expected makes a look-up slower, because that range is read then, and never
wrong. To everything else an index record is a cancel whose time has come: a turn drops it.
"""

import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from duetime.errors import KafkaError, words
from duetime.message import DUE_AT_MS, DUE_ID, WAITING_HEADERS, MessageId
from duetime.stores import OffsetRange
from duetime.stores.places import Place
from duetime.stores.records import Header, RangeReader, headers_of

log = logging.getLogger(__name__)

#: Bits of an id's fingerprint: with the 32 bits of an offset, a signed number of 64 bits.
FINGERPRINT_BITS = 31

#: Bits of an offset within its block.
OFFSET_BITS = 32

ENTRY_BYTES = 8

#: Fewer records than this are read faster than they are looked up in an index.
LEAST_RECORDS = 5_000

#: So many pages in a row are passed over where a range is read that is not indexed: some MiB.
PASSED_PAGES = 64

#: How much is fetched at a time where single records are read, in bytes: a page has 32 KiB.
FETCH_BYTES = 64 * 1024

#: Records that may have the id and are so near to each other are read in one go: it takes as long
#: as moving to another offset.
NEAR = 200


def fingerprint(id: MessageId) -> int:  # noqa: A002 (what all call it)
    """Return the fingerprint of the id: the first bits of its MD5, which Spark computes as well.

    Not for security, but not CRC-32 either: whoever chooses ids could make many alike, and slow
    down the look-ups of another sender's id.
    """
    digest = hashlib.md5(str(id).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def page_of(fingerprint: int, pages: int) -> int:
    """Return the number of the page, of so many (a power of 2), that holds the fingerprint."""
    return fingerprint * pages >> FINGERPRINT_BITS


def matches(page: bytes, fingerprint: int) -> list[int]:
    """Return the offsets, counted from the start of the block, of records with the fingerprint."""

    def entry(number: int) -> int:
        return int.from_bytes(page[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES], "little")

    entries = range(len(page) // ENTRY_BYTES)
    first = bisect_left(entries, fingerprint << OFFSET_BITS, key=entry)
    last = bisect_left(entries, fingerprint + 1 << OFFSET_BITS, key=entry)
    return [entry(each) & (1 << OFFSET_BITS) - 1 for each in range(first, last)]


def _id(name: str) -> bytes:
    return str(MessageId(due_ms=0, unique=f"@index:{name}")).encode()


@dataclass(frozen=True, slots=True)
class Block:
    """An indexed range of a slot."""

    start: int
    end: int
    #: The offset of each page, a power of 2 of them; None is a page that would be too large.
    pages: tuple[int | None, ...]

    @property
    def count(self) -> int:
        """Return how many offsets it spans."""
        return self.end - self.start

    def page_id(self, number: int) -> bytes:
        """Return what the record of this page has as its DUE_ID."""
        return _id(f"{self.start}.{self.end}.{number}.{len(self.pages)}")


@dataclass(frozen=True, slots=True)
class Directory:
    """The blocks of one slot, in order of offset, which do not overlap."""

    blocks: tuple[Block, ...]

    def encoded(self) -> bytes:
        """Return the value of its record: JSON."""
        blocks = [[each.start, each.end, each.pages] for each in self.blocks]
        return json.dumps({"blocks": blocks}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read such a value. Raises ValueError, TypeError or LookupError for any other."""
        blocks = json.loads(value)["blocks"]
        return cls(tuple(Block(start, end, tuple(pages)) for start, end, pages in blocks))


NO_BLOCKS = Directory(())

#: What the record of a directory has as its DUE_ID.
DIRECTORY_ID = _id("directory")


def index_headers(id: bytes) -> list[Header]:  # noqa: A002 (what all call it)
    """Return the headers of an index record with this DUE_ID: those of a cancel due in 1970."""
    values = {DUE_AT_MS: b"0", DUE_ID: id}
    return [(name, values.get(name)) for name in WAITING_HEADERS]


class IndexReader:
    """Looks ids up in the index, with a consumer of the group that has committed directories."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader

    def narrowed(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        waiting: OffsetRange,
    ) -> list[OffsetRange]:
        """Return the parts of a range in which records with this id may be: the fewer the better.

        Raises KafkaError.
        """
        place = waiting.topic, waiting.partition
        parts, at = list[OffsetRange](), waiting.start
        blocks, are_there = self.directory(place).blocks, list[bool]()
        for block in blocks:
            if block.end <= at or block.start >= waiting.end:
                continue
            parts.append(replace(waiting, start=at, end=max(at, block.start)))
            within = replace(waiting, start=max(at, block.start), end=min(block.end, waiting.end))
            found = self._in_block(place, block, id, within)
            are_there.append(found is not None)
            parts += [within] if found is None else found
            at = within.end
        # A directory whose pages are elsewhere is a copy from another log: a mirror's, say.
        is_ours = bool(are_there) and all(are_there)
        for first, last in _page_runs(blocks) if is_ours else ():
            if at <= first and last < waiting.end:
                parts.append(replace(waiting, start=at, end=first))
                at = last + 1
        parts.append(replace(waiting, start=at))
        return [each for each in parts if each.count > 0]

    def directory(self, place: Place) -> Directory:
        """Return what is indexed of this partition; of what cannot be read, nothing."""
        try:
            offset = self._reader.committed(place)
            value = None if offset is None else self._value(place, offset, DIRECTORY_ID)
            return NO_BLOCKS if value is None else Directory.decode(value)
        except (KafkaError, ValueError, TypeError, LookupError) as error:
            log.warning(
                "index not usable topic=%s partition=%d error=%s: the slot is read instead",
                *place,
                words(error),
            )
            return NO_BLOCKS

    def _in_block(
        self,
        place: Place,
        block: Block,
        id: MessageId,  # noqa: A002 (what all call it)
        within: OffsetRange,
    ) -> list[OffsetRange] | None:
        """Return the parts of an indexed range with the id; None where its page is not there."""
        wanted = fingerprint(id)
        number = page_of(wanted, len(block.pages))
        offset = block.pages[number]
        page = None if offset is None else self._value(place, offset, block.page_id(number))
        if page is None:
            return None
        found = [block.start + each for each in matches(page, wanted)]
        runs = _runs([each for each in found if within.start <= each < within.end], NEAR)
        return [replace(within, start=first, end=last + 1) for first, last in runs]

    def _value(self, place: Place, offset: int, id: bytes) -> bytes | None:  # noqa: A002 (what all call it)
        """Return the value of the index record there; None where there is another record, or none.

        Raises KafkaError.
        """
        # Not more than one: where the log is shorter than that, others come from its beginning.
        record = next(self._reader.records([OffsetRange(*place, offset, offset + 1)]), None)
        is_it = record and record.offset() == offset and headers_of(record) == index_headers(id)
        return record.value() if record and is_it else None


def _page_runs(blocks: Iterable[Block]) -> Iterator[tuple[int, int]]:
    """Give the first and the last offset of each long run of pages, in order."""
    pages = sorted(page for block in blocks for page in block.pages if page is not None)
    runs = _runs(pages, 1)
    return ((first, last) for first, last in runs if last - first >= PASSED_PAGES)


def _runs(offsets: Sequence[int], near: int) -> Iterator[tuple[int, int]]:
    """Give the first and the last of each run of ascending offsets that are so near each other."""
    first = None
    for at, offset in enumerate(offsets):
        first = offset if first is None else first
        if at + 1 == len(offsets) or offsets[at + 1] - offset > near:
            yield first, offset
            first = None
