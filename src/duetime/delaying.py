"""The records that a client sends to a delayed topic, checked before they leave.

Nothing here sends, and nothing reads a clock.
"""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from duetime.clock import format_duration
from duetime.config import Settings
from duetime.errors import InvalidMessage, Reason
from duetime.message import (
    DELIVER_AFTER_MS,
    DELIVER_GROUP,
    DELIVER_ID,
    DELIVER_RETRY,
    MessageId,
    check_unique,
)
from duetime.outgoing import (
    Outgoing,
    Wanted,
    check_partition,
    check_size,
    encoded,
    encoded_headers,
)
from duetime.tables import DelayedTopic
from duetime.topics import DELAYED, enabled

#: The headers that are made from arguments, or by who reads.
OWN_HEADERS = (DELIVER_AFTER_MS, DELIVER_ID, DELIVER_GROUP, DELIVER_RETRY)

#: How long the broker may take to describe a topic, in seconds.
TIMEOUT_S = 10.0


def delayed(
    wanted: Wanted, settings: Settings, *, deliver_after_ms: int, now_ms: int, unique: str
) -> Outgoing:
    """The record for the delayed topic. What is to be delivered in the past is so at once.

    Raises InvalidMessage with the reason why the topic cannot take it.
    """
    topic = delayed_topic(wanted, settings)
    _check_limit(topic, settings.delayed_topics[topic], deliver_after_ms - now_ms)
    identity = MessageId(due_ms=deliver_after_ms, unique=check_unique(unique))
    key, value = encoded(wanted.key, "the key"), encoded(wanted.value, "the value")
    headers = encoded_headers(wanted.headers, OWN_HEADERS)
    check_size(key, value, headers, settings.largest_bytes)
    own = {DELIVER_AFTER_MS: str(deliver_after_ms), DELIVER_ID: str(identity)}
    return Outgoing(
        id=identity,
        topic=topic,
        partition=None if wanted.partition is None else check_partition(wanted.partition),
        key=key,
        value=value,
        headers=(*((name, text.encode()) for name, text in own.items()), *headers),
    )


def delayed_topic(wanted: Wanted, settings: Settings) -> str:
    """The delayed topic that is meant: by its own name, or by that of its visible one.

    Raises InvalidMessage (not-delayed, unknown-cluster).
    """
    if wanted.cluster is not None:
        raise InvalidMessage(
            Reason.UNKNOWN_CLUSTER,
            "a delayed topic is on this cluster: send to another with at or in_",
        )
    for name in (wanted.topic, f"{wanted.topic}{DELAYED}"):
        if name in enabled(settings):
            return name
    raise InvalidMessage(
        Reason.NOT_DELAYED,
        f"{wanted.topic} is no delayed topic: put it under delayed_topics in the configuration",
    )


def in_batches(deliver_after_ms: int, batch_ms: int) -> int:
    """When it is to be delivered by the batch rule: with the last of its stretch of time."""
    return -(-deliver_after_ms // batch_ms) * batch_ms if batch_ms else deliver_after_ms


def check_not_transactional(properties: Mapping[str, Any]) -> None:
    """Raises InvalidMessage (in-transaction): readers would wait for its end, past the time."""
    if properties.get("transactional.id"):
        raise InvalidMessage(
            Reason.IN_TRANSACTION,
            "a delayed record cannot be sent in a transaction: use a producer without one",
        )


def check_not_compacted(admin: AdminClient, topic: str) -> bool:
    """Whether there is such a topic. Raises InvalidMessage (compacted).

    Who may not read the topic's settings finds out later.
    """
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        (answer,) = admin.describe_configs([resource], request_timeout=TIMEOUT_S).values()
        policy = answer.result()["cleanup.policy"].value
    except KafkaException as error:
        return bool(error.args[0].code() != BrokerError.UNKNOWN_TOPIC_OR_PART)
    if "compact" in policy:
        raise InvalidMessage(
            Reason.COMPACTED,
            f"topic {topic} is compacted, and would lose what waits: set cleanup.policy to delete",
        )
    return True


def _check_limit(topic: str, known: DelayedTopic, delay_ms: int) -> None:
    if delay_ms > known.max_ms:
        raise InvalidMessage(
            Reason.BEYOND_LIMIT,
            f"{format_duration(delay_ms)} is over the {format_duration(known.max_ms)} that topic "
            f"{topic} delays: raise delayed.delivery.max.ms, or send with at or in_",
        )
