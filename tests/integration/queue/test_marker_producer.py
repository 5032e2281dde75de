"""The marker producer survives the failure of its client."""

import ctypes
from datetime import timedelta

import pytest
from confluent_kafka import KafkaError as BrokerError
from tests.support.mock_cluster import librdkafka

from duetime.core.errors import ClientFailed, KafkaError
from duetime.queue import consumer
from duetime.queue.message import END_VALUE, MarkerKey, MarkerProducer, start_value


def fail(marking):
    """Fail its client for good, by librdkafka's function for tests."""
    # The first field of confluent-kafka's struct.
    client = ctypes.c_void_p.from_address(id(marking._producer) + object.__basicsize__)
    code = BrokerError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert librdkafka().rd_kafka_test_fatal_error(client, code, b"for this test") == 0


@pytest.fixture
def marking(jobs):
    made = MarkerProducer(jobs.settings, f"{jobs.topic}__markers")
    yield made
    made.close()


KEY = MarkerKey(0, 7)


def test_failed_start_markers_raise_and_replace_the_client(marking, jobs):
    marking.start_all([KEY], 1_000)
    fail(marking)
    with pytest.raises(ClientFailed):
        marking.start_all([KEY], 2_000)
    marking.start_all([KEY], 3_000)
    values = [value for _, _, value, _ in jobs.markers(2)]
    assert values == [start_value(1_000), start_value(3_000)]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_failed_end_marker_is_written_by_a_new_client(marking, jobs, is_closed):
    if is_closed:
        marking.close()
    fail(marking)
    marking.end(KEY)
    assert jobs.markers(1) == [(0, KEY.encoded(), END_VALUE, None)]


def test_closing_a_failed_client_raises_nothing(marking):
    fail(marking)
    marking.close()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(consumer, "RETRY_DELAY_S", 0)


def test_a_worker_continues_after_its_client_fails(jobs, at_once):  # noqa: ARG001
    queue = jobs.queue(timeout=timedelta(minutes=5))
    fail(queue._markers)
    jobs.send("a", "b")
    messages = iter(queue)
    assert [next(messages).value for _ in range(2)] == [b"a", b"b"]


def test_a_worker_raises_if_every_client_fails(jobs, at_once, monkeypatch):  # noqa: ARG001
    queue, start_all = jobs.queue(), MarkerProducer.start_all

    def failing(marking, keys, timeout_ms):
        fail(marking)
        start_all(marking, keys, timeout_ms)

    monkeypatch.setattr(MarkerProducer, "start_all", failing)
    jobs.send("a")
    with pytest.raises(KafkaError, match="cannot be read: a marker cannot be written"):
        next(iter(queue))
