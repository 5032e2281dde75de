"""duetime's topics on the cluster: created where they are missing, checked, tuned, and advised on.

Each function asks the cluster twice at most, however many topics there are.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
    TopicMetadata,
)

from duetime.core.errors import ConfigError, InvalidMessage, KafkaError, Reason
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.core.topics import (
    TopicNames,
    TopicSpec,
    check_all,
    namespaces,
    required_topics,
    shared_names,
)
from duetime.kafka.connection import TURNED_AWAY, ClusterProbe, ensure_reachable
from duetime.kafka.descriptions import described_configs
from duetime.kafka.offsets import Offsets, Partition

log = logging.getLogger(__name__)

#: Timeout of one request, in seconds. Creating hundreds of partitions takes a few.
TIMEOUT_S = 30.0

#: Timeouts of the cluster's list of topics, in seconds; after each, an error that no further try
#: changes ends it. The last is for a cluster that has very many.
CLUSTER_TIMEOUTS_S = (1.0, 4.0, 30.0)

#: Timeout of the cluster to find leaders for new partitions, in seconds.
LEADERS_TIMEOUT_S = 60.0

#: How often the leaders are asked for, in seconds.
LEADERS_INTERVAL_S = 0.05

#: Pause between two tries of `await_kafka`, in seconds.
RETRY_INTERVAL_S = 0.5

#: Timeout of a topic's settings, in seconds.
DESCRIBE_TIMEOUT_S = 10.0

#: The brokers from which a cluster can lose one and keep what it has acknowledged.
REPLICATED_BROKERS = 3

#: The replicas of a topic, and how many of them must have a record before it is acknowledged.
REPLICAS, IN_SYNC = 3, 2

#: The settings of intake topics whose names have no namespace in them.
SHARED_NAMES = ("airtel_topic", "countdown_topic", "scheduler_topic")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopics:
    """The brokers and topics of a cluster, and the settings of duetime's topics."""

    brokers: int
    #: Every topic, by name, except those that cannot be described.
    topics: Mapping[str, TopicMetadata]
    #: The settings of duetime's topics, with the cluster's defaults.
    configs: Mapping[str, Mapping[str, str]]


