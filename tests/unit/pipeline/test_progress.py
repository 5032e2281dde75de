"""The offsets of a real-time query before which all is acknowledged."""

import pytest

from duetime.pipeline.recovery.progress import (
    GROWTHS,
    LastRecords,
    Reading,
    RunProducer,
    RunProgress,
)
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S

IN = ("in", 0)
OTHER = ("in", 1)


class Producer:
    """Readings of a producer, one second apart."""

    def __init__(self):
        self.progress = RunProgress()
        self.errors, self.at_s, self.sent, self.clock_s = 0, 0.0, 0, 5.0
        self.offsets, self.is_over = {}, False

    def read(self, offsets=(), *, held=100, sent=1):
        """Return what is reached by the next reading; `sent` is how many it sent before."""
        self.at_s += 1.0
        self.sent += sent
        self.offsets |= dict(offsets)
        return self.progress.add(
            Reading(
                at_s=self.at_s,
                clock_s=self.clock_s,
                offsets=dict(self.offsets),
                sent=self.sent,
                unacknowledged_bytes=held,
                errors=self.errors,
                is_over=self.is_over,
            )
        )

    def wait(self, seconds, **others):
        """Return what is reached within these seconds, in the order of the readings."""
        return [found for _ in range(int(seconds)) if (found := self.read(**others))]


@pytest.fixture
def producer():
    return Producer()


def test_an_empty_buffer_shows_that_all_before_the_notes_is_acknowledged(producer):
    producer.read({IN: 64})
    assert producer.read({OTHER: 128}, held=0) == {IN: 64, OTHER: 128}


def test_a_busy_producer_has_acknowledged_what_is_older_than_its_timeout(producer):
    producer.read({IN: 64})
    producer.read({IN: 128})
    assert not producer.wait(DELIVERY_TIMEOUT_S + GROWTHS - 1)
    assert producer.read() == {IN: 64}
    assert producer.read() == {IN: 128}


def test_nothing_is_reached_while_the_producer_stands_still(producer):
    producer.read({IN: 64})
    assert not producer.wait(10 * DELIVERY_TIMEOUT_S, sent=0)
    assert not producer.wait(GROWTHS - 1)
    assert producer.read()


def test_nothing_is_reached_after_an_error(producer):
    producer.read({IN: 64})
    producer.errors += 1
    assert not producer.read(held=0)
    assert not producer.wait(2 * DELIVERY_TIMEOUT_S)
    assert not producer.read({IN: 128}, held=0)


def test_nothing_is_reached_once_the_producer_is_broken(producer):
    """Its buffer is empty then: it has dropped what was in it."""
    producer.read({IN: 64})
    producer.is_over = True
    assert not producer.read(held=0)
    producer.is_over = False
    assert not producer.wait(2 * DELIVERY_TIMEOUT_S, held=0)


def test_a_clock_that_is_set_begins_the_wait_again(producer):
    producer.read({IN: 64})
    producer.wait(DELIVERY_TIMEOUT_S)
    producer.clock_s -= 3_600
    assert not producer.wait(DELIVERY_TIMEOUT_S)
    assert producer.wait(2 * GROWTHS)


@pytest.fixture
def last():
    return LastRecords()


def test_the_last_record_is_given_away_once_its_task_fetches_again(last):
    assert last.add({IN: 7}, {IN: 10}.get) == {IN: 7}
    # That fetch may be from before the note.
    assert last.add({IN: 7}, {IN: 11}.get) == {IN: 7}
    assert last.add({IN: 7}, {IN: 12}.get) == {IN: 8}
    assert last.add({IN: 7}, {IN: 12}.get) == {IN: 8}


def test_a_task_that_does_not_fetch_may_still_have_it(last):
    for _ in range(5):
        assert last.add({IN: 7}, {IN: 10}.get) == {IN: 7}


def test_fetches_before_a_record_say_nothing_of_it(last):
    last.add({IN: 7}, {IN: 10}.get)
    last.add({IN: 7}, {IN: 10}.get)
    assert last.add({IN: 9}, {IN: 20}.get) == {IN: 9}
    assert last.add({IN: 9}, {IN: 20}.get) == {IN: 9}
    assert last.add({IN: 9}, {IN: 21}.get) == {IN: 10}


class Pooled:
    """A producer that was opened at an instant, and its errors."""

    def __init__(self, started_ms, errors):
        self.started_ms, self.errors = started_ms, lambda: errors
        self.sent = self.unacknowledged_bytes = lambda: 0
        self.is_over = lambda: False


def test_errors_before_the_run_are_of_another():
    kept = Pooled(1, errors=3)
    assert RunProducer(lambda: kept).read({IN: 1}).errors == 0


def test_all_errors_of_a_producer_that_the_run_has_opened_count():
    pool = [Pooled(2, errors=1), Pooled(1, errors=1)]
    assert RunProducer(pool.pop).read({IN: 1}).errors == 1


def test_there_is_no_reading_before_the_first_record():
    pool = [Pooled(2, errors=0), Pooled(1, errors=0)]
    assert RunProducer(pool.pop).read({}) is None
    assert len(pool) == 1
