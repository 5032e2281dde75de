"""Indexing large slots beside delivering, so that one message is found without reading its slot.

What is written is described in `duetime.stores.index`. Spark reads the records of a block and sorts
their fingerprints; what comes to the driver is 8 bytes a record.

A crash between two lines of `Indexer._index` leaves pages that no directory names. They are freed
with the slot.
"""

import logging
import threading
import time
from collections.abc import Container, Sequence
from contextlib import closing
from dataclasses import replace

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import Message, Producer
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.client import producer_properties
from duetime.clock import Clock
from duetime.columns import waiting_text
from duetime.config import Settings
from duetime.errors import KafkaError, words
from duetime.message import DUE_ID
from duetime.pipeline import blocks
from duetime.pipeline.kafka import read_ranges
from duetime.stores import OffsetRange
from duetime.stores.index import (
    DIRECTORY_ID,
    OFFSET_BITS,
    Block,
    Directory,
    IndexReader,
    index_headers,
)
from duetime.stores.listing import Stretch
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place
from duetime.stores.reader import WheelReader
from duetime.stores.records import RangeReader
from duetime.topics import OVERHEAD_BYTES, TopicNames

log = logging.getLogger(__name__)

#: What a page takes in a directory, in bytes: the digits of its offset, and a comma.
NAMED_BYTES = 12

#: A slot that is taken up sooner than this is not indexed any more, in ms: an index record that
#: came behind that would be overdue.
LEFT_MS = 120_000

#: How often is looked for something to index, in seconds. After a job it rests for as long as that
#: took: at most half a core is kept busy.
LOOK_S = 5.0

#: How often directories are committed again, in seconds: Kafka forgets what is older than
#: `offsets.retention.minutes`, by default a week, and slots wait for years.
COMMIT_S = 3_600.0

#: How long the broker may take to acknowledge index records, in seconds.
TIMEOUT_S = 30.0

#: How long the end of the thread is waited for, in seconds.
CLOSE_S = 5.0

#: Spark's tag of the jobs.
TAG = "index"


def entries(records: DataFrame, start: int) -> DataFrame:
    """Return `entry`: of each record that has an id, its entry in the block that begins there."""
    identity = waiting_text(F.col("headers"), DUE_ID)
    entry = F.shiftleft(fingerprints(identity), OFFSET_BITS) + (F.col("offset") - start)
    return records.select(entry.alias("entry")).where("entry is not null")


def fingerprints(id: Column) -> Column:  # noqa: A002 (what all call it)
    """Return what `duetime.stores.index.fingerprint` returns in Python."""
    first = F.conv(F.substring(F.md5(id.cast("binary")), 1, 8), 16, 10)
    return F.shiftright(first.cast("bigint"), 1)


