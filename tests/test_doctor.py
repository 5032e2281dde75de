import sys

import pytest
from confluent_kafka import Consumer, TopicPartition

from duetime import doctor
from duetime.clock import Offset, SystemClock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.doctor import checkup, clock_offset, verdict
from duetime.errors import DuetimeError

SECOND = 1_000


class WrongClock:
    """The system's clock, so many ms ahead."""

    def __init__(self, ahead_ms):
        self._ahead_ms = ahead_ms

    def now_ms(self):
        return SystemClock().now_ms() + self._ahead_ms


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.2)
    return Settings(bootstrap="127.0.0.1:1")


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_healthy_machine_passes_every_check(settings):
    checks = by_name(checkup(settings))
    on_linux = ["network"] if sys.platform == "linux" else []
    own = ["Java", "jars", "broker", "topics", "transactions", "clock"]
    assert list(checks) == own + on_linux
    assert all(check.ok for check in checks.values())
    assert settings.bootstrap in checks["broker"].detail


@pytest.mark.system
@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize(
    ("ahead_ms", "words"),
    [(-3 * SECOND, ("behind", "late")), (3 * SECOND, ("ahead of", "early"))],
)
def test_a_wrong_clock_is_told_with_its_way_and_its_effect(settings, ahead_ms, words):
    clock = by_name(checkup(settings, WrongClock(ahead_ms)))["clock"]
    assert not clock.ok
    assert all(word in clock.detail for word in (*words, "NTP"))


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_the_offset_is_what_the_clock_is_wrong_by(settings):
    offset = clock_offset(settings, WrongClock(7 * SECOND))
    assert abs(offset.ahead_ms + 7 * SECOND) <= offset.error_ms


@pytest.mark.system
def test_missing_topics_are_told_and_none_is_created(settings):
    for _ in range(2):
        checks = by_name(checkup(settings))
        assert not checks["topics"].ok
        assert "duetime topics" in checks["topics"].detail
        assert not checks["clock"].ok
        assert f"{settings.namespace}.warmup" in checks["clock"].detail


@pytest.mark.system
def test_looking_writes_to_the_warm_up_topic_only(settings, topics):
    checkup(settings)
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": "test"})
    known = consumer.list_topics(timeout=10).topics
    written = {
        topic
        for topic in topics
        for each in known[topic].partitions
        if consumer.get_watermark_offsets(TopicPartition(topic, each))[1] > 0
    }
    consumer.close()
    assert written == {f"{settings.namespace}.warmup"}


def test_where_no_broker_answers_nothing_is_said_about_topics(nowhere):
    checks = by_name(checkup(nowhere))
    assert list(checks) == ["Java", "jars", "broker"]
    assert not checks["broker"].ok
    assert "does not answer at 127.0.0.1:1" in checks["broker"].detail


def test_a_missing_java_and_missing_jars_are_told_with_what_to_do(nowhere, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("DUETIME_JARS", str(tmp_path))
    checks = by_name(checkup(nowhere))
    assert not checks["Java"].ok
    assert "install Java 17" in checks["Java"].detail
    assert not checks["jars"].ok
    assert "make setup" in checks["jars"].detail


@pytest.mark.parametrize(
    ("ahead_ms", "error_ms"), [(0, 1), (500, 1), (-500, 1), (900, 450), (-900, 450)]
)
def test_half_a_second_apart_is_near_enough(ahead_ms, error_ms):
    assert f"{abs(ahead_ms)} ms" in verdict(Offset(ahead_ms=ahead_ms, error_ms=error_ms))


@pytest.mark.parametrize(("ahead_ms", "error_ms"), [(502, 1), (-502, 1), (0, 501)])
def test_more_than_that_or_no_telling_is_not(ahead_ms, error_ms):
    with pytest.raises(DuetimeError):
        verdict(Offset(ahead_ms=ahead_ms, error_ms=error_ms))


@pytest.mark.parametrize(
    ("setting", "said"), [("0", "8 times"), ("3", "3 times"), ("1", "one try")]
)
def test_how_long_a_request_that_was_cut_off_may_arrive_is_told(
    setting, said, monkeypatch, tmp_path
):
    path = tmp_path / "tcp_orphan_retries"
    path.write_text(f"{setting}\n")
    monkeypatch.setattr(doctor, "ORPHAN_RETRIES", path)
    assert said in doctor._network()
