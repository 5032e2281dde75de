"""A member of a group: confluent-kafka's consumer, as far as a consumer of delayed topics needs it.

It reads the ends of partitions that are given to it, each record once. Where they begin, and what
is committed, is said by who uses it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from duetime.delayed.log import Place
from duetime.errors import KafkaError

#: Called with partitions that come or go.
OnPartitions = Callable[[list[TopicPartition]], None]

#: How many records are read from the client at a time: all that it has, unless that is a backlog.
BATCH = 10_000

#: How long the broker may take to answer, in seconds.
TIMEOUT_S = 20.0

#: Only the partitions that move are opened anew, and not all of them whenever a member comes.
COOPERATIVE = "cooperative-sticky"


class Member:
    """Not thread-safe. What goes wrong in the cluster is raised as KafkaError."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """`properties` are librdkafka's."""
        self._is_cooperative = "cooperative" in str(
            properties.get("partition.assignment.strategy", COOPERATIVE)
        )
        self._consumer = Consumer(
            {"partition.assignment.strategy": COOPERATIVE}
            | dict(properties)
            | {
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
            }
        )

    def subscribe(
        self, topics: Sequence[str], assign: OnPartitions, revoke: OnPartitions, lost: OnPartitions
    ) -> None:
        """Read these topics, sharing their partitions with the group. Called back while reading."""
        self._consumer.subscribe(
            list(topics),
            on_assign=lambda _, partitions: assign(partitions),
            on_revoke=lambda _, partitions: revoke(partitions),
            on_lost=lambda _, partitions: lost(partitions),
        )

    def read(self, wait_s: float, append: Callable[[Place, list[Message]], None]) -> None:
        """Give what the logs have got next, partition by partition. Rebalances happen in here."""
        first = self._consumer.poll(wait_s)
        if first is None:
            return
        records: dict[Place, list[Message]] = {}
        failed = None
        for record in (first, *self._consumer.consume(BATCH, 0)):
            if (error := record.error()) is not None:
                failed = error
                continue
            records.setdefault((record.topic() or "", record.partition() or 0), []).append(record)
        for place, found in records.items():
            append(place, found)
        # What came with it comes no second time.
        if failed is not None:
            raise KafkaError(f"delayed topics cannot be read ({failed.str()}): is Kafka well?")

    def committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """What the group has committed of these."""
        try:
            return self._consumer.committed(partitions, timeout=TIMEOUT_S)
        except KafkaException as error:
            raise _refused("tell what is committed", error) from error

    def commit(self, offsets: list[TopicPartition], *, asynchronous: bool) -> None:
        """Commit these; not waited for if it is asynchronous."""
        try:
            if asynchronous:
                self._consumer.commit(offsets=offsets)
            else:
                _check(self._consumer.commit(offsets=offsets, asynchronous=False))
        except KafkaException as error:
            raise _refused("commit", error) from error

    def assign(self, ends: list[TopicPartition]) -> None:
        """Read these from their offsets on."""
        if self._is_cooperative:
            self._consumer.incremental_assign(ends)
        else:
            self._consumer.assign(ends)

    def unassign(self, partitions: list[TopicPartition]) -> None:
        """Read these no more."""
        if self._is_cooperative:
            self._consumer.incremental_unassign(partitions)
        else:
            self._consumer.unassign()

    def close(self) -> None:
        """Leave the group. Safe to repeat."""
        self._consumer.close()


def _check(answers: Iterable[TopicPartition]) -> None:
    for each in answers:
        if each.error is not None:
            raise KafkaError(f"Kafka did not commit ({each.error.str()}): has the group changed?")


def _refused(what: str, error: KafkaException) -> KafkaError:
    return KafkaError(f"Kafka did not {what} ({error.args[0].str()}): is the broker up?")
