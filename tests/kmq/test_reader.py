"""What reading keeps to: so many at most, and a batch that failed is not passed over."""

import pytest
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, TopicPartition

from duetime.errors import KafkaError
from duetime.kmq import reader
from duetime.kmq.breaker import Breaker, BreakerPolicy
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

    def close(self): ...


class Marking:
    """The first batch of markers may not be written."""

    def __init__(self, *, fails=True):
        self._fails = fails

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