def create_topics(settings: Settings, specs: Sequence[TopicSpec] | None = None) -> list[str]:
    """Create the missing topics, wait until they can be written to, and return their names.

    They are `specs`, by default all that duetime needs. Safe to repeat, and by two at once.
    Existing topics stay as they are: see `topic_problems`. Raises KafkaError, and ConfigError where
    a setting keeps a topic from being created.
    """
    specs = required_topics(settings) if specs is None else specs
    check_all(shared_names(specs))
    probe = ClusterProbe(settings)
    existing = _topics(_cluster(probe))
    missing = [spec for spec in specs if spec.name not in existing]
    if not missing:
        return []
    new = [
        NewTopic(
            spec.name,
            num_partitions=spec.partitions,
            replication_factor=settings.replication_factor,
            config=dict(spec.settings),
        )
        for spec in missing
    ]
    answers = probe.admin.create_topics(new, operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
    created = [name for name, answer in answers.items() if _is_created(name, answer)]
    # Of one that another has created meanwhile, the number of partitions is not ours to wait for.
    expected = {spec.name: spec.partitions if spec.name in created else 1 for spec in missing}
    _await_leaders(probe, expected, settings)
    return created


def topic_problems(settings: Settings, found: ClusterTopics | None = None) -> list[str]:
    """Return what is wrong with the existing topics, a sentence each. Raises KafkaError.

    They are those `found` by `find_topics`, or are asked for.
    """
    specs, found = required_topics(settings), found or find_topics(settings)
    problems = list(shared_names(specs))
    for spec in specs:
        if spec.name in found.topics:
            partitions = len(found.topics[spec.name].partitions)
            problems += spec.problems(partitions, found.configs[spec.name])
        else:
            problems.append(f"topic {spec.name} is missing: create it with `duetime topics`")
    return problems


def check_topics(settings: Settings) -> None:
    """Raise ConfigError with everything that is wrong with the topics. Raises KafkaError."""
    check_all(topic_problems(settings))


def find_topics(settings: Settings) -> ClusterTopics:
    """Return the cluster's topics. Raises KafkaError."""
    probe = ClusterProbe(settings)
    cluster = _cluster(probe)
    topics = _topics(cluster)
    own = [spec.name for spec in required_topics(settings) if spec.name in topics]
    return ClusterTopics(
        brokers=len(cluster.brokers), topics=topics, configs=_configs(probe.admin, own)
    )


def tune_topics(settings: Settings) -> list[str]:
    """Alter the settings of existing topics that may be changed at any time.

    Returns a sentence for each topic that was changed. Raises KafkaError, after all others are
    changed, where the cluster refuses one.
    """
    found = find_topics(settings)
    changes = _outdated(required_topics(settings), found)
    if not changes:
        return []
    resources = [_altered(name, wanted) for name, wanted in changes.items()]
    admin = ClusterProbe(settings).admin
    answers = admin.incremental_alter_configs(resources, request_timeout=TIMEOUT_S)
    refused = {
        resource.name: error for resource, it in answers.items() if (error := it.exception())
    }
    changed = [
        f"{name}: {_changes(found.configs[name], wanted)}"
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


def grow_topics(settings: Settings) -> list[str]:
    """Add the partitions that topics lack which may grow, and wait until they can be written to.

    Returns a sentence for each topic that was changed. Raises KafkaError.
    """
    probe = ClusterProbe(settings)
    existing = _topics(_cluster(probe))
    small = [
        spec
        for spec in required_topics(settings)
        if spec.may_grow
        and spec.name in existing
        and len(existing[spec.name].partitions) < spec.partitions
    ]
    if not small:
        return []
    wanted = [NewPartitions(spec.name, spec.partitions) for spec in small]
    answers = probe.admin.create_partitions(wanted, request_timeout=TIMEOUT_S)
    for name, answer in answers.items():
        try:
            answer.result()
        except KafkaException as error:
            raise KafkaError(
                f"topic {name} could not get more partitions ({_reason(error)}): may this user "
                "alter topics?"
            ) from error
    _await_leaders(probe, {spec.name: spec.partitions for spec in small}, settings)
    return [
        f"{spec.name}: {len(existing[spec.name].partitions)} -> {spec.partitions} partitions"
        for spec in small
    ]


def check_not_compacted(admin: AdminClient, topic: str) -> bool:
    """Return whether the topic exists. Raises InvalidMessage (compacted).

    Where this user may not read the topic's settings, the check is left out.
    """
    try:
        described = described_configs(admin, [topic], DESCRIBE_TIMEOUT_S)[topic]
        policy = str(described.result()["cleanup.policy"].value)
    except KafkaException as error:
        return bool(error.args[0].code() != BrokerError.UNKNOWN_TOPIC_OR_PART)
    if "compact" in policy:
        raise InvalidMessage(
            Reason.COMPACTED,
            f"topic {topic} is compacted, and would lose pending records: set cleanup.policy to "
            "delete",
        )
    return True


def _cluster(probe: ClusterProbe) -> ClusterMetadata:
    advice = "is the broker up, and is this its address?"
    return probe.cluster(CLUSTER_TIMEOUTS_S, advice, hopeless=TURNED_AWAY)


def _topics(cluster: ClusterMetadata) -> dict[str, TopicMetadata]:
    return {name: topic for name, topic in cluster.topics.items() if topic.error is None}


def _is_created(name: str, answer: "Future[None]") -> bool:
    """Return whether it was created, and not by another process at the same time."""
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


def _await_leaders(probe: ClusterProbe, expected: Mapping[str, int], settings: Settings) -> None:
    """Wait until each topic has its expected number of partitions, and each partition a leader.

    Raises KafkaError.
    """
    existing: dict[str, TopicMetadata] = {}

    def has_leaders(name: str) -> bool:
        found = existing[name].partitions.values() if name in existing else ()
        return len(found) >= expected[name] and all(each.leader >= 0 for each in found)

    def all_have_leaders() -> bool:
        existing.update(_topics(_cluster(probe)))
        return all(map(has_leaders, expected))

    if not wait_until(all_have_leaders, LEADERS_TIMEOUT_S, LEADERS_INTERVAL_S):
        name = next(name for name in expected if not has_leaders(name))
        raise KafkaError(
            f"topic {name} is created but cannot be written to: check the brokers, then try again"
        )
    # Brokers know a partition's leader before the leader itself does, which refuses writes.
    places = [(name, each) for name in expected for each in existing[name].partitions]
    with closing(Offsets(settings, TopicNames(settings).release_group)) as offsets:
        # A busy machine takes longer for hundreds of partitions than the timeout of one request.
        if not wait_until(lambda: _answers(offsets, places), LEADERS_TIMEOUT_S, LEADERS_INTERVAL_S):
            raise KafkaError("topics are created but cannot be read: check the brokers")


def _answers(offsets: Offsets, places: Iterable[Partition]) -> bool:
    try:
        offsets.ends(places)
    except KafkaError:
        return False
    return True


def await_kafka(settings: Settings) -> None:
    """Wait until the leader of each partition of our topics answers.

    A pipeline that was cut off comes back so: just after the death of a broker, it could not start.
    Raises ConfigError.
    """
    if reason := _not_ready(settings):
        log.warning("waiting for Kafka: %s", reason)
        wait_until(lambda: _not_ready(settings) is None, math.inf, RETRY_INTERVAL_S)


def _not_ready(settings: Settings) -> KafkaError | None:
    try:
        topics, ours = ensure_reachable(settings).topics, required_topics(settings)
        found = (each.name for each in ours if each.name in topics)
        with closing(Offsets(settings, TopicNames(settings).release_group)) as offsets:
            offsets.ends((name, each) for name in found for each in topics[name].partitions)
    except KafkaError as error:
        return error
    return None


def _configs(admin: AdminClient, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return each topic's settings, with the cluster's defaults."""
    asked, found = list(names), {}
    if not asked:
        return {}
    for name, answer in described_configs(admin, asked, TIMEOUT_S).items():
        try:
            entries = answer.result().values()
        except KafkaException as error:
            raise KafkaError(
                f"the settings of topic {name} could not be read ({_reason(error)}): "
                "may this user describe topics?"
            ) from error
        found[name] = {each.name: each.value for each in entries if each.value is not None}
    return found


def _outdated(specs: Iterable[TopicSpec], found: ClusterTopics) -> dict[str, dict[str, str]]:
    return {
        spec.name: wanted
        for spec in specs
        if spec.name in found.configs and (wanted := spec.outdated(found.configs[spec.name]))
    }


def _altered(name: str, wanted: Mapping[str, str]) -> ConfigResource:
    entries = [
        ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        for setting, value in wanted.items()
    ]
    return ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)


def _changes(have: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {have[name]} -> {value}" for name, value in wanted.items())


def _reason(error: BaseException) -> str:
    return str(error.args[0].str())


def advice(settings: Settings, found: ClusterTopics) -> dict[str, str]:
    """Return a sentence for each thing that should be done, by its subject. Pure."""
    specs = [spec for spec in required_topics(settings) if spec.name in found.configs]
    sentences = {
        "segments": _segments_advice(specs, found),
        "replicas": _replicas_advice(specs, found),
        "in-sync replicas": _in_sync_advice(specs, found),
        "namespaces": _namespaces_advice(settings, found),
    }
    return {about: sentence for about, sentence in sentences.items() if sentence}


def _segments_advice(specs: Sequence[TopicSpec], found: ClusterTopics) -> str:
    outdated = _outdated(specs, found)
    if not outdated:
        return ""
    name, changes = next(iter(outdated.items()))
    return (
        f"{_listed(list(outdated))} should have other segments, or a broker may run out of memory "
        f"maps while messages wait for months: `duetime topics` changes them ({name}: "
        f"{_changes(found.configs[name], changes)})"
    )


def _replicas_advice(specs: Sequence[TopicSpec], found: ClusterTopics) -> str:
    def replica_counts(name: str) -> Iterator[int]:
        return (len(each.replicas) for each in found.topics[name].partitions.values())

    single = [spec.name for spec in specs if 1 in replica_counts(spec.name)]
    if found.brokers < REPLICATED_BROKERS or not single:
        return ""
    return (
        f"{_listed(single)} would lose messages with one broker, as there is 1 replica: give each "
        f"{REPLICAS} with kafka-reassign-partitions.sh, and set replication_factor = {REPLICAS} "
        "for topics to come"
    )


def _in_sync_advice(specs: Sequence[TopicSpec], found: ClusterTopics) -> str:
    least = "min.insync.replicas"
    few = [spec.name for spec in specs if int(found.configs[spec.name].get(least, "1")) < IN_SYNC]
    if found.brokers < REPLICATED_BROKERS or not few:
        return ""
    return (
        f"{_listed(few)} may acknowledge a message that one broker alone has: set "
        f"{least}={IN_SYNC} with kafka-configs.sh --alter, or as the brokers' default"
    )


def _namespaces_advice(settings: Settings, found: ClusterTopics) -> str:
    others = namespaces(found.topics) - {settings.namespace}
    fields = type(settings).model_fields
    shared = [name for name in SHARED_NAMES if getattr(settings, name) == fields[name].default]
    if not others or not shared:
        return ""
    return (
        f"this cluster has namespace {', '.join(sorted(others))}, too: where its pipelines read "
        f"{', '.join(getattr(settings, name) for name in shared)} as these do, each message there "
        f"is delivered by both. Name other topics with {', '.join(shared)} in one of them"
    )


def _listed(names: Sequence[str]) -> str:
    others = f" and {len(names) - 1} more" if names[1:] else ""
    return f"topic {names[0]}{others}"
