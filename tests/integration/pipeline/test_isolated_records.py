"""Isolated records on a real broker, which refuses some of a request."""

from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import Row

from duetime.kafka.connection import librdkafka_properties
from duetime.pipeline.delivery import isolation
from duetime.pipeline.delivery.isolation import RecordSender

HOUR_MS = 3_600_000


def test_record_beside_refused_ones_is_written(settings, now_ms, monkeypatch):
    """The broker names those that are too old, and writes none of the request."""
    topic = f"{settings.namespace}-recent"
    config = {"message.timestamp.type": "CreateTime", "message.timestamp.before.max.ms": "60000"}
    admin = AdminClient(librdkafka_properties(settings))
    admin.create_topics([NewTopic(topic, 1, config=config)])[topic].result()

    def with_timestamp(client, to, **record):
        at_ms = now_ms - HOUR_MS * (record["key"] == b"old")
        client.produce(to, timestamp=at_ms, **record)

    monkeypatch.setattr(isolation, "enqueue", with_timestamp)
    rows = [
        Row(offset=n, topic=topic, partition=None, key=key, value=b"v", headers=[])
        for n, key in enumerate([b"new", b"old", b"old", b"new"])
    ]
    refused = RecordSender(settings, lambda _: True).send(rows, None, 1)
    assert [(each.offset, each.is_unknown) for each in refused] == [(1, False), (2, False)]
