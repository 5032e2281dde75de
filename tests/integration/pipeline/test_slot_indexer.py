"""Slot indexer: large slots are indexed and looked up; sizes are small here."""

from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clocks import SetClock, eventually

from duetime.core.messages import MessageId
from duetime.core.topics import TopicNames
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release import slot_indexer
from duetime.pipeline.release.job import ReleaseJob
from duetime.pipeline.release.slot_indexer import (
    BLOCK_RECORDS,
    MAX_PAGE_ENTRIES,
    MIN_RECORDS,
    PAGE_ENTRIES,
    SlotIndexer,
    SlotIndexing,
    fingerprints,
    page_count,
    pages,
    plan,
)
from duetime.spark.kafka_io import read_ranges
from duetime.stores import slot_index, wheel_reader
from duetime.stores.slot_index import Block, Directory, fingerprint
from duetime.stores.wheel_reader import WheelReader
from duetime.stores.wheel_store import KafkaStore

MINUTE = 60_000


@given(st.lists(st.integers(1, 3 * BLOCK_RECORDS), max_size=40), st.integers(0, 5 * 10**6))
def test_blocks_cover_a_slot_without_gaps_and_small_ones_are_merged(growths, settled):
    """Whatever a slot receives between two looks, and though its first part is settled."""
    end, directory = 0, Directory(())
    for growth in growths:
        end += growth
        start = min(settled, end) if growth % 2 else 0
        waiting = OffsetRange("wheel", 3, start, end)
        while chosen := plan(waiting, directory):
            following = chosen.range
            assert start <= following.start < following.end <= end
            assert following.count <= BLOCK_RECORDS
            block = Block(following.start, following.end, ())
            directory = Directory((*chosen.kept, block))
        made = [each for each in directory.blocks if each.end > start]
        assert all(one.end == following.start for one, following in pairwise(made))
        left = end - max(start, made[-1].end if made else 0)
        assert left < MIN_RECORDS
        small = sum(each.count < BLOCK_RECORDS for each in made)
        assert small <= BLOCK_RECORDS // MIN_RECORDS + 1


