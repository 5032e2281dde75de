"""Partitions that are added to an intake topic while the pipeline runs."""

from datetime import timedelta

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions
from tests.conftest import eventually
from tests.system.conftest import PATIENCE_S, now_ms

from duetime.connection import librdkafka_properties
from duetime.message import DUE_AT_MS, DUE_TOPIC

pytestmark = pytest.mark.system

#: A real-time query's batch is 180 s long. A busy machine may take some of that to begin anew.
SOON_MS = 60_000


def test_a_message_in_a_partition_that_was_just_added_is_delivered_soon(live, sender):
    topic, intake = live.topic(), live.names.native
    inbox = live.inbox(topic)
    # In flight when the batch is ended: each once all the same.
    for _ in range(500):
        sender.produce(topic, "before", in_=timedelta(milliseconds=200))
    sender.flush()

    number = partitions(live, intake) + 3
    (added,) = live.admin.create_partitions([NewPartitions(intake, number)]).values()
    added.result()
    eventually(lambda: partitions(live, intake) == number)
    # One that knows no older number of them.
    producer = Producer(librdkafka_properties(live.settings))
    headers = {DUE_TOPIC: topic, DUE_AT_MS: str(now_ms() + 1_000)}
    producer.produce(intake, b"after", headers=headers, partition=number - 1)
    assert producer.flush(PATIENCE_S) == 0

    arrived = inbox.take(501)
    (after,) = (each for each in arrived if each.value == b"after")
    assert 0 <= after.late_ms < SOON_MS


def partitions(live, topic):
    return len(live.admin.list_topics(timeout=PATIENCE_S).topics[topic].partitions)
