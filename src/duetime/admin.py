"""duetime's topics on the cluster: created where they are missing, checked, and tuned.

Each function asks the cluster twice at most, however many topics there are.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
    TopicMetadata,
)

from duetime.config import Settings
from duetime.errors import ConfigError, KafkaError
from duetime.reach import TURNED_AWAY, Contact, Unanswered
from duetime.required import Topic, check_all, required_topics, shared_names
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place
from duetime.topics import TopicNames

#: How long one request may take, in seconds. Creating hundreds of partitions takes a few.
TIMEOUT_S = 30.0

#: How long the cluster may take for its list of topics, in seconds. In between is looked whether
#: we are turned away; the last is for a cluster that has very many.
LOOKS_S = (1.0, 4.0, 30.0)

#: How long the cluster may take to find leaders for new partitions, in seconds.
LEADERS_TIMEOUT_S = 60.0

#: How long to wait before asking for the leaders again, in seconds.
ASK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The brokers and topics of a cluster, and the settings of duetime's topics."""

    brokers: int
    #: Every topic, by name; none that cannot be described.
    topics: Mapping[str, TopicMetadata]
    #: The settings of duetime's own topics, the cluster's defaults included.
    configs: Mapping[str, Mapping[str, str]]


def create_topics(settings: Settings) -> list[str]:
    """Create the missing topics, wait until they can be written to, and return their names.

    Safe to repeat, and by two at once. Existing topics stay as they are: see `topic_problems`.
    Raises KafkaError, and ConfigError where a setting keeps a topic from being created.
    """
    topics = required_topics(settings)
    check_all(shared_names(topics))
    contact = Contact(settings)
    admin, existing = contact.admin, _existing(contact, settings)
    missing = [topic for topic in topics if topic.name not in existing]
    if not missing:
        return []
    created = _create(admin, missing, settings)
    _await_readiness(_await_leaders(contact, missing, settings), settings)
    return created


def topic_problems(settings: Settings) -> list[str]:
    """What is wrong with the topics as they exist, a sentence each; empty where all is well.

    Raises KafkaError.
    """
    topics, found = required_topics(settings), find_topics(settings)
    problems = list(shared_names(topics))
    for topic in topics:
        if topic.name in found.topics:
            partitions = len(found.topics[topic.name].partitions)
            problems += topic.problems(partitions, found.configs[topic.name])
        else:
            problems.append(f"topic {topic.name} is missing: create it with `duetime topics`")
    return problems


def check_topics(settings: Settings) -> None:
    """Raise ConfigError with everything that is wrong with the topics."""
    check_all(topic_problems(settings))


def find_topics(settings: Settings) -> Found:
    """Return what the cluster has. Raises KafkaError."""
    contact = Contact(settings)
    cluster = _cluster(contact, settings)
    topics = _described(cluster)
    own = [topic.name for topic in required_topics(settings) if topic.name in topics]
    configs = _configs(contact.admin, own)
    return Found(brokers=len(cluster.brokers), topics=topics, configs=configs)


def tune_topics(settings: Settings) -> list[str]:
    """Alter the settings of existing topics that may be changed at any time.

    Returns a sentence for each topic that was changed. Raises KafkaError, after all others are
    changed, where the cluster refuses one.
    """
    found, admin = find_topics(settings), Contact(settings).admin
    changes = {
        topic.name: wanted
        for topic in required_topics(settings)
        if topic.name in found.configs and (wanted := topic.outdated(found.configs[topic.name]))
    }
    if not changes:
        return []
    resources = [_altered(name, wanted) for name, wanted in changes.items()]
    answers = admin.incremental_alter_configs(resources, request_timeout=TIMEOUT_S)
    refused = {
        resource.name: error for resource, it in answers.items() if (error := it.exception())
    }
    changed = [
        f"{name}: {changes_in_words(found.configs[name], wanted)}"
        for name, wanted in changes.items()
        if name not in refused
    ]
    for name, error in refused.items():
        done = f" (changed: {'; '.join(changed)})" if changed else ""
        raise KafkaError(
            f"the settings of topic {name} could not be changed ({_reason(error)}): "
            f"may this user alter topics?{done}"
        )
    return changed


