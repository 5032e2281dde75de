"""Slot indexer: indexes large slots in the background, so that one message is found by its id.

`duetime.stores.slot_index` describes the format. Spark reads the records of a block and sorts their
fingerprints; 8 bytes a record come to the driver, which cuts them into pages and appends these to
the slot. A crash between two lines of `SlotIndexer._index` leaves pages that no directory names;
they are freed with the slot.

A slot is indexed while it is filled: each 50,000 records become a small block, and where small
blocks and new records are 1,000,000 records, these become one block. So a look-up in a slot of
10,000,000 reads a page of 10 to 30 blocks and at most 50,000 records that are not indexed, and each
record is indexed twice.
"""

import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Container, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import Producer
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.clock import Clock
from duetime.core.errors import KafkaError, error_text
from duetime.core.settings import Settings
from duetime.core.topics import OVERHEAD_BYTES, TopicNames
from duetime.kafka.offsets import OffsetRange, Offsets, Partition
from duetime.kafka.producer import producer_properties
from duetime.kafka.range_reader import RangeReader
from duetime.spark.columns import scheduled_text
from duetime.spark.kafka_io import read_ranges
from duetime.stores.slot_index import (
    DIRECTORY_ID,
    ENTRY_BYTES,
    FINGERPRINT_BITS,
    OFFSET_BITS,
    Block,
    Directory,
    IndexReader,
    index_headers,
)
from duetime.stores.wheel_reader import SlotRange, WheelReader

log = logging.getLogger(__name__)

#: Records of a slot that are worth an index: fewer take 0.2 to 0.5 s to read in Python.
MIN_RECORDS = 50_000

#: Records of a block at most: reading them keeps a core busy for some seconds.
BLOCK_RECORDS = 1_000_000

#: Entries of a page, on average and at most: every slot takes records of OVERHEAD_BYTES.
PAGE_ENTRIES, MAX_PAGE_ENTRIES = 4_096, OVERHEAD_BYTES * 7 // 8 // ENTRY_BYTES

#: Size of a page's offset in a directory, in bytes: its digits and a comma.
PAGE_OFFSET_BYTES = 12

#: A slot that is acquired sooner than this is not indexed, in ms: an index record that came after
#: that would be overdue.
MIN_REMAINING_MS = 120_000

#: Interval between two jobs, in seconds. After a job it is at least the job's duration: at most
#: half a core is kept busy.
INTERVAL_S = 5.0

#: Interval between commits of all directories, in seconds: Kafka forgets offsets older than
#: `offsets.retention.minutes`, by default a week, and slots wait for years.
COMMIT_INTERVAL_S = 3_600.0

#: Time limit for the broker to acknowledge index records, in seconds.
ACKNOWLEDGE_TIMEOUT_S = 30.0

#: Time limit for the thread to end, in seconds.
CLOSE_TIMEOUT_S = 5.0

#: Spark's tag of the jobs.
TAG = "index"


