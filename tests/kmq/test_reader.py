"""What reading keeps to: so many at most, and a batch that failed is not passed over."""

import threading
import time
from functools import partial

import pytest
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, TopicPartition
from tests.conftest import eventually

from duetime.errors import KafkaError
from duetime.kmq import reader
from duetime.kmq.breaker import Breaker, BreakerPolicy
from duetime.kmq.markers import GivenBack
from duetime.kmq.message import Message
from duetime.kmq.reader import Reader


class Record:
    """A message of the queue, which nobody takes."""

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

    def keep(self, now_s):  # noqa: ARG002 (it needs no more time)
        return True

    def give_back(self): ...


class Consumer:
    """Has one partition with three messages, and cannot go back in it."""

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


class Marking:
    """The first batch of markers may not be written."""

    def __init__(self, *, fails=True):
        self._fails = fails
        #: What was written of single messages, by their offsets.
        self.restarted, self.unseen = [], []

    def restart(self, key, timeout_ms):  # noqa: ARG002 (its own)
        self.restarted.append(key.offset)

    def give_back(self, key, why, retry_ms):
        assert (why, retry_ms) == (GivenBack.UNSEEN, 0)
        self.unseen.append(key.offset)

    def start_all(self, keys, timeout_ms):  # noqa: ARG002 (which of them is all the same)
        fails, self._fails = self._fails, False
        if fails:
            raise KafkaError("no answer")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(reader, "AGAIN_S", 0)


def started(*, is_ours):
    breaker = Breaker(BreakerPolicy(), "jobs")
    made = Reader(
        Consumer(is_ours=is_ours),
        Marking(),
        breaker,
        lambda record: record,
        batch=1,
        timeout_ms=1_000,
    )
    made.start()
    return made


def test_reading_ends_where_a_batch_that_is_ours_cannot_be_read_again():
    ended = started(is_ours=True)
    with pytest.raises(KafkaError, match="cannot be read again"):
        ended.wait()


def test_reading_goes_on_where_the_partition_is_somebody_elses_now():
    going_on = started(is_ours=False)
    assert going_on.wait()
    assert going_on._buffer[0].offset() == 1
    going_on.close()


class Endless:
    """Has as many messages as are asked for, unless it is paused."""

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
def test_no_more_wait_for_a_worker_than_a_batch(waiting, wanted, monkeypatch):
    monkeypatch.setattr(reader, "FULL_S", 0)
    consumer, breaker = Endless(), Breaker(BreakerPolicy(), "jobs")
    made = Reader(
        consumer, Marking(fails=False), breaker, lambda record: record, batch=10, timeout_ms=1_000
    )
    made._buffer.extend(Record(each) for each in range(waiting))
    made._next_batch(made._room())
    assert consumer.asked == [wanted]
    assert len(made._buffer) <= 10


TIMEOUT_S = 30.0


class Waiting:
    """A reader's messages of 30 s, which began to wait at its `begun_s`; none is read any more."""

    def __init__(self, count):
        self.marking, breaker = Marking(), Breaker(BreakerPolicy(), "jobs")
        make = partial(
            Message,
            marking=self.marking,
            breaker=breaker,
            timeout_ms=TIMEOUT_S * 1_000,
            most_ms=10**9,
        )
        consumer = Endless()
        self.reader = Reader(
            consumer, self.marking, breaker, make, batch=10, timeout_ms=TIMEOUT_S * 1_000
        )
        self.reader._hand_over([Record(each) for each in range(count)])
        self.begun_s = time.monotonic()

    def look_after(self, after_s):
        self.reader._look_after(self.begun_s + after_s)


@pytest.fixture
def waiting():
    return Waiting(3)


def test_what_waits_is_given_more_time_when_half_is_over_and_again_when_half_of_that_is(waiting):
    waiting.look_after(14)
    assert waiting.marking.restarted == []
    waiting.look_after(19)
    assert waiting.marking.restarted == [0, 1, 2]
    waiting.look_after(29)
    assert waiting.marking.restarted == [0, 1, 2]
    # The first is taken on what looks like a later day, and its worker asks for an hour.
    waiting.reader.take().extend(3_600)
    waiting.look_after(36)
    assert waiting.marking.restarted == [0, 1, 2, 0, 1, 2]


def test_what_waits_is_given_back_where_the_last_work_is_overdue_and_no_worker_asks(waiting):
    waiting.reader.take().extend(60)
    waiting.look_after(20)
    waiting.look_after(40)
    assert waiting.marking.unseen == []
    waiting.look_after(61)
    assert waiting.marking.unseen == [1, 2]
    assert not waiting.reader.has_some()


def test_nothing_is_read_after_that_until_a_worker_asks(waiting):
    waiting.look_after(31)
    assert waiting.marking.unseen == [0, 1, 2]
    assert waiting.reader._room() == 0
    asking = threading.Thread(target=waiting.reader.wait)
    asking.start()
    eventually(waiting.reader._room)
    # Nothing is taken from a worker that waits, for however long it has.
    assert not waiting.reader._is_left(waiting.begun_s + 100)
    waiting.reader._hand_over([Record(3)])
    asking.join()