@given(st.integers(1, 20 * PAGE_ENTRIES))
def test_pages_have_all_entries_in_order(count):
    entries = memoryview(
        b"".join((at * 2**63 // count).to_bytes(8, "little") for at in range(count))
    )
    found = pages(entries.cast("q"))
    assert b"".join(found) == bytes(entries)
    assert len(found) == page_count(count)
    assert max(map(len, found)) <= 8 * MAX_PAGE_ENTRIES


def test_page_of_one_repeated_id_that_is_too_large_is_left_out():
    entries = memoryview(b"".join(at.to_bytes(8, "little") for at in range(MAX_PAGE_ENTRIES + 1)))
    found = pages(entries.cast("q"))
    assert found[0] is None
    assert len(found) > 1


def test_spark_and_python_agree_on_fingerprints(spark):
    names = [str(MessageId(due_ms=at * 2**40 // 100, unique=f"{at}~@:")) for at in range(100)]
    rows = spark.createDataFrame([(name,) for name in names], "id string")
    found = [row.one for row in rows.select(fingerprints(rows.id).alias("one")).collect()]
    assert found == [fingerprint(MessageId.parse(name)) for name in names]


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(slot_indexer, "INTERVAL_S", 0.05)
    monkeypatch.setattr(slot_indexer, "MIN_RECORDS", 20)
    monkeypatch.setattr(slot_indexer, "BLOCK_RECORDS", 100)
    monkeypatch.setattr(slot_indexer, "PAGE_ENTRIES", 16)
    monkeypatch.setattr(wheel_reader, "MIN_INDEXED_RECORDS", 10)
    monkeypatch.setattr(slot_index, "MIN_SKIPPED_PAGES", 1)


@pytest.fixture
def due_ms(now_ms):
    return now_ms + 40 * MINUTE


@pytest.fixture
def fill(wheel, due_ms):
    def fill(count, **others):
        with wheel.at_once():
            return [wheel.message("orders", due_ms, **others) for _ in range(count)]

    return fill


@pytest.fixture
def indexer(spark, settings, topics, now_ms, _small):  # noqa: ARG001 (the topics must be there)
    with closing(SlotIndexer(spark, settings, SetClock(now_ms))) as opened:
        yield opened


@contextmanager
def reading_at_most(reads, most):
    reads.clear()
    yield
    assert sum(reads) <= most


@pytest.mark.slow
def test_message_and_its_cancel_are_found_in_an_indexed_slot(
    indexer, fill, wheel, wheel_reader, reads
):
    ids, now_ms = fill(90), indexer._clock.ms
    due_ms = ids[0].due_ms
    wheel.cancel(ids[17])
    assert indexer.index_next()
    assert not indexer.index_next()
    late = wheel.message("orders", due_ms, unique="late")
    for at in (0, 17, 50, 89):
        # The directory, a page, the records with the id, and what is not indexed.
        with reading_at_most(reads, 2 + 2 * slot_index.NEAR_OFFSETS + 15):
            found = wheel_reader.find(ids[at], now_ms)
        assert found.id == ids[at]
        assert found.cancelled == (at == 17)
    assert wheel_reader.find(late, now_ms).id == late
    with reading_at_most(reads, 2 + 15):
        assert wheel_reader.find(MessageId(due_ms=due_ms, unique="unknown"), now_ms) is None


@pytest.mark.slow
def test_slot_that_is_being_filled_is_indexed_block_by_block(indexer, fill, wheel_reader, now_ms):
    ids = []
    for _ in range(12):
        ids += fill(30)
        assert indexer.index_next()
    ((_, directory),) = indexer._directories.values()
    assert [each.count for each in directory.blocks].count(100) >= 2
    assert len(directory.blocks) <= 6
    assert [wheel_reader.find(each, now_ms).id for each in ids[::20]] == ids[::20]


def test_next_leader_goes_on_with_the_existing_index(indexer, spark, settings, fill, now_ms):
    fill(60)
    assert indexer.index_next()
    with closing(SlotIndexer(spark, settings, SetClock(now_ms))) as following:
        assert not following.index_next()
        fill(30)
        assert following.index_next()
        ((_, directory),) = following._directories.values()
    assert [each.start for each in directory.blocks] == [0, 60]


@pytest.mark.slow
def test_release_job_drops_index_records_and_nothing_else(indexer, spark, settings, fill, due_ms):
    """They are cancels that are due, of no message: what is not due is routed on without them."""
    ids = fill(60)
    assert indexer.index_next()
    ((topic, partition),) = indexer._directories
    with closing(KafkaStore(settings)) as store, closing(DeliveryLog(spark, settings)) as written:
        (claim,) = store.acquire(settings.wheel.place(due_ms, due_ms - 40 * MINUTE))
        assert (claim.topic, claim.partition) == (topic, partition)
        assert claim.count > 60
        rows = (
            ReleaseJob(spark, settings, written)
            .rows(read_ranges(spark, settings, [claim]))
            .collect()
        )
    sent = [{each.key: each.value for each in row.headers}["due-id"].decode() for row in rows]
    assert sorted(sent) == sorted(map(str, ids))


@pytest.mark.slow
def test_invalid_index_makes_a_look_up_slow_and_not_wrong(
    indexer, fill, wheel_reader, settings, now_ms
):
    ids = fill(60)
    assert indexer.index_next()
    ((place, (at, _)),) = indexer._directories.items()
    with closing(Offsets(settings, TopicNames(settings).index_group)) as offsets:
        for wrong in (0, at - 1, at + 1, at + 1_000_000):
            offsets.commit({place: wrong})
            assert wheel_reader.find(ids[40], now_ms).id == ids[40]
            assert wheel_reader.find(MessageId(due_ms=ids[0].due_ms, unique="no"), now_ms) is None


@pytest.mark.slow
def test_slot_that_was_created_again_is_not_found_by_its_old_index(
    indexer, fill, settings, topics, now_ms
):
    """The index says of offset 40 what was there before."""
    fill(60)
    assert indexer.index_next()
    ((place, (at, _)),) = indexer._directories.items()
    admin = AdminClient(librdkafka_properties(settings))
    for deleted in admin.delete_topics(topics).values():
        deleted.result()
    eventually(lambda: not set(topics) & set(admin.list_topics(timeout=10).topics))
    create_topics(settings)
    # Kafka forgets it with the topic; where it does not, it is no matter.
    with closing(Offsets(settings, TopicNames(settings).index_group)) as offsets:
        offsets.commit({place: at})
    ids = fill(100)
    with closing(WheelReader(settings)) as reader:
        assert [reader.find(each, now_ms).id for each in ids[::33]] == ids[::33]


@pytest.mark.slow
def test_slot_that_is_acquired_soon_is_not_indexed(indexer, fill, settings, due_ms):
    fill(60)
    slot = settings.wheel.place(due_ms, indexer._clock.ms)
    closes_ms = settings.wheel.release_at_ms(slot, settings.release_lead_ms)
    indexer._clock.ms = closes_ms - slot_indexer.MIN_REMAINING_MS
    assert not indexer.index_next()
    indexer._clock.ms -= 1
    assert indexer.index_next()


@pytest.mark.usefixtures("_small")
def test_slots_are_indexed_in_the_background_until_closed(
    spark, settings, fill, wheel_reader, now_ms
):
    ids = fill(60)
    beside = SlotIndexing(spark, settings, SetClock(now_ms))
    beside.start()
    place = settings.wheel.place(ids[0].due_ms, now_ms)
    at = TopicPartition(
        TopicNames(settings).wheel(place.level), settings.wheel.partitions_of(place)[0]
    )
    consumer = Consumer(
        librdkafka_properties(settings) | {"group.id": TopicNames(settings).index_group}
    )
    eventually(lambda: consumer.committed([at], timeout=10)[0].offset >= 0)
    consumer.close()
    beside.close()
    beside.close()
    assert wheel_reader.find(ids[40], now_ms).id == ids[40]
