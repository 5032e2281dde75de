"""Probes, above all where none arrives: they are few then, and enough to be missed."""

from itertools import count, takewhile
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import REGISTRY
from tests.support.clocks import SetClock

from duetime.core.settings import Settings
from duetime.pipeline.monitoring.synthetic_messages import (
    MAX_OFFSET_ERROR_MS,
    SILENCE_S,
    SILENT_INTERVAL_S,
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
        list(prober._arrivals(consumer, 0))


def test_foreign_records_where_probes_arrive_are_ignored(prober):
    headers = [("due-id", b"\xff-not-utf-8")]
    record = SimpleNamespace(error=lambda: None, headers=lambda: headers)
    consumer = SimpleNamespace(consume=lambda *_, **__: [record])
    assert list(prober._arrivals(consumer, 0)) == []


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
