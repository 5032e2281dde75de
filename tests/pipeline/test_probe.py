"""Probes where nothing comes back: they are few then, and enough to be missed."""

import time
from itertools import count, takewhile
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import REGISTRY
from tests.conftest import SetClock, eventually

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.pipeline.own import PATHS, Probes
from duetime.pipeline.probe import LEAVE_S, SELDOM_S, SILENT_S, SURE_MS, Prober, Probers, Rhythm
from duetime.tables import Cluster

OFFSET = "duetime_clock_offset_seconds"

#: Other clusters that do not answer.
AWAY = {name: Cluster(bootstrap="127.0.0.1:1", probe_topic="probes") for name in ("a", "b", "c")}


def sent(rhythm, seconds, *, is_read=True):
    """At which of these it was the turn of one."""
    return [each for each in seconds if rhythm.is_next(each, is_read=is_read)]


def test_a_probe_is_sent_each_second_while_they_come():
    rhythm = Rhythm()
    for now_s in range(1_000, 1_000 + 5 * int(SILENT_S)):
        assert rhythm.is_next(now_s, is_read=True)
        rhythm.heard(now_s)


def test_where_none_comes_one_is_sent_a_minute_until_one_has_come():
    rhythm = Rhythm()
    first = int(SILENT_S)
    hours = range(first, first + 8 * 3_600)
    assert len(sent(rhythm, range(first))) == first
    assert len(sent(rhythm, hours)) == len(hours) / SELDOM_S
    rhythm.heard(hours.stop)
    assert sent(rhythm, [hours.stop, hours.stop + 1]) == [hours.stop, hours.stop + 1]


def test_where_nobody_can_read_them_one_is_sent_a_minute_from_the_first_on():
    rhythm = Rhythm()
    assert sent(rhythm, range(10, 10 + 5 * int(SELDOM_S)), is_read=False) == [
        *takewhile(lambda each: each < 10 + 5 * SELDOM_S, count(10, int(SELDOM_S)))
    ]


def told_of(cluster):
    """How many probes for there were sent, by path."""
    labels = ({"cluster": cluster, "path": path} for path in PATHS)
    return [REGISTRY.get_sample_value("duetime_probes_total", each) or 0 for each in labels]


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_probes_are_sent_to_a_cluster_that_is_away_from_the_beginning(settings, monkeypatch):
    monkeypatch.setattr("duetime.pipeline.own.TIMEOUT_S", 0.2)
    prober = Prober(settings.model_copy(update={"clusters": AWAY}), SystemClock(), "a")
    prober.start()
    eventually(lambda: min(told_of("a")))
    prober.close()


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_all_that_wait_for_a_cluster_that_is_away_end_together(settings):
    probers = Probers(settings.model_copy(update={"clusters": AWAY}), SystemClock())
    probers.start()
    begun_s = time.monotonic()
    probers.close()
    # One after the other they would take three times as long.
    assert time.monotonic() - begun_s < 2 * LEAVE_S


def test_what_cannot_be_read_any_more_is_not_taken_for_silence():
    gone = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    consumer = SimpleNamespace(consume=lambda *_, **__: [SimpleNamespace(error=lambda: gone)])
    probes = Probes(Settings(bootstrap="127.0.0.1:1"), "probe")
    with pytest.raises(KafkaException):
        list(probes.arrived(consumer, 0))


def test_what_others_write_where_probes_arrive_is_none_of_them():
    headers = [("due-id", b"\xff-not-utf-8")]
    record = SimpleNamespace(error=lambda: None, headers=lambda: headers)
    consumer = SimpleNamespace(consume=lambda *_, **__: [record])
    probes = Probes(Settings(bootstrap="127.0.0.1:1"), "probe")
    assert list(probes.arrived(consumer, 0)) == []


@pytest.fixture
def prober():
    """One that knows no broker, and whose clock is set."""
    return Prober(Settings(bootstrap="127.0.0.1:1"), SetClock(0))


def acknowledged(prober, *, sent_ms, took_ms, ahead_ms):
    """Lets it hear that Kafka has a probe, whose clock is ahead by so much."""
    prober._clock.ms = sent_ms + took_ms
    stamped_ms = sent_ms + took_ms // 2 + ahead_ms
    prober._taken(sent_ms, "lanes", None, SimpleNamespace(timestamp=lambda: (2, stamped_ms)))


@pytest.mark.parametrize("took_ms", [10, 2 * SURE_MS - 10])
def test_what_is_acknowledged_quickly_says_how_far_the_clocks_are_apart(prober, took_ms):
    acknowledged(prober, sent_ms=1_000_000, took_ms=took_ms, ahead_ms=700)
    assert REGISTRY.get_sample_value(OFFSET) == 0.7
    prober.stop()
    acknowledged(prober, sent_ms=1_000_000, took_ms=took_ms, ahead_ms=700)
    assert REGISTRY.get_sample_value(OFFSET) == 0


def test_a_broker_that_is_slow_says_nothing_of_its_clock(prober):
    before = REGISTRY.get_sample_value(OFFSET)
    acknowledged(prober, sent_ms=1_000_000, took_ms=2 * SURE_MS + 10, ahead_ms=900)
    assert REGISTRY.get_sample_value(OFFSET) == before
