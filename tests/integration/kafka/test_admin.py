from concurrent.futures import Future

import pytest
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.topics import configure, small_settings

from duetime.core.errors import ConfigError, KafkaError
from duetime.core.topics import required_topics
from duetime.kafka import admin
from duetime.kafka.admin import (
    advice,
    check_topics,
    create_topics,
    find_topics,
    topic_problems,
    tune_topics,
)
from duetime.kafka.connection import librdkafka_properties


@pytest.fixture
def cluster(settings):
    return AdminClient(librdkafka_properties(settings))


@pytest.fixture
def altered(settings, topics, cluster):
    """Alters a setting of one of the topics; returns the topic's full name."""

    def alter(topic, name, value):
        full_name = f"{settings.namespace}.{topic}"
        assert full_name in topics
        configure(cluster, full_name, name, value)
        return full_name

    return alter


def create(cluster, topic):
    for created in cluster.create_topics([topic]).values():
        created.result()


def test_every_topic_is_created_as_it_must_be(settings, topics):
    assert set(topics) == {topic.name for topic in required_topics(settings)}
    assert topic_problems(settings) == []
    check_topics(settings)


@pytest.mark.slow
def test_only_what_is_missing_is_created(settings, topics, cluster):
    for deleted in cluster.delete_topics(topics[1:3]).values():
        deleted.result()
    assert sorted(create_topics(settings)) == sorted(topics[1:3])
    assert create_topics(settings) == []


def test_missing_topics_are_problems_that_say_what_to_do(settings):
    problems = topic_problems(settings)
    assert len(problems) == len(required_topics(settings))
    assert all("is missing: create it with `duetime topics`" in each for each in problems)
    with pytest.raises(ConfigError, match=rf"{settings.namespace}\.wheel\.2 is missing"):
        check_topics(settings)


def test_settings_that_would_lose_messages_are_named(settings, altered):
    losing = [
        ("in", "retention.ms", "3599999"),
        ("in", "cleanup.policy", "compact,delete"),
        ("in", "message.timestamp.type", "CreateTime"),
        ("in.countdown", "message.timestamp.type", "CreateTime"),
        ("in.airtel", "retention.ms", "0"),
        ("control", "cleanup.policy", "compact"),
        ("lanes", "retention.ms", "604800000"),
        ("lanes", "message.timestamp.type", "CreateTime"),
        ("wheel.0", "retention.ms", "604800000"),
        ("wheel.0", "message.timestamp.type", "CreateTime"),
        ("wheel.1", "retention.bytes", "1000000000"),
        ("wheel.2", "cleanup.policy", "compact"),
        ("wheel.2", "max.message.bytes", "1000000"),
        ("rejected", "max.message.bytes", "1000000"),
    ]
    beginnings = [
        f"topic {altered(topic, setting, value)}: {setting} is {value}"
        for topic, setting, value in losing
    ]
    problems = topic_problems(settings)
    assert len(problems) == len(losing)
    for beginning in beginnings:
        assert sum(problem.startswith(beginning) for problem in problems) == 1
    with pytest.raises(ConfigError, match=r"retention\.ms.*max\.message\.bytes"):
        check_topics(settings)


def test_settings_that_lose_nothing_are_no_problem(settings, altered):
    altered("in", "retention.ms", "3600000")
    altered("in.countdown", "retention.ms", "-1")
    altered("in.airtel", "message.timestamp.type", "CreateTime")
    altered("wheel.0", "max.message.bytes", "10000000")
    assert topic_problems(settings) == []


@pytest.mark.slow
def test_topic_with_unlimited_sender_timestamps_is_a_problem(settings, altered):
    # As brokers before Kafka 4 have it unless they are told otherwise.
    name, unlimited = "message.timestamp.after.max.ms", str(2**63 - 1)
    for topic in ("in", "in.airtel", "in.scheduler", "control"):
        altered(topic, name, unlimited)
    assert topic_problems(settings) == []

    for topic in ("in.airtel", "in.scheduler", "control"):
        altered(topic, "message.timestamp.type", "CreateTime")
    problems = topic_problems(settings)

    assert len(problems) == 3
    assert all(
        f"{name} is {unlimited}, and timestamps are the senders'" in each for each in problems
    )
    for topic in ("in.airtel", "in.scheduler", "control"):
        altered(topic, name, "86400000")
    assert topic_problems(settings) == []


