"""What Prometheus is told of a wheel that is filled by hand."""

import math
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY
from pydantic import SecretStr
from tests.conftest import dead_letters_of, eventually

from duetime.clock import SystemClock
from duetime.connection import librdkafka_properties
from duetime.pipeline.health import CONTRACTS, Health
from duetime.stores.offsets import Offsets, Unreadable
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

MINUTE_MS = 60_000


def told(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


def taken_in(contract):
    return told("duetime_intake_records_total", contract=contract)


def ended(how):
    return told(f"duetime_{how}_records_total")


@pytest.mark.usefixtures("topics")
def test_what_waits_is_told_by_level_and_what_came_is_counted(settings, wheel, now_ms):
    health = Health(settings, SystemClock(), None)
    for delay_ms in (10_000, 10_000, 3 * MINUTE_MS, -3_000):
        wheel.message("orders", now_ms + delay_ms)
    names = TopicNames(settings)
    counted = [
        *zip(names.intake, (partial(taken_in, each) for each in CONTRACTS), strict=True),
        *((getattr(names, each), partial(ended, each)) for each in ("rejected", "failed", "dead")),
    ]
    producer = Producer(librdkafka_properties(settings))
    for number, (topic, _) in enumerate(counted, 1):
        for _ in range(number):
            producer.produce(topic, b"x")
    producer.flush()
    before = [total() for _, total in counted]

    health.look()

    levels = [told("duetime_pending_records", level=str(each)) for each in range(3)]
    assert levels == [3, 1, 0]
    assert told("duetime_overdue_records") == 1
    assert 0 < told("duetime_oldest_overdue_seconds") < 60
    more = [total() - first for (_, total), first in zip(counted, before, strict=True)]
    assert more == list(range(1, len(counted) + 1))
    health.start()
    health.close()
    assert told("duetime_pending_records", level="0") is None


def may_not_be_described(_topic):
    raise Unreadable("it may not be described")


def is_missing(_topic):
    return []


@pytest.mark.usefixtures("topics")
@pytest.mark.parametrize("answer", [may_not_be_described, is_missing])
def test_what_a_topic_has_is_not_counted_again_when_it_could_not_be_looked_at_for_once(
    settings, monkeypatch, answer
):
    dead_letters_of(settings)()
    health, before = Health(settings, SystemClock(), None), ended("dead")
    with monkeypatch.context() as patched:
        patched.setattr(health._offsets, "readable_places", answer)
        health.look()
    health.look()
    assert ended("dead") == before
    dead_letters_of(settings)()
    health.look()
    assert ended("dead") == before + 1


@pytest.mark.usefixtures("topics")
def test_what_a_topic_has_is_not_counted_when_it_may_be_read_at_last(settings, monkeypatch):
    dead_letters_of(settings)()
    with monkeypatch.context() as patched:
        patched.setattr(Offsets, "readable_places", lambda _, topic: may_not_be_described(topic))
        health, before = Health(settings, SystemClock(), None), ended("dead")
    health.look()
    assert ended("dead") == before


@pytest.mark.usefixtures("topics")
def test_while_the_store_does_not_answer_what_waits_is_not_known_and_the_rest_is_told(settings):
    away = settings.model_copy(update={"store": SecretStr("redis://127.0.0.1:1/0")})
    health, before = Health(away, SystemClock(), None), ended("dead")
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).dead, b"x")
    producer.flush()

    health.look()

    assert ended("dead") == before + 1
    assert told("duetime_pending_records", level="0") is None
    assert math.isnan(told("duetime_overdue_records"))
    assert math.isnan(told("duetime_oldest_overdue_seconds"))
    health.start()
    health.close()
    assert told("duetime_overdue_records") == 0


@pytest.mark.usefixtures("topics")
def test_a_look_that_ends_after_the_lead_says_nothing_any_more(
    settings, wheel, now_ms, monkeypatch
):
    monkeypatch.setattr("duetime.pipeline.health.LEAVE_S", 0.0)
    health = Health(settings, SystemClock(), None)
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
    eventually(lambda: not health._thread.is_alive())
    assert told("duetime_overdue_records") == 0
    assert told("duetime_pending_records", level="0") is None
