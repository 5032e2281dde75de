"""Partitions that are added to an intake topic while the pipeline runs."""

from datetime import timedelta

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, now_ms

from duetime.core import headers as H
from duetime.kafka.connection import librdkafka_properties


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "transactional"])
def test_a_query_begins_again_when_its_topic_gets_partitions(live, sender, name, caplog):
    caplog.set_level("INFO", "duetime")
    topic, intake = live.topic(), getattr(live.names, name)
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
    headers = {H.DUE_TOPIC: topic, H.DUE_AT_MS: str(now_ms() + 1_000)}
    producer.produce(intake, b"after", headers=headers, partition=number - 1)
    assert producer.flush(PATIENCE_S) == 0

    arrived = inbox.take(501)
    assert [each.value for each in arrived].count(b"after") == 1
    # Else it would be read with the next batch, which begins half an hour later.
    assert f"topic={intake} partitions=3" in caplog.text


def partitions(live, topic):
    return len(live.admin.list_topics(timeout=PATIENCE_S).topics[topic].partitions)