class SlotIndexing:
    """Background service that indexes large slots. Start it once."""

    def __init__(self, spark: SparkSession, settings: Settings, clock: Clock) -> None:
        self._spark, self._settings, self._clock = spark, settings, clock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop, also in the middle of a job. Safe to repeat.

        A thread that Kafka does not answer is left to end by itself: its index is of use.
        """
        self._closing.set()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            # Repeated, because a job cannot be cancelled while it is being planned.
            self._spark.sparkContext.cancelJobsWithTag(TAG)
            self._thread.join(timeout=0.1)

    def _run(self) -> None:
        self._spark.sparkContext.addJobTag(TAG)
        with closing(SlotIndexer(self._spark, self._settings, self._clock)) as indexer:
            rest_s = INTERVAL_S
            while not self._closing.wait(rest_s):
                started_s = time.monotonic()
                try:
                    indexer.index_next()
                except Exception as error:  # noqa: BLE001 (whatever it was, it is tried again)
                    if not self._closing.is_set():
                        log.warning("could not index slot error=%s", error_text(error))
                rest_s = max(INTERVAL_S, time.monotonic() - started_s)


class SlotIndexer:
    """Indexes one block at a time. Holds connections: close it. Not thread-safe."""

    def __init__(self, spark: SparkSession, settings: Settings, clock: Clock) -> None:
        self._spark, self._settings, self._clock = spark, settings, clock
        self._wheel = WheelReader(settings)
        self._group = TopicNames(settings).index_group
        self._offsets = Offsets(settings, self._group)
        #: The offset of each partition's directory, and the directory.
        self._directories = dict[Partition, tuple[int, Directory]]()
        self._committed_s = time.monotonic()

    def index_next(self) -> bool:
        """Index the next block of the slot with the most to index; False if none has enough.

        Raises KafkaError, and what Spark raises.
        """
        large = self._large_slots()
        self._forget_others(large)
        plans = {place: plan(large[place].range, self._directory(place)) for place in large}
        possible = {place: each for place, each in plans.items() if each and self._has_room(each)}
        if not possible:
            return False
        place, chosen = max(possible.items(), key=lambda each: each[1].range.count)
        self._index(place, chosen, large[place])
        return True

    def close(self) -> None:
        """Close the connections."""
        self._wheel.close()
        self._offsets.close()

    def _large_slots(self) -> dict[Partition, SlotRange]:
        """Return the committed records of large slots that are not acquired soon."""
        large = {
            (each.range.topic, each.range.partition): each
            for each in self._wheel.slot_ranges(self._clock.now_ms())
            if each.range.count >= MIN_RECORDS and self._is_time_left(each)
        }
        # A record in an open transaction may still be aborted.
        ends = self._offsets.ends(large, committed_only=True)
        return {
            place: replace(each, range=replace(each.range, end=min(each.range.end, ends[place])))
            for place, each in large.items()
        }

    def _is_time_left(self, stretch: SlotRange) -> bool:
        closes_ms = self._settings.wheel.release_at_ms(stretch.slot, self._settings.release_lead_ms)
        return closes_ms - self._clock.now_ms() > MIN_REMAINING_MS

    def _directory(self, place: Partition) -> Directory:
        if place not in self._directories:
            with RangeReader(self._settings, group=self._group) as reader:
                offset = reader.committed(place) or 0
                self._directories[place] = offset, IndexReader(reader).directory(place)
        return self._directories[place][1]

    def _forget_others(self, large: Container[Partition]) -> None:
        """Forget slots that were acquired, and commit the others again once an hour."""
        known = self._directories.items()
        self._directories = {place: each for place, each in known if place in large}
        if time.monotonic() - self._committed_s > COMMIT_INTERVAL_S:
            self._committed_s = time.monotonic()
            named = self._directories.items()
            self._offsets.commit({place: offset for place, (offset, each) in named if each.blocks})

    def _has_room(self, chosen: "Plan") -> bool:
        """Return whether the slot takes a record with the directory of all these blocks."""
        named = sum(len(each.pages) for each in chosen.kept) + page_count(chosen.range.count)
        limit_bytes = self._settings.max_message_bytes + OVERHEAD_BYTES // 2
        return named * PAGE_OFFSET_BYTES < limit_bytes

    def _index(self, place: Partition, chosen: "Plan", stretch: SlotRange) -> None:
        started_s = time.monotonic()
        records = read_ranges(self._spark, self._settings, [chosen.range])
        found = entries(records, chosen.range.start).sortWithinPartitions("entry").toArrow()
        cut = pages(memoryview(found.column("entry").to_numpy()))
        if not self._is_time_left(stretch):
            return
        block = Block(chosen.range.start, chosen.range.end, (None,) * len(cut))
        named = {number: page for number, page in enumerate(cut) if page is not None}
        written = self._append(
            place, [(block.page_id(number), page) for number, page in named.items()]
        )
        offsets = dict(zip(named, written, strict=True))
        block = replace(block, pages=tuple(offsets.get(each) for each in range(len(cut))))
        directory = Directory((*chosen.kept, block))
        (offset,) = self._append(place, [(DIRECTORY_ID, directory.encoded())])
        self._offsets.commit({place: offset})
        self._directories[place] = offset, directory
        log.info(
            "indexed slot topic=%s partition=%d from=%d to=%d blocks=%d seconds=%.1f",
            *place,
            block.start,
            block.end,
            len(directory.blocks),
            time.monotonic() - started_s,
        )

    def _append(self, place: Partition, records: Sequence[tuple[bytes, bytes]]) -> list[int]:
        """Append index records to the slot and return their offsets. Raises KafkaError."""
        # An idempotent producer keeps the order of a partition.
        reports: list[tuple[BrokerError | None, int]] = []
        # A page is read alone: with others in its batch, those would be fetched, too.
        producer = Producer(producer_properties(self._settings) | {"batch.num.messages": 1})
        topic, partition = place
        for id, value in records:  # noqa: A001 (what all call it)
            producer.produce(
                topic,
                value,
                partition=partition,
                headers=[*index_headers(id)],
                on_delivery=lambda error, record: reports.append((error, record.offset() or 0)),
            )
        producer.flush(ACKNOWLEDGE_TIMEOUT_S)
        errors = [error.str() for error, _ in reports if error is not None]
        if errors or len(reports) < len(records):
            why = errors[0] if errors else f"no answer for {ACKNOWLEDGE_TIMEOUT_S:.0f} s"
            raise KafkaError(f"could not write index records ({why}): check that the broker is up")
        return [offset for _, offset in reports]


@dataclass(frozen=True, slots=True)
class Plan:
    """The range of a slot's next block, and the blocks that stay."""

    range: OffsetRange
    kept: tuple[Block, ...]


