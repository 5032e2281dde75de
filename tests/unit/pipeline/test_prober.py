"""Probes, above all where none arrives: they are few then, and enough to be missed."""

import time
from collections import defaultdict
from itertools import count, takewhile
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import REGISTRY
from tests.support.clocks import SetClock

from duetime.core.settings import Settings
from duetime.pipeline.monitoring.prober import (
    LATEST,
    MAX_OFFSET_ERROR_MS,
    SILENCE_S,
    SILENT_INTERVAL_S,
    ProbeArrivals,
    ProbeBackoff,
    Prober,
)

OFFSET = "duetime_clock_offset_seconds"


def sent(backoff, seconds, *, is_readable=True):
    """Return at which of these seconds a probe is sent."""
    return [each for each in seconds if backoff.is_due(each, is_readable=is_readable)]


def test_a_probe_is_sent_each_second_while_they_arrive():
    backoff = ProbeBackoff()
    for now_s in range(1_000, 1_000 + 5 * int(SILENCE_S)):
        assert backoff.is_due(now_s, is_readable=True)
        backoff.reset(now_s)


def test_a_probe_is_sent_each_minute_while_none_arrives():
    backoff = ProbeBackoff()
    first = int(SILENCE_S)
    hours = range(first, first + 8 * 3_600)
    assert len(sent(backoff, range(first))) == first
    assert len(sent(backoff, hours)) == len(hours) / SILENT_INTERVAL_S
    backoff.reset(hours.stop)
    assert sent(backoff, [hours.stop, hours.stop + 1]) == [hours.stop, hours.stop + 1]


def test_a_probe_is_sent_each_minute_while_they_cannot_be_read():
    backoff = ProbeBackoff()
    assert sent(backoff, range(10, 10 + 5 * int(SILENT_INTERVAL_S)), is_readable=False) == [
        *takewhile(
            lambda each: each < 10 + 5 * SILENT_INTERVAL_S, count(10, int(SILENT_INTERVAL_S))
        )
    ]


def test_a_topic_that_cannot_be_read_is_an_error_and_no_silence(prober):
    gone = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    consumer = SimpleNamespace(consume=lambda *_, **__: [SimpleNamespace(error=lambda: gone)])
    with pytest.raises(KafkaException):
        list(prober._arrived(consumer, 0))


def test_foreign_records_where_probes_arrive_are_ignored(prober):
    headers = [("due-id", b"\xff-not-utf-8")]
    record = SimpleNamespace(error=lambda: None, headers=lambda: headers)
    consumer = SimpleNamespace(consume=lambda *_, **__: [record])
    assert list(prober._arrived(consumer, 0)) == []


@pytest.fixture
def prober():
    """A prober without a broker, whose clock is set."""
    return Prober(Settings(bootstrap="127.0.0.1:1"), SetClock(0))


def acknowledged(prober, *, sent_ms, took_ms, ahead_ms):
    """Acknowledge a probe by a broker whose clock is ahead by so much."""
    prober._clock.ms = sent_ms + took_ms
    stamped_ms = sent_ms + took_ms // 2 + ahead_ms
    prober._acknowledged(sent_ms, "lanes", None, SimpleNamespace(timestamp=lambda: (2, stamped_ms)))


@pytest.mark.parametrize("took_ms", [10, 2 * MAX_OFFSET_ERROR_MS - 10])
def test_a_quick_acknowledgement_measures_the_clock_offset(prober, took_ms):
    acknowledged(prober, sent_ms=1_000_000, took_ms=took_ms, ahead_ms=700)
    assert REGISTRY.get_sample_value(OFFSET) == 0.7
    prober.stop()
    acknowledged(prober, sent_ms=1_000_000, took_ms=took_ms, ahead_ms=700)
    assert REGISTRY.get_sample_value(OFFSET) == 0


def test_a_slow_acknowledgement_measures_no_clock_offset(prober):
    before = REGISTRY.get_sample_value(OFFSET)
    acknowledged(prober, sent_ms=1_000_000, took_ms=2 * MAX_OFFSET_ERROR_MS + 10, ahead_ms=900)
    assert REGISTRY.get_sample_value(OFFSET) == before