def changes_in_words(have: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return which settings change, and from what to what."""
    return ", ".join(f"{name} {have[name]} -> {value}" for name, value in wanted.items())


def _altered(name: str, wanted: Mapping[str, str]) -> ConfigResource:
    entries = [
        ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        for setting, value in wanted.items()
    ]
    return ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)


def _cluster(contact: Contact, settings: Settings) -> ClusterMetadata:
    try:
        return contact.cluster(LOOKS_S, hopeless=TURNED_AWAY)
    except Unanswered as error:
        raise error.in_words(settings, "is the broker up, and is this its address?") from error


def _existing(contact: Contact, settings: Settings) -> dict[str, TopicMetadata]:
    """The cluster's topics by their names."""
    return _described(_cluster(contact, settings))


def _described(cluster: ClusterMetadata) -> dict[str, TopicMetadata]:
    return {name: topic for name, topic in cluster.topics.items() if topic.error is None}


def _create(admin: AdminClient, topics: Iterable[Topic], settings: Settings) -> list[str]:
    wanted = [_new_topic(topic, settings.replication_factor) for topic in topics]
    answers = admin.create_topics(wanted, operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
    return [name for name, answer in answers.items() if _is_created(name, answer)]


def _new_topic(topic: Topic, replicas: int) -> NewTopic:
    return NewTopic(
        topic.name,
        num_partitions=topic.partitions,
        replication_factor=replicas,
        config=dict(topic.settings),
    )


def _is_created(name: str, answer: "Future[None]") -> bool:
    """Whether it is, and not by someone else at the same time."""
    try:
        answer.result()
    except KafkaException as error:
        code = error.args[0].code()
        if code == BrokerError.TOPIC_ALREADY_EXISTS:
            return False
        what = f"topic {name} could not be created ({_reason(error)})"
        if code == BrokerError.INVALID_REPLICATION_FACTOR:
            raise ConfigError(f"{what}: set replication_factor") from error
        raise KafkaError(f"{what}: may this user create topics?") from error
    return True


def _await_leaders(
    contact: Contact, topics: Iterable[Topic], settings: Settings
) -> list[TopicMetadata]:
    deadline = time.monotonic() + LEADERS_TIMEOUT_S
    while leaderless := _leaderless(existing := _existing(contact, settings), topics):
        if time.monotonic() > deadline:
            raise KafkaError(
                f"topic {leaderless[0]} is created but cannot be written to yet: "
                "look at the brokers, then try again"
            )
        time.sleep(ASK_AGAIN_S)
    return [existing[topic.name] for topic in topics]


def _await_readiness(topics: Iterable[TopicMetadata], settings: Settings) -> None:
    """Brokers know who is to lead a partition before the leader does, and turn writers away."""
    places = [(str(topic.topic), each) for topic in topics for each in topic.partitions]
    offsets = Offsets(settings, TopicNames(settings).release_group)
    deadline = time.monotonic() + LEADERS_TIMEOUT_S
    try:
        while not _ready(offsets, places):
            # A busy machine takes longer for hundreds of partitions than one question may.
            if time.monotonic() > deadline:
                raise KafkaError("topics are created but cannot be read yet: look at the brokers")
    finally:
        offsets.close()


def _ready(offsets: Offsets, places: Iterable[Place]) -> bool:
    try:
        offsets.ends(places)
    except KafkaError:
        return False
    return True


def _leaderless(existing: Mapping[str, TopicMetadata], topics: Iterable[Topic]) -> list[str]:
    return [topic.name for topic in topics if not _has_leaders(existing.get(topic.name))]


def _has_leaders(topic: TopicMetadata | None) -> bool:
    return topic is not None and all(one.leader >= 0 for one in topic.partitions.values())


def _configs(admin: AdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Each topic's settings, the cluster's defaults included."""
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    if not resources:
        return {}
    answers = admin.describe_configs(resources, request_timeout=TIMEOUT_S)
    return {resource.name: _settings(resource.name, answer) for resource, answer in answers.items()}


def _settings(name: str, answer: "Future[dict[str, Any]]") -> dict[str, str]:
    try:
        entries = answer.result()
    except KafkaException as error:
        raise KafkaError(
            f"the settings of topic {name} could not be read ({_reason(error)}): "
            "may this user describe topics?"
        ) from error
    return {entry.name: entry.value for entry in entries.values() if entry.value is not None}


def _reason(error: BaseException) -> str:
    return str(error.args[0].str())
