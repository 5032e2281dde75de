"""The doctor on a real broker."""

import sys

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.support.command import by_name

from duetime.cli.admin import checkup, clock_offset
from duetime.core.clock import SystemClock
from duetime.kafka.connection import librdkafka_properties

SECOND = 1_000


class WrongClock:
    """The system's clock, `ahead_ms` ahead."""

    def __init__(self, ahead_ms):
        self._ahead_ms = ahead_ms

    def now_ms(self):
        return SystemClock().now_ms() + self._ahead_ms


@pytest.mark.usefixtures("topics")
def test_a_healthy_machine_passes_every_check(settings):
    checks = by_name(checkup(settings))
    on_linux = ["network"] if sys.platform == "linux" else []
    own = ["Java", "jars", "broker", "topics", "transactions", "clock"]
    assert list(checks) == own + on_linux
    assert all(check.ok for check in checks.values())
    assert settings.bootstrap in checks["broker"].detail


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize(
    ("ahead_ms", "words"),
    [(-3 * SECOND, ("behind", "late")), (3 * SECOND, ("ahead of", "early"))],
)
def test_a_wrong_clock_is_named_with_its_effect(settings, ahead_ms, words):
    clock = by_name(checkup(settings, WrongClock(ahead_ms)))["clock"]
    assert not clock.ok
    assert all(word in clock.detail for word in (*words, "NTP"))


@pytest.mark.usefixtures("topics")
def test_the_offset_is_what_the_clock_is_wrong_by(settings):
    offset = clock_offset(settings, WrongClock(7 * SECOND))
    assert abs(offset.ahead_ms + 7 * SECOND) <= offset.error_ms


def test_missing_topics_are_named_and_not_created(settings):
    for _ in range(2):
        checks = by_name(checkup(settings))
        assert not checks["topics"].ok
        assert "duetime topics" in checks["topics"].detail
        assert not checks["clock"].ok
        assert f"{settings.namespace}.warmup" in checks["clock"].detail


@pytest.mark.slow
def test_the_checkup_writes_to_the_warm_up_topic_only(settings, topics):
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