TIMEOUT_S = 120.0


class Path:
    """A path whose probes are due one a second, and judged as often."""

    def __init__(self):
        self.arrivals, self.now_s = ProbeArrivals(TIMEOUT_S), 0

    def passed(self, seconds, late_s=lambda _: 0):
        """Return True if the path was stuck at any of the next seconds.

        `late_s` takes the due time of a probe and returns its lateness in seconds, or None: lost.
        """
        end_s, was_stuck = self.now_s + seconds, False
        arriving = defaultdict(list)
        for due_s in range(self.now_s, end_s):
            if (late := late_s(due_s)) is not None:
                arriving[due_s + late].append(due_s)
        for now_s in range(self.now_s, end_s):
            self.arrivals.await_probe(now_s, float(now_s))
            for due_s in arriving[now_s]:
                self.arrivals.note(due_s, float(now_s))
            was_stuck |= self.arrivals.is_stuck(float(now_s))
        self.now_s = end_s
        return was_stuck


def never(_):
    return None


@pytest.fixture
def path():
    found = Path()
    assert not found.passed(1_000)
    return found


def test_a_path_without_an_arrival_is_stuck_after_the_timeout(path):
    assert not path.passed(int(TIMEOUT_S), never)
    assert path.passed(10, never)


def test_a_path_that_loses_some_is_stuck(path):
    """One of several brokers is out of reach, and the others are not."""
    assert path.passed(int(TIMEOUT_S) + LATEST, lambda due_s: 0 if due_s % 3 else None)


def test_a_path_that_loses_some_and_delivers_others_late_is_stuck(path):
    """Its queries fail and recover, again and again."""
    assert path.passed(3 * int(TIMEOUT_S), lambda due_s: 25 if due_s % 3 else None)


def test_a_message_that_is_lost_now_and_then_is_no_reason(path):
    assert not path.passed(5_000, lambda due_s: 0 if due_s % LATEST else None)


def test_a_path_on_which_this_leader_has_delivered_nothing_is_not_stuck():
    """Its cause may be another than the leader: the next one would give way as well."""
    assert not Path().passed(1_000, never)


@pytest.mark.parametrize("pause_s", [1, 10, 60])
@pytest.mark.parametrize("growth", [0.3, 0.8])
def test_a_backlog_is_late_and_not_stuck(path, growth, pause_s):
    """Ever more so, and worked off in bursts."""
    begun_s = path.now_s

    def late_s(due_s):
        arrives_s = due_s + int((due_s - begun_s) * growth)
        return -(-arrives_s // pause_s) * pause_s - due_s

    assert not path.passed(2_000, late_s)


def test_an_outage_that_has_ended_is_no_reason(path):
    begun_s, ends_s = path.now_s, path.now_s + int(TIMEOUT_S)
    assert not path.passed(1_000, lambda due_s: max(ends_s - due_s, 0) if due_s > begun_s else 0)


def test_probes_that_were_not_sent_are_not_missing(path):
    for _ in range(1_000):
        path.passed(1, never)
        path.arrivals.forget(path.now_s - 1)
        assert not path.arrivals.is_stuck(float(path.now_s))


def test_another_store_that_is_down_is_no_reason():
    judged = Prober(Settings(bootstrap="127.0.0.1:1", store="redis://127.0.0.1"), SetClock(0))
    assert judged._judged == ("lanes",)


def test_a_path_is_not_judged_where_no_leader_could_deliver(prober):
    arrivals = prober._arrivals["lanes"]
    for each in range(3):
        arrivals.await_probe(each, time.monotonic())
        arrivals.note(each, time.monotonic())
    for is_obstructed in (False, True):
        for each in range(3):
            arrivals.await_probe(each, float("-inf"))
        prober._is_obstructed = lambda is_obstructed=is_obstructed: is_obstructed
        prober._judge()
        assert prober.stuck_path == (None if is_obstructed else "lanes")