class Indexer:
    """Indexes one block at a time. Holds connections: close it. Not thread-safe."""

    def __init__(self, spark: SparkSession, settings: Settings, clock: Clock) -> None:
        self._spark, self._settings, self._clock = spark, settings, clock
        self._wheel = WheelReader(settings)
        self._group = TopicNames(settings).index_group
        self._offsets = Offsets(settings, self._group)
        #: The offset of each directory, and what it says.
        self._directories = dict[Place, tuple[int, Directory]]()
        self._committed_s = time.monotonic()

    def index_next(self) -> bool:
        """Index the next block of the slot with the most to index; False where none has enough.

        Raises KafkaError, and what Spark raises.
        """
        large = self._large()
        self._forget_others(large)
        plans = {place: blocks.plan(large[place].range, self._directory(place)) for place in large}
        wanted = {place: each for place, each in plans.items() if each and self._has_room(each)}
        if not wanted:
            return False
        place, chosen = max(wanted.items(), key=lambda each: each[1].range.count)
        self._index(place, chosen, large[place])
        return True

    def close(self) -> None:
        """Close the connections."""
        self._wheel.close()
        self._offsets.close()

    def _large(self) -> dict[Place, Stretch]:
        """Return what waits in large slots that are not taken up soon, up to what is committed."""
        large = {
            (each.range.topic, each.range.partition): each
            for each in self._wheel.stretches(self._clock.now_ms())
            if each.range.count >= blocks.LEAST_RECORDS and self._is_time_left(each)
        }
        # What is in a transaction that is open may still become a record, or none.
        ends = self._offsets.ends(large, committed_only=True)
        return {
            place: replace(each, range=replace(each.range, end=min(each.range.end, ends[place])))
            for place, each in large.items()
        }

    def _is_time_left(self, stretch: Stretch) -> bool:
        closes_ms = self._settings.wheel.closes_at_ms(stretch.slot, self._settings.lead_ms)
        return closes_ms - self._clock.now_ms() > LEFT_MS

    def _directory(self, place: Place) -> Directory:
        if place not in self._directories:
            with RangeReader(
                self._settings, group=TopicNames(self._settings).index_group
            ) as reader:
                offset = reader.committed(place)
                directory = IndexReader(reader).directory(place)
            self._directories[place] = offset or 0, directory
        return self._directories[place][1]

    def _forget_others(self, large: Container[Place]) -> None:
        """Forget slots that were taken up, and commit the others again once an hour."""
        known = self._directories.items()
        self._directories = {place: each for place, each in known if place in large}
        if time.monotonic() - self._committed_s > COMMIT_S:
            self._committed_s = time.monotonic()
            named = self._directories.items()
            self._offsets.commit({place: offset for place, (offset, each) in named if each.blocks})

    def _has_room(self, chosen: blocks.Plan) -> bool:
        """Whether the directory of all these blocks is a record that the slot takes."""
        named = sum(len(each.pages) for each in chosen.kept) + blocks.page_count(chosen.range.count)
        return named * NAMED_BYTES < self._settings.max_message_bytes + OVERHEAD_BYTES // 2

    def _index(self, place: Place, chosen: blocks.Plan, stretch: Stretch) -> None:
        began_s = time.monotonic()
        cut = blocks.pages(self._entries(chosen.range))
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
            "slot indexed topic=%s partition=%d from=%d to=%d blocks=%d seconds=%.1f",
            *place,
            block.start,
            block.end,
            len(directory.blocks),
            time.monotonic() - began_s,
        )

    def _entries(self, range: OffsetRange) -> memoryview:  # noqa: A002 (what it is)
        """Return the block's entries, sorted."""
        records = read_ranges(self._spark, self._settings, [range])
        found = entries(records, range.start).sortWithinPartitions("entry").toArrow()
        return memoryview(found.column("entry").to_numpy())

    def _append(self, place: Place, records: Sequence[tuple[bytes, bytes]]) -> list[int]:
        """Append index records to the slot, and return their offsets. Raises KafkaError."""
        offsets, errors = list[int](), list[BrokerError]()

        def acknowledged(error: BrokerError | None, record: Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                offsets.append(record.offset() or 0)

        # A page is read alone: with others in its batch, those would be fetched, too.
        producer = Producer(producer_properties(self._settings) | {"batch.num.messages": 1})
        topic, partition = place
        for id, value in records:  # noqa: A001 (what all call it)
            producer.produce(
                topic,
                value,
                partition=partition,
                headers=[*index_headers(id)],
                on_delivery=acknowledged,
            )
        producer.flush(TIMEOUT_S)
        if errors or len(offsets) < len(records):
            why = errors[0].str() if errors else f"no answer for {TIMEOUT_S:.0f} s"
            raise KafkaError(f"index records could not be written ({why}): is the broker up?")
        # An idempotent producer keeps the order of a partition.
        return offsets


class Indexing:
    """Indexes large slots in a thread of its own. Start it once."""

    def __init__(self, spark: SparkSession, settings: Settings, clock: Clock) -> None:
        self._spark, self._settings, self._clock = spark, settings, clock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, also in the middle of a job. Safe to repeat.

        A thread that Kafka does not answer is left to end by itself: what it writes is of use.
        """
        self._closing.set()
        deadline = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Repeated, because a job that is still being planned cannot be cancelled yet.
            self._spark.sparkContext.cancelJobsWithTag(TAG)
            self._thread.join(timeout=0.1)

    def _work(self) -> None:
        self._spark.sparkContext.addJobTag(TAG)
        with closing(Indexer(self._spark, self._settings, self._clock)) as indexer:
            rest_s = LOOK_S
            while not self._closing.wait(rest_s):
                began_s = time.monotonic()
                try:
                    indexer.index_next()
                except Exception as error:  # noqa: BLE001 (whatever it was, it is tried again)
                    if not self._closing.is_set():
                        log.warning("slot not indexed error=%s", words(error))
                rest_s = max(LOOK_S, time.monotonic() - began_s)
