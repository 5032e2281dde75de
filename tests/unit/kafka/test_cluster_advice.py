"""What the doctor advises of clusters that a test has not at hand: of many brokers, and shared."""

from types import SimpleNamespace

import pytest

from duetime.core.settings import Settings
from duetime.core.topics import required_topics
from duetime.kafka.admin import ClusterTopics, advice

SETTINGS = Settings()


def cluster(brokers=3, replicas=3, in_sync="2", others=()):
    """What is found where duetime's topics are, and topics of others."""
    own = {topic.name: topic for topic in required_topics(SETTINGS)}
    partition = SimpleNamespace(replicas=list(range(replicas)))
    described = SimpleNamespace(partitions={0: partition})
    configs = {
        name: dict(topic.settings) | {"min.insync.replicas": in_sync} for name, topic in own.items()
    }
    topics = dict.fromkeys((*own, *others), described)
    return ClusterTopics(brokers=brokers, topics=topics, configs=configs)


def test_a_replicated_cluster_of_one_namespace_needs_no_advice():
    assert advice(SETTINGS, cluster()) == {}


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_cluster_that_cannot_replicate_is_left_alone(replicas):
    assert advice(SETTINGS, cluster(brokers=1, replicas=replicas, in_sync="1")) == {}


def test_topics_of_one_replica_are_named_with_what_to_do():
    found = advice(SETTINGS, cluster(replicas=1))

    assert list(found) == ["replicas"]
    assert found["replicas"].startswith("topic duetime.in and ")
    assert "replication_factor = 3" in found["replicas"]
    assert "kafka-reassign-partitions.sh" in found["replicas"]


def test_topics_that_one_broker_may_acknowledge_are_named_with_what_to_do():
    found = advice(SETTINGS, cluster(in_sync="1"))

    assert list(found) == ["in-sync replicas"]
    assert "min.insync.replicas=2" in found["in-sync replicas"]


OTHERS = ("staging.leader", "staging.wheel.0", "staging.in")


def test_another_namespace_that_may_read_the_same_intake_topics_is_named():
    found = advice(SETTINGS, cluster(others=OTHERS))

    assert list(found) == ["namespaces"]
    assert "namespace staging" in found["namespaces"]
    assert "event_delayer_publisher" in found["namespaces"]


@pytest.mark.parametrize("others", [OTHERS[:1], OTHERS[1:], ("sales.leader", "sales")])
def test_topics_that_are_no_namespace_are_none(others):
    assert advice(SETTINGS, cluster(others=others)) == {}


def test_intake_topics_of_its_own_make_another_namespace_harmless():
    own = SETTINGS.model_copy(
        update={"airtel_topic": "a", "countdown_topic": "b", "scheduler_topic": "c"}
    )

    assert advice(own, cluster(others=OTHERS)) == {}
