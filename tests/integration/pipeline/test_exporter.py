"""Metrics of a wheel that is filled by hand."""

import math
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY
from pydantic import SecretStr
from tests.support.producers import NoProducers
from tests.support.topics import dead_letters_of

from duetime.core.clock import SystemClock
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets, Unreadable
from duetime.pipeline.monitoring.exporter import CONTRACTS, MetricsExporter

MINUTE_MS = 60_000


def sample(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


def taken_in(contract):
    return sample("duetime_intake_records_total", contract=contract)


def ended(how):
    return sample(f"duetime_{how}_records_total")


@pytest.mark.usefixtures("topics")
def test_pending_messages_are_set_by_level_and_records_are_counted(settings, wheel, now_ms):
    health = MetricsExporter(settings, SystemClock(), NoProducers())
    for delay_ms in (10_000, 10_000, 3 * MINUTE_MS, -3_000):
        wheel.message("orders", now_ms + delay_ms)
    names = TopicNames(settings)
    counted = [
        *zip(names.intake, (partial(taken_in, each) for each in CONTRACTS), strict=True),
        *(
            (getattr(names, topic), partial(ended, each))
            for topic, each in (
                ("rejected", "rejected"),
                ("retry", "failed"),
                ("dead_letter", "dead"),
            )
        ),
    ]
    producer = Producer(librdkafka_properties(settings))
    for number, (topic, _) in enumerate(counted, 1):
        for _ in range(number):
            producer.produce(topic, b"x")
    producer.flush()
    before = [total() for _, total in counted]

    health.update()

    levels = [sample("duetime_pending_records", level=str(each)) for each in range(3)]
    assert levels == [3, 1, 0]
    assert sample("duetime_overdue_records") == 1
    assert 0 < sample("duetime_oldest_overdue_seconds") < 60
    more = [total() - first for (_, total), first in zip(counted, before, strict=True)]
    assert more == list(range(1, len(counted) + 1))
    health.start()
    health.close()
    assert sample("duetime_pending_records", level="0") is None


def may_not_be_described(_topic):
    raise Unreadable("it may not be described")


def is_missing(_topic):
    return []


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize("answer", [may_not_be_described, is_missing])
def test_records_of_a_topic_that_was_unreadable_once_are_not_counted_twice(
    settings, monkeypatch, answer
):
    dead_letters_of(settings)()
    health, before = MetricsExporter(settings, SystemClock(), NoProducers()), ended("dead")
    with monkeypatch.context() as patched:
        patched.setattr(health._offsets, "readable_partitions", answer)
        health.update()
    health.update()
    assert ended("dead") == before
    dead_letters_of(settings)()
    health.update()
    assert ended("dead") == before + 1


@pytest.mark.usefixtures("topics")
def test_old_records_of_a_topic_that_becomes_readable_are_not_counted(settings, monkeypatch):
    dead_letters_of(settings)()
    with monkeypatch.context() as patched:
        patched.setattr(
            Offsets, "readable_partitions", lambda _, topic: may_not_be_described(topic)
        )
        health, before = MetricsExporter(settings, SystemClock(), NoProducers()), ended("dead")
    health.update()
    assert ended("dead") == before


@pytest.mark.usefixtures("topics")
def test_pending_is_unknown_without_the_store_and_the_rest_is_updated(settings):
    away = settings.model_copy(update={"store": SecretStr("redis://127.0.0.1:1/0")})
    health, before = MetricsExporter(away, SystemClock(), NoProducers()), ended("dead")
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).dead_letter, b"x")
    producer.flush()

    health.update()

    assert ended("dead") == before + 1
    assert sample("duetime_pending_records", level="0") is None
    assert math.isnan(sample("duetime_overdue_records"))
    assert math.isnan(sample("duetime_oldest_overdue_seconds"))
    health.start()
    health.close()
    assert sample("duetime_overdue_records") == 0


@pytest.mark.usefixtures("topics")
def test_an_update_that_ends_after_close_sets_no_gauge(settings, wheel, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.pipeline.monitoring.exporter.CLOSE_TIMEOUT_S", 0.0)
    health = MetricsExporter(settings, SystemClock(), NoProducers())
    wheel.message("orders", now_ms - 3_000)
    asked, may_answer, reader = threading.Event(), threading.Event(), health._reader

    def pending(now_ms):
        asked.set()
        may_answer.wait()
        return reader.pending(now_ms)

    health._reader = SimpleNamespace(pending=pending, close=reader.close)
    health.start()
    assert asked.wait(60)
    health.close()
    may_answer.set()
    assert health._thread.stop(60)
    assert sample("duetime_overdue_records") == 0
    assert sample("duetime_pending_records", level="0") is None
