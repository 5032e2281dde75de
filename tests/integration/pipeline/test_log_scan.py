"""Log scans on a real broker, while other steps go on."""

import logging

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client import REGISTRY
from pyspark.errors import IllegalArgumentException
from tests.support.clocks import eventually

from duetime.core.clock import SystemClock
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.pipeline.recovery.read_back import DeliveryLog, IdCache
from duetime.stores.wheel_store import DeletionGuard, KafkaStore


@pytest.fixture
def keeping():
    return DeletionGuard()


@pytest.fixture
def read_back(spark, settings, topics, keeping):  # noqa: ARG001 (they must be there)
    found = DeliveryLog(spark, settings, deletion_guard=keeping)
    yield found
    found.close()


@pytest.fixture
def store(settings, keeping, wheel):  # noqa: ARG001 (messages are written before)
    found = KafkaStore(settings, keeping)
    yield found
    found.close()


@pytest.fixture
def start_of(settings):
    """Where a partition begins by now."""
    offsets = Offsets(settings, TopicNames(settings).release_group)
    yield lambda place: offsets.starts([place])[place]
    offsets.close()


def test_message_that_moves_on_during_a_scan_is_found(
    wheel, store, read_back, start_of, monkeypatch
):
    message = wheel.message("orders", 1_000, level=0)
    claims = store.acquire_overdue(SystemClock().now_ms() + 3_600_000)
    (place,) = {(each.topic, each.partition) for each in claims}
    appended = read_back._appended

    def meanwhile(*asked):
        # Where everything ends is known, and nothing is read: its job has sent it on.
        found = appended(*asked)
        store.settle(claims)
        return found

    monkeypatch.setattr(read_back, "_appended", meanwhile)
    assert str(message) in {row.id for row in read_back.internal(0, IdCache()).collect()}
    assert start_of(place) == 0
    # Not for ever.
    store.delete_before({})
    eventually(lambda: start_of(place) == 1)


@pytest.mark.slow
def test_ids_of_earlier_scans_are_not_copied_by_each_scan(wheel, read_back):
    many = [str(wheel.message("orders", 1_000 + each)) for each in range(20)]
    seen = IdCache()
    assert found(read_back, seen) == many
    (first,) = seen.parts
    for each in range(8):
        many.append(str(wheel.message("orders", 2_000 + each)))
        assert found(read_back, seen) == many
    assert seen.parts[0] is first
    assert [each.records for each in seen.parts] == [20, 8]


def test_failed_scan_loses_no_ids_of_earlier_scans(wheel, read_back, monkeypatch):
    seen = IdCache()
    many = [str(wheel.message("orders", 1_000))]
    assert found(read_back, seen) == many
    many.append(str(wheel.message("orders", 2_000)))
    with monkeypatch.context() as patched:
        patched.setattr("duetime.pipeline.recovery.read_back.ID_PARTITIONS", 0)
        with pytest.raises(IllegalArgumentException):
            read_back.internal(0, seen)
    assert found(read_back, seen) == many


def found(read_back, seen):
    return sorted(row.id for row in read_back.internal(0, seen).collect())


def counted(name):
    return REGISTRY.get_sample_value(name, {"topics": "own"}) or 0


def test_scan_is_counted_and_timed(wheel, read_back, now_ms):
    for number in range(3):
        wheel.message("orders", now_ms + 10_000 + number)
    records, seconds = map(
        counted, ("duetime_recovery_read_records_total", "duetime_recovery_read_seconds_total")
    )
    assert read_back.internal(now_ms - 60_000, IdCache()).count() == 3
    assert counted("duetime_recovery_read_records_total") == records + 3
    assert counted("duetime_recovery_read_seconds_total") > seconds


def test_destination_with_too_short_a_retention_is_warned_of_once(
    settings, read_back, now_ms, caplog
):
    topic = f"{settings.namespace}-to"
    admin = AdminClient(librdkafka_properties(settings))
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result()
    producer = Producer(librdkafka_properties(settings))
    for _ in range(5):
        producer.produce(topic, "x", partition=0)
    assert producer.flush(30) == 0
    with caplog.at_level(logging.WARNING):
        read_back.destinations([topic], now_ms - 60_000, IdCache())
        assert not caplog.records
        # As retention would.
        (removed,) = admin.delete_records([TopicPartition(topic, 0, 3)]).values()
        removed.result()
        read_back.destinations([topic], now_ms - 60_000, IdCache())
        read_back.destinations([topic], now_ms - 60_000, IdCache())
    (told,) = caplog.records
    assert f"topic={topic} reason=its retention is shorter" in told.getMessage()
    admin.delete_topics([topic])[topic].result()
