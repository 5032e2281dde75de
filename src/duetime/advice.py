"""Advice about a cluster that duetime works on. Pure: it judges what was found."""

from collections.abc import Iterator, Sequence

from duetime.admin import Found, changes_in_words
from duetime.config import Settings
from duetime.required import Topic, required_topics
from duetime.topics import namespaces

#: The number of brokers from which a cluster can lose one and keep what it has acknowledged.
REPLICATED_BROKERS = 3

#: The replicas of a topic, and how many of them have to have a record before it is acknowledged.
REPLICAS, IN_SYNC = 3, 2

#: The settings that name the intake topics that are called the same in each namespace.
SHARED_NAMES = ("airtel_topic", "countdown_topic", "scheduler_topic")


def advice(settings: Settings, found: Found) -> dict[str, str]:
    """Return a sentence for each thing that should be done, by what it is about."""
    topics = [topic for topic in required_topics(settings) if topic.name in found.configs]
    sentences = {
        "segments": _segments(topics, found),
        "replicas": _replicas(topics, found),
        "in-sync replicas": _in_sync(topics, found),
        "namespaces": _namespaces(settings, found),
    }
    return {about: sentence for about, sentence in sentences.items() if sentence}


def _segments(topics: Sequence[Topic], found: Found) -> str:
    outdated = {
        topic.name: changes
        for topic in topics
        if (changes := topic.outdated(found.configs[topic.name]))
    }
    if not outdated:
        return ""
    name, changes = next(iter(outdated.items()))
    return (
        f"{_listed(list(outdated))} should have other segments, or a broker may run out of memory "
        f"maps while messages wait for months: `duetime topics` changes them ({name}: "
        f"{changes_in_words(found.configs[name], changes)})"
    )


def _replicas(topics: Sequence[Topic], found: Found) -> str:
    if found.brokers < REPLICATED_BROKERS:
        return ""
    single = [topic.name for topic in topics if 1 in _replica_counts(topic.name, found)]
    if not single:
        return ""
    return (
        f"{_listed(single)} would lose messages with one broker, as there is 1 replica: give each "
        f"{REPLICAS} with kafka-reassign-partitions.sh, and set replication_factor = {REPLICAS} "
        "for topics to come"
    )


def _in_sync(topics: Sequence[Topic], found: Found) -> str:
    if found.brokers < REPLICATED_BROKERS:
        return ""
    least = "min.insync.replicas"
    few = [
        topic.name for topic in topics if int(found.configs[topic.name].get(least, "1")) < IN_SYNC
    ]
    if not few:
        return ""
    return (
        f"{_listed(few)} may acknowledge a message that one broker alone has: set "
        f"{least}={IN_SYNC} with kafka-configs.sh --alter, or as the brokers' default"
    )


def _replica_counts(topic: str, found: Found) -> Iterator[int]:
    return (len(each.replicas) for each in found.topics[topic].partitions.values())


def _namespaces(settings: Settings, found: Found) -> str:
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
