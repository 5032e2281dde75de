"""What the settings of destinations say: how large a record may be, what they take, our rights."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigEntry,
    ConfigResource,
    ResourceType,
    TopicMetadata,
)

from duetime.errors import Reason

#: How often all topics are asked about, in seconds; a new topic is asked about at once.
EVERY_S = 60.0

#: How many topics are asked about in one request.
AT_ONCE = 500

#: How long one request may take, in seconds.
TIMEOUT_S = 10.0

#: How far a sender's clock and the way to the broker may put a record's timestamp beside the
#: broker's clock, in ms: a topic that allows less may refuse what is sent to it.
TIMESTAMP_SLACK_MS = 5_000

#: How far before and after the broker's clock a timestamp may be.
TIMESTAMP_LIMITS = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")


@dataclass(frozen=True, slots=True)
class Detail:
    """The settings of one topic; as nothing is known of them."""

    #: max.message.bytes.
    limit: int | None = None
    is_compacted: bool = False
    #: min.insync.replicas.
    min_insync: int = 1
    #: Whether it refuses timestamps that are a few seconds beside the broker's clock.
    refuses_timestamps: bool = False

    @classmethod
    def of(cls, config: Mapping[str, ConfigEntry]) -> "Detail":
        """What `describe_configs` answered."""
        values = {name: str(entry.value) for name, entry in config.items()}
        is_stamped = values["message.timestamp.type"] == "LogAppendTime"
        # Brokers before 3.6 have neither.
        limits = [int(values[name]) for name in TIMESTAMP_LIMITS if name in values]
        is_narrow = any(each < TIMESTAMP_SLACK_MS for each in limits)
        return cls(
            limit=int(values["max.message.bytes"]),
            is_compacted="compact" in values["cleanup.policy"],
            min_insync=int(values["min.insync.replicas"]),
            refuses_timestamps=is_narrow and not is_stamped,
        )


class Details:
    """Asks for what a list of topics does not say, and remembers it."""

    def __init__(self) -> None:
        self._known: dict[str, Detail] = {}
        #: Topics that we may not write to.
        self.denied: set[str] = set()
        self._asked_s = -EVERY_S

    def refresh(self, admin: AdminClient, topics: Iterable[str]) -> None:
        """Ask for topics that are new, and for all of them once a minute."""
        everything = time.monotonic() - self._asked_s >= EVERY_S
        if everything:
            self._asked_s = time.monotonic()
        asked = [name for name in topics if everything or name not in self._known]
        for begin in range(0, len(asked), AT_ONCE):
            self._ask(admin, asked[begin : begin + AT_ONCE])

    def of(self, topic: str) -> Detail:
        """What is known of a topic."""
        return self._known.get(topic, Detail())

    def _ask(self, admin: AdminClient, topics: list[str]) -> None:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        for resource, answer in admin.describe_configs(
            resources, request_timeout=TIMEOUT_S
        ).items():
            # Who may not read a topic's settings finds out by being refused.
            self._known.setdefault(resource.name, Detail())
            with suppress(KafkaException):
                self._known[resource.name] = Detail.of(answer.result())
        described = admin.describe_topics(
            TopicCollection(topics), include_authorized_operations=True, request_timeout=TIMEOUT_S
        )
        for name, answer in described.items():
            with suppress(KafkaException):
                rights = answer.result().authorized_operations
                allowed = not rights or AclOperation.WRITE in rights
                (self.denied.discard if allowed else self.denied.add)(name)


@dataclass(frozen=True, slots=True)
class Stuck:
    """The partitions of a topic that take nothing now, and why the first of them does not."""

    reason: Reason
    partitions: frozenset[int]


def stuck_partitions(topic: TopicMetadata, min_insync: int) -> Stuck | None:
    """The partitions without a leader or with too few replicas in sync; None if there are none.

    A replica can only count where there is one: Kafka caps `min_insync` by the replicas (KIP-966).
    """
    leaderless = {number for number, each in topic.partitions.items() if each.leader < 0}
    lacking = {
        number
        for number, each in topic.partitions.items()
        if len(each.isrs) < min(min_insync, len(each.replicas))
    }
    if not leaderless | lacking:
        return None
    reason = Reason.NO_LEADER if leaderless else Reason.NOT_ENOUGH_REPLICAS
    return Stuck(reason, frozenset(leaderless | lacking))