def test_segments_of_existing_topics_are_changed_to_what_they_should_be(settings, altered):
    # As topics were created on every level, until segments followed from what a level holds.
    old = {"segment.bytes": "16777216", "segment.ms": "60000", "segment.index.bytes": "1048576"}
    for topic in ("wheel.1", "wheel.2"):
        for name, value in old.items():
            full_name = altered(topic, name, value)
    wheel = next(each for each in required_topics(settings) if each.name == full_name)
    wanted = {name: wheel.settings[name] for name in old}
    assert "segment.ms 60000 ->" in advice(settings, find_topics(settings))["segments"]

    changed = tune_topics(settings)

    assert len(changed) == 2
    told = f"segment.ms 60000 -> {wanted['segment.ms']}"
    assert any(each.startswith(f"{full_name}: ") and told in each for each in changed)
    found = find_topics(settings)
    assert {name: found.configs[full_name][name] for name in old} == wanted
    assert "segments" not in advice(settings, found)
    assert tune_topics(settings) == []
    # What duetime does not mind stays as somebody has set it.
    altered("wheel.2", "max.message.bytes", "10000000")
    assert tune_topics(settings) == []


def test_a_topic_that_may_not_be_altered_is_named_and_others_are_changed(monkeypatch):
    settings = small_settings("127.0.0.1:1")
    first, second = (f"{settings.namespace}.wheel.{level}" for level in (1, 2))
    old = dict.fromkeys(("segment.bytes", "segment.ms", "segment.index.bytes"), "1")
    found = admin.ClusterTopics(brokers=1, topics={}, configs={first: old, second: old})
    denied = KafkaException(BrokerError(BrokerError.TOPIC_AUTHORIZATION_FAILED))

    class Narrow:
        """A cluster where only the second topic may be altered."""

        def __init__(self, _):
            self.admin = self

        def incremental_alter_configs(self, resources, **_):
            answers = {each: Future() for each in resources}
            for each, answer in answers.items():
                if each.name == first:
                    answer.set_exception(denied)
                else:
                    answer.set_result(None)
            return answers

    monkeypatch.setattr(admin, "find_topics", lambda _: found)
    monkeypatch.setattr(admin, "ClusterProbe", Narrow)
    with pytest.raises(KafkaError, match=rf"{first} could not be changed.*changed: {second}: "):
        tune_topics(settings)


def test_a_wheel_of_another_size_is_refused_and_kept(settings, cluster):
    name = f"{settings.namespace}.wheel.0"
    wheel = next(topic for topic in required_topics(settings) if topic.name == name)
    create(cluster, NewTopic(name, num_partitions=3, config=dict(wheel.settings)))
    created = create_topics(settings)
    assert name not in created
    (problem,) = topic_problems(settings)
    assert problem.startswith(f"topic {name} has 3 partitions")
    cluster.delete_topics([name, *created])


def test_one_topic_cannot_have_two_contracts(settings):
    both = settings.model_copy(update={"countdown_topic": settings.airtel_topic})
    with pytest.raises(ConfigError, match=settings.airtel_topic):
        create_topics(both)
    assert f"topic {settings.airtel_topic} is named for 2 purposes" in topic_problems(both)[0]


def test_too_many_replicas_are_a_setting_to_change(settings):
    with pytest.raises(ConfigError, match="set replication_factor"):
        create_topics(settings.model_copy(update={"replication_factor": 3}))


def test_a_broker_that_does_not_answer_is_told_with_its_address(settings, monkeypatch):
    monkeypatch.setattr(admin, "CLUSTER_TIMEOUTS_S", (0.1, 0.1))
    nowhere = settings.model_copy(update={"bootstrap": "127.0.0.1:1"})
    with pytest.raises(KafkaError, match=r"does not answer at 127\.0\.0\.1:1 "):
        topic_problems(nowhere)
    with pytest.raises(KafkaError, match=r"does not answer at 127\.0\.0\.1:1 "):
        create_topics(nowhere)
