"""duetime queue: stats, peek, dead, redrive."""

import json
import uuid

import pytest
from confluent_kafka import Producer
from tests.support.topics import small_settings

from duetime.core import headers as H
from duetime.core.setting_types import QueueSettings
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.queue.message import REDELIVERY_COUNT

pytestmark = pytest.mark.usefixtures("configured")

QUEUE = f"queue_{uuid.uuid4().hex[:8]}"


@pytest.fixture
def settings(broker):
    return small_settings(broker.bootstrap, queues={QUEUE: QueueSettings(partitions=1)})


@pytest.fixture
def configured(on_broker, topics, monkeypatch):  # noqa: ARG001 (the topics must be there)
    monkeypatch.setenv("DUETIME_QUEUES", json.dumps({QUEUE: {"partitions": 1}}))
    return on_broker


@pytest.fixture
def producer(settings):
    made = Producer(librdkafka_properties(settings))
    yield made
    assert made.flush(30) == 0


def read(settings):
    """Commit the first message, like a worker."""
    offsets = Offsets(settings, "workers")
    offsets.commit({(QUEUE, 0): 1})
    offsets.close()


def test_waiting_messages_are_counted_and_shown_and_stay(duetime, configured, producer):
    for key in ("a", "b"):
        producer.produce(QUEUE, "x" * 10, key, headers=[(REDELIVERY_COUNT, b"\x02")])
    producer.flush(30)
    read(configured)
    stats = json.loads(duetime("queue", "stats", QUEUE, "--json").out)
    assert (stats["waiting"], stats["in_flight"], stats["redelivered"]) == (1, 0, 0)
    _, shown = duetime("queue", "peek", QUEUE).out.splitlines()
    assert shown.split()[0] == "0/1"
    assert shown.split()[-4:] == ["3", "b", "10", "B"]
    assert "waiting" in duetime("queue", "stats", QUEUE).out


@pytest.mark.slow
def test_a_queues_dead_letter_is_listed_and_redriven_once(duetime, producer):
    words = (QUEUE, "0", "", "1000", "0000000003e8-@queue:x.0.1", "timed-out", "", "4", "1", "2")
    headers = [("h", b"\x00"), *zip(H.DEAD_LETTER, words, strict=True)]
    producer.produce(f"{QUEUE}__undelivered", "x", headers=headers)
    producer.flush(30)
    (letter,) = json.loads(duetime("queue", "dead", QUEUE, "--json").out)
    assert (letter["offset"], letter["reason"], letter["attempts"]) == (0, "timed-out", 4)
    assert duetime("queue", "redrive", QUEUE, "0").out == "redriven: 1\n"
    assert duetime("queue", "redrive", QUEUE, "0").code == 4
    assert duetime("queue", "redrive", QUEUE, "--all").out == "redriven: 0\n"
    assert duetime("queue", "dead", QUEUE).out == "no dead letters\n"


def test_a_topic_that_is_no_queue_is_refused(duetime):
    outcome = duetime("queue", "stats", "other")
    assert outcome.code == 1
    assert "other is no queue" in outcome.err
