"""The prefetcher: its limits, failed batches, and hanging workers."""

import threading
import time
from functools import partial

import pytest
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, TopicPartition
from tests.support.clocks import eventually

from duetime.core.errors import KafkaError
from duetime.queue import consumer as queue_consumer
from duetime.queue.circuit_breaker import BreakerPolicy, CircuitBreaker
from duetime.queue.consumer import Prefetcher
from duetime.queue.message import GivenBack, Message


class Record:
    """A record of the queue."""

    def __init__(self, offset):
        self._offset = offset

    def error(self):
        return None

    def topic(self):
        return "jobs"

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def key(self):
        return None

    def value(self):
        return None

    def headers(self):
        return None

    def timestamp(self):
        return 1, 0

    def hold(self, now_s):  # noqa: ARG002 (it needs no more time)
        return True

    def give_back(self): ...


class Consumer:
    """A consumer of one partition with three messages that cannot seek."""

    def __init__(self, *, is_ours):
        self._records = [Record(each) for each in range(3)]
        self._is_ours = is_ours

    def consume(self, count, timeout):  # noqa: ARG002 (there is nothing to wait for)
        found, self._records = self._records[:count], self._records[count:]
        return found

    def assignment(self):
        return [TopicPartition("jobs", 0)] if self._is_ours else []

    def pause(self, places): ...

    def resume(self, places): ...

    def commit(self, *, offsets, asynchronous):  # noqa: ARG002 (as it is called)
        return offsets

    def seek(self, place):  # noqa: ARG002 (to none)
        raise KafkaException(BrokerError(BrokerError._STATE))


class MarkerProducer:
    """A marker producer whose first batch may fail."""

    def __init__(self, *, fails=True):
        self._fails = fails
        #: The offsets of single messages with markers.
        self.restarted, self.unseen = [], []

    def restart(self, key, timeout_ms):  # noqa: ARG002 (its own)
        self.restarted.append(key.offset)

    def give_back(self, key, reason, retry_ms):
        assert (reason, retry_ms) == (GivenBack.UNSEEN, 0)
        self.unseen.append(key.offset)

    def start_all(self, keys, timeout_ms):  # noqa: ARG002 (which of them is all the same)
        fails, self._fails = self._fails, False
        if fails:
            raise KafkaError("no answer")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(queue_consumer, "RETRY_DELAY_S", 0)


def started(*, is_ours):
    breaker = CircuitBreaker(BreakerPolicy(), "jobs")
    made = Prefetcher(
        Consumer(is_ours=is_ours),
        MarkerProducer(),
        breaker,
        lambda record: record,
        prefetch=1,
        timeout_ms=1_000,
    )
    made.start()
    return made


def test_reading_ends_if_an_owned_batch_cannot_be_read_again():
    ended = started(is_ours=True)
    with pytest.raises(KafkaError, match="cannot be read again"):
        ended.wait()


def test_reading_continues_after_the_partition_is_reassigned():
    going_on = started(is_ours=False)
    assert going_on.wait()
    assert going_on._buffer[0].offset() == 1
    going_on.close()


class Endless:
    """A consumer with as many messages as requested, unless it is paused."""

    def __init__(self):
        self.asked, self._paused = [], False

    def consume(self, count, timeout):  # noqa: ARG002 (there is nothing to wait for)
        wanted = 0 if self._paused else count
        self.asked.append(wanted)
        return [Record(each) for each in range(wanted)]

    def assignment(self):
        return []

    def pause(self, places):  # noqa: ARG002 (all of them)
        self._paused = True

    def resume(self, places):  # noqa: ARG002 (all of them)
        self._paused = False

    def commit(self, *, offsets, asynchronous):  # noqa: ARG002 (as it is called)
        return offsets


@pytest.mark.parametrize(("waiting", "wanted"), [(0, 10), (2, 8), (5, 5), (6, 0), (10, 0)])
def test_the_buffer_is_limited(waiting, wanted, monkeypatch):
    monkeypatch.setattr(queue_consumer, "MAX_ROOM_WAIT_S", 0)
    consumer, breaker = Endless(), CircuitBreaker(BreakerPolicy(), "jobs")
    made = Prefetcher(
        consumer,
        MarkerProducer(fails=False),
        breaker,
        lambda record: record,
        prefetch=10,
        timeout_ms=1_000,
    )
    made._buffer.extend(Record(each) for each in range(waiting))
    made._fetch(made._room())
    assert consumer.asked == [wanted]
    assert len(made._buffer) <= 10


TIMEOUT_S = 30.0


class Waiting:
    """A prefetcher whose messages have a timeout of 30 s from `started_s`. It reads no more."""

    def __init__(self, count):
        self.markers, breaker = MarkerProducer(), CircuitBreaker(BreakerPolicy(), "jobs")
        make = partial(
            Message,
            markers=self.markers,
            breaker=breaker,
            timeout_ms=TIMEOUT_S * 1_000,
            max_timeout_ms=10**9,
        )
        consumer = Endless()
        self.prefetcher = Prefetcher(
            consumer, self.markers, breaker, make, prefetch=10, timeout_ms=TIMEOUT_S * 1_000
        )
        self.prefetcher._buffer_messages([Record(each) for each in range(count)])
        self.started_s = time.monotonic()

    def check_waiting(self, after_s):
        self.prefetcher._check_waiting(self.started_s + after_s)


@pytest.fixture
def waiting():
    return Waiting(3)


def test_the_timeout_of_buffered_messages_is_extended_at_half(waiting):
    waiting.check_waiting(14)
    assert waiting.markers.restarted == []
    waiting.check_waiting(19)
    assert waiting.markers.restarted == [0, 1, 2]
    waiting.check_waiting(29)
    assert waiting.markers.restarted == [0, 1, 2]
    # A worker takes the first and extends it to an hour.
    waiting.prefetcher.take().extend_visibility(3_600)
    waiting.check_waiting(36)
    assert waiting.markers.restarted == [0, 1, 2, 0, 1, 2]


def test_buffered_messages_are_given_back_if_workers_hang(waiting):
    waiting.prefetcher.take().extend_visibility(60)
    waiting.check_waiting(20)
    waiting.check_waiting(40)
    assert waiting.markers.unseen == []
    waiting.check_waiting(61)
    assert waiting.markers.unseen == [1, 2]
    assert not waiting.prefetcher.has_some()


def test_reading_resumes_when_a_worker_asks(waiting):
    waiting.check_waiting(31)
    assert waiting.markers.unseen == [0, 1, 2]
    assert waiting.prefetcher._room() == 0
    asking = threading.Thread(target=waiting.prefetcher.wait)
    asking.start()
    eventually(waiting.prefetcher._room)
    # A worker that waits does not hang, however long it has waited.
    assert not waiting.prefetcher._workers_hang(waiting.started_s + 100)
    waiting.prefetcher._buffer_messages([Record(3)])
    asking.join()
