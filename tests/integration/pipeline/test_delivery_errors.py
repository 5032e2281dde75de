"""Delivery errors that follow from the topic metadata of a destination."""

import pytest
from confluent_kafka.admin import PartitionMetadata, TopicMetadata
from pyspark.sql import functions as F

from duetime.core.errors import Reason
from duetime.pipeline.delivery.delivery_errors import (
    delivery_errors,
    healthy_partition,
    is_isolated,
)
from duetime.pipeline.delivery.destinations import StuckPartitions, stuck_partitions
from duetime.pipeline.delivery.rows import first_error
from duetime.spark import catalyst

#: Kafka's own vectors (UtilsTest.testMurmur2).
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def partition_of(key, partitions):
    return (MURMUR2[key] & 0x7FFFFFFF) % partitions


@pytest.fixture(scope="module")
def judged(spark):
    """Reason, whether it is isolated, and the partition that a row without one gets."""

    def judge(known, partition=None, key=None):
        schema = "known string, partition int, key binary, expired boolean"
        rows = spark.createDataFrame([(known, partition, key, False)], schema)
        refused = first_error(
            delivery_errors(
                F.split("known", ":"),
                partition=F.col("partition"),
                key=F.col("key"),
                size=F.lit(10),
                is_expired=F.col("expired"),
            )
        )
        known = F.split("known", ":")
        elsewhere = healthy_partition(known, F.col("key"))
        (row,) = rows.select(refused["reason"], is_isolated(known), elsewhere).collect()
        return tuple(row)

    return judge


def test_keys_are_hashed_as_kafkas_producer_hashes_them(spark):
    rows = spark.createDataFrame([(key,) for key in (*MURMUR2, None)], "key binary")
    hashed = {
        row[0] and bytes(row[0]): row[1]
        for row in rows.select("key", catalyst.murmur2(F.col("key"))).collect()
    }
    assert hashed == {**MURMUR2, None: None}


@pytest.mark.parametrize("known", ["3", "3:900", "3::compacted", "3::isolated", "3:900:isolated"])
def test_healthy_topic_takes_rows_of_any_partition(judged, known):
    reason, isolated, elsewhere = judged(known, partition=2, key=b"21")
    assert (reason, elsewhere) == (None, None)
    assert isolated == ("isolated" in known)


def test_row_for_a_stuck_partition_has_its_reason(judged):
    known = "3:::no-leader:,0,2,:1"
    assert judged(known, partition=0)[0] == Reason.NO_LEADER
    assert judged(known, partition=2)[0] == Reason.NO_LEADER
    assert judged(known, partition=1)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("key", MURMUR2)
def test_key_of_a_stuck_partition_has_its_reason(judged, key):
    stuck = partition_of(key, 12)
    others = ",".join(str(each) for each in range(12) if each != stuck)
    assert judged(f"12:::not-enough-replicas:,{stuck},:{(stuck + 1) % 12}", key=key)[0] == (
        Reason.NOT_ENOUGH_REPLICAS
    )
    assert judged(f"12:::not-enough-replicas:,{others},:{stuck}", key=key)[0] is None


def test_row_without_a_key_goes_to_a_healthy_partition(judged):
    assert judged("12:::no-leader:,0,1,:2") == (None, False, "2")
    assert judged("12::isolated:no-leader:,0,11,:1") == (None, True, "1")
    assert judged("2:::not-acknowledged:,0,1,:")[0] == Reason.NOT_ACKNOWLEDGED


def test_size_limit_applies_to_a_topic_with_stuck_partitions(judged):
    assert judged("2:100::no-leader:,0,:1", partition=1)[0] == Reason.TOO_LARGE_FOR_TOPIC


def topic_of(*partitions):
    """Metadata of partitions, each (leader, replicas, replicas in sync)."""
    found = TopicMetadata()
    for number, (leader, replicas, isrs) in enumerate(partitions):
        each = PartitionMetadata()
        each.id, each.leader = number, leader
        each.replicas, each.isrs = list(range(replicas)), list(range(isrs))
        found.partitions[number] = each
    return found


def test_partitions_without_a_leader_or_enough_replicas_are_stuck():
    assert stuck_partitions(topic_of((1, 3, 3), (2, 3, 2)), 2) is None
    lacking = stuck_partitions(topic_of((1, 3, 3), (2, 3, 1)), 2)
    assert lacking == StuckPartitions(Reason.NOT_ENOUGH_REPLICAS, frozenset({1}))
    leaderless = stuck_partitions(topic_of((-1, 1, 0), (2, 3, 1), (1, 3, 3)), 2)
    assert leaderless == StuckPartitions(Reason.NO_LEADER, frozenset({0, 1}))


def test_one_replica_is_enough_where_there_is_one():
    """Kafka caps min.insync.replicas by the replication factor (KIP-966)."""
    assert stuck_partitions(topic_of((1, 1, 1)), 2) is None
