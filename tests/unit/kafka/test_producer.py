"""A producer reports only records as delivered that the log has, also after a leader changed."""

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from tests.support.mock_cluster import mock_cluster
from tests.support.topics import small_settings

from duetime.kafka.producer import (
    CopyProducer,
    OutboundRecord,
    delivery_properties,
    producer_properties,
)

PATIENCE_S = 60.0

#: Larger than a batch, so that each record is a request of its own.
LARGE = 1_000_000

NOT_LEADER = KafkaError.NOT_LEADER_FOR_PARTITION


@pytest.fixture
def cluster():
    with mock_cluster() as found:
        yield found


def values(cluster, topic):
    """The first byte of each record in the topic."""
    properties = {"bootstrap.servers": cluster.bootstrap, "group.id": "test", "log_level": 0}
    consumer = Consumer(properties | {"enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    while not (record := consumer.poll(PATIENCE_S)).error():
        found.append(record.value()[:1])
    consumer.close()
    return found


@pytest.mark.parametrize("properties", [producer_properties, delivery_properties])
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_record_that_a_new_leader_refused_is_sent_again(cluster, properties, refused):
    cluster.create_topic("orders")
    cluster.refuse(*[NOT_LEADER] * refused)
    producer = Producer(properties(small_settings(cluster.bootstrap)) | {"log_level": 0})
    reports = []
    for each in b"abcd":
        producer.produce(
            "orders",
            bytes([each]) * LARGE,
            on_delivery=lambda error, record: reports.append((error, record.offset())),
        )
    assert producer.flush(PATIENCE_S) == 0
    assert reports == [(None, offset) for offset in range(4)]
    assert values(cluster, "orders") == [b"a", b"b", b"c", b"d"]


def test_copy_that_a_new_leader_refused_is_sent_again(cluster):
    """The next one is too large, and the last one is taken."""
    cluster.create_topic("orders")
    cluster.create_topic("dead-letter")
    cluster.refuse(NOT_LEADER, 0, KafkaError.MSG_SIZE_TOO_LARGE, 0)
    copies = CopyProducer({"bootstrap.servers": cluster.bootstrap, "log_level": 0, "linger.ms": 0})
    failed, arrived = [], []
    less = OutboundRecord(topic="dead-letter", value=b"x", headers=[])
    for each in b"abc":
        copy = OutboundRecord(
            topic="orders", partition=0, value=bytes([each]) * LARGE, headers=[], less=less
        )
        copies.send(copy, failed.append, lambda record: arrived.append(record.offset()))
    assert copies.flush(PATIENCE_S) == 0
    copies.close(PATIENCE_S)
    assert (failed, arrived) == ([], [0, 1])
    assert values(cluster, "orders") == [b"a", b"c"]
    assert values(cluster, "dead-letter") == [b"x"]