def plan(waiting: OffsetRange, directory: Directory) -> Plan | None:
    """Choose the next block of a slot that holds `waiting`; None if it has too few new records."""
    kept = [each for each in directory.blocks if each.end > waiting.start]
    start = max(waiting.start, kept[-1].end if kept else 0)
    if waiting.end - start < MIN_RECORDS:
        return None
    small = len(kept)
    while small and kept[small - 1].count < BLOCK_RECORDS:
        small -= 1
    if small < len(kept) and waiting.end - kept[small].start >= BLOCK_RECORDS:
        start = max(waiting.start, kept[small].start)
        kept = kept[:small]
    end = min(waiting.end, start + BLOCK_RECORDS)
    return Plan(OffsetRange(waiting.topic, waiting.partition, start, end), tuple(kept))


def page_count(entry_count: int) -> int:
    """Return the number of pages of a block with `entry_count` entries: a power of 2."""
    return 1 << max(0, math.ceil(math.log2(max(1, entry_count) / PAGE_ENTRIES)))


def pages(block: memoryview) -> list[bytes | None]:
    """Cut sorted entries (of format `q`) into pages; None is one that would be too large."""
    count = page_count(len(block))
    width = (1 << FINGERPRINT_BITS + OFFSET_BITS) // count
    cuts = [bisect_left(block, each * width) for each in range(count)] + [len(block)]
    found = [block[cuts[each] : cuts[each + 1]] for each in range(count)]
    return [bytes(each) if len(each) <= MAX_PAGE_ENTRIES else None for each in found]


def entries(records: DataFrame, start: int) -> DataFrame:
    """Return the column entry of each record that has an id, in a block from offset `start`."""
    identity = scheduled_text(F.col("headers"), H.DUE_ID)
    entry = F.shiftleft(fingerprints(identity), OFFSET_BITS) + (F.col("offset") - start)
    return records.select(entry.alias("entry")).where("entry is not null")


def fingerprints(id: Column) -> Column:  # noqa: A002 (what all call it)
    """Return what `duetime.stores.slot_index.fingerprint` returns in Python."""
    first = F.conv(F.substring(F.md5(id.cast("binary")), 1, 8), 16, 10)
    return F.shiftright(first.cast("bigint"), 1)
