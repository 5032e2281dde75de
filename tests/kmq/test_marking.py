"""What writes markers goes on where Kafka's client does not: on a real one that has failed."""

import ctypes
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import KafkaError as BrokerError

from duetime.errors import ClientFailed, KafkaError
from duetime.kmq import reader
from duetime.kmq.markers import END_VALUE, MarkerKey, start_value
from duetime.kmq.marking import Marking

pytestmark = pytest.mark.system


def fail(marking):
    """Let its client fail for good, by librdkafka's own function for tests."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(one.split()[-1] for one in lines if "librdkafka" in one))
    # The first field of confluent-kafka's own.
    client = ctypes.c_void_p.from_address(id(marking._producer) + object.__basicsize__)
    code = BrokerError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert library.rd_kafka_test_fatal_error(client, code, b"for this test") == 0


@pytest.fixture
def marking(jobs):
    made = Marking(jobs.settings, f"{jobs.topic}__markers")
    yield made
    made.close()


KEY = MarkerKey(0, 7)


def test_start_markers_that_a_client_fails_at_are_told_of_and_the_next_go_by_another(marking, jobs):
    marking.start_all([KEY], 1_000)
    fail(marking)
    with pytest.raises(ClientFailed):
        marking.start_all([KEY], 2_000)
    marking.start_all([KEY], 3_000)
    values = [value for _, _, value, _ in jobs.markers(2)]
    assert values == [start_value(1_000), start_value(3_000)]


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_end_marker_that_a_client_fails_at_goes_by_another(marking, jobs, is_closed):
    if is_closed:
        marking.close()
    fail(marking)
    marking.end(KEY)
    assert jobs.markers(1) == [(0, KEY.encoded(), END_VALUE, None)]


def test_closing_says_nothing_of_a_client_that_has_failed(marking):
    fail(marking)
    marking.close()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(reader, "AGAIN_S", 0)


def test_a_worker_whose_client_fails_goes_on_with_what_was_read(jobs, at_once):  # noqa: ARG001
    queue = jobs.queue(timeout=timedelta(minutes=5))
    fail(queue._marking)
    jobs.send("a", "b")
    messages = iter(queue)
    assert [next(messages).value for _ in range(2)] == [b"a", b"b"]


def test_a_worker_whose_clients_all_fail_is_told_so(jobs, at_once, monkeypatch):  # noqa: ARG001
    queue, start_all = jobs.queue(), Marking.start_all

    def failing(marking, keys, timeout_ms):
        fail(marking)
        start_all(marking, keys, timeout_ms)

    monkeypatch.setattr(Marking, "start_all", failing)
    jobs.send("a")
    with pytest.raises(KafkaError, match="cannot be read: a marker cannot be written"):
        next(iter(queue))
