"""Which records of a slot are indexed together, and how their entries are cut into pages.

Pure arithmetic. A slot is indexed while it is filled: each 50,000 records are a small block, and
where small blocks and what is new are 1,000,000 records, these become one block. So a look-up in a
slot of 10,000,000 reads a page of 10 to 30 blocks and at most 50,000 records that are not indexed
yet, and each record is indexed twice.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from duetime.stores import OffsetRange
from duetime.stores.index import ENTRY_BYTES, FINGERPRINT_BITS, OFFSET_BITS, Block, Directory
from duetime.topics import OVERHEAD_BYTES

#: From so many records on that are not indexed, they are: they take 0.2 to 0.5 s to read in Python.
LEAST_RECORDS = 50_000

#: The most records of a block: reading them keeps a core busy for some seconds.
BLOCK_RECORDS = 1_000_000

#: Entries of a page, on average, and at most: every slot takes records of OVERHEAD_BYTES.
PAGE_ENTRIES, MOST_ENTRIES = 4_096, OVERHEAD_BYTES * 7 // 8 // ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """The next block of a slot, and those that stay."""

    range: OffsetRange
    kept: tuple[Block, ...]


def plan(waiting: OffsetRange, directory: Directory) -> Plan | None:
    """Choose the next block of a slot, of which this waits; None where there is too little."""
    kept = [each for each in directory.blocks if each.end > waiting.start]
    start = max(waiting.start, kept[-1].end if kept else 0)
    if waiting.end - start < LEAST_RECORDS:
        return None
    small = len(kept)
    while small and kept[small - 1].count < BLOCK_RECORDS:
        small -= 1
    if small < len(kept) and waiting.end - kept[small].start >= BLOCK_RECORDS:
        start = max(waiting.start, kept[small].start)
        kept = kept[:small]
    end = min(waiting.end, start + BLOCK_RECORDS)
    return Plan(OffsetRange(waiting.topic, waiting.partition, start, end), tuple(kept))


def page_count(count: int) -> int:
    """Return how many pages a block of so many entries has: a power of 2."""
    return 1 << max(0, math.ceil(math.log2(max(1, count) / PAGE_ENTRIES)))


def pages(block: memoryview) -> list[bytes | None]:
    """Cut sorted entries (of format `q`) into pages; None is one that would be too large."""
    count = page_count(len(block))
    width = (1 << FINGERPRINT_BITS + OFFSET_BITS) // count
    cuts = [bisect_left(block, each * width) for each in range(count)] + [len(block)]
    found = [block[cuts[each] : cuts[each + 1]] for each in range(count)]
    return [bytes(each) if len(each) <= MOST_ENTRIES else None for each in found]
