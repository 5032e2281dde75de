"""A member of a group: confluent-kafka's consumer, as far as a consumer of delayed topics needs it.

It reads the ends of partitions that are given to it, each record once. Where they begin, and what
is committed, is said by who uses it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime.delayed.log import Place
from duetime.errors import KafkaError
from duetime.leaving import is_static_member, leave

log = logging.getLogger(__name__)

#: Called with partitions that come or go, or were committed.
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
        self._is_static = is_static_member(properties)
        self._raised: Exception | None = None
        self._committed: OnPartitions = lambda _: None
        self._consumer = Consumer(
            {"partition.assignment.strategy": COOPERATIVE}
            | dict(properties)
            | {
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "on_commit": self._answered,
            }
        )

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        assign: OnPartitions,
        revoke: OnPartitions,
        lost: OnPartitions,
        committed: OnPartitions,
    ) -> None:
        """Read these topics, sharing their partitions with the group. Called back while reading.

        `committed` is told what was, when that was not waited for.
        """
        self._committed = committed
        self._consumer.subscribe(
            list(topics),
            on_assign=self._told(assign),
            on_revoke=self._told(revoke),
            on_lost=self._told(lost),
        )

    def read(self, wait_s: float, append: Callable[[Place, list[Message]], None]) -> bool:
        """Give what the logs have got next, partition by partition. Rebalances happen in here.

        Says whether there may be more at once.
        """
        first = self._consumer.poll(wait_s)
        found = [first, *self._consumer.consume(BATCH, 0)] if first is not None else []
        records: dict[Place, list[Message]] = {}
        failed = None
        for record in found:
            if (error := record.error()) is not None:
                failed = error
                continue
            records.setdefault((record.topic() or "", record.partition() or 0), []).append(record)
        for place, those in records.items():
            append(place, those)
        # What came with it comes no second time.
        self._raise()
        if failed is not None:
            raise KafkaError(f"delayed topics cannot be read ({failed.str()}): is Kafka well?")
        return len(found) > BATCH

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
        leave(self._consumer, is_static=self._is_static)
        self._raise()

    def _told(self, callback: OnPartitions) -> Callable[[Consumer, list[TopicPartition]], None]:
        # What it raises out of the client takes the records with it that were read already.
        def tell(_: Consumer, partitions: list[TopicPartition]) -> None:
            try:
                callback(partitions)
            except Exception as error:  # noqa: BLE001 (raised once they are safe)
                self._raised = self._raised or error

        return tell

    def _raise(self) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _answered(self, error: BrokerError | None, partitions: list[TopicPartition]) -> None:
        failed = [each.error for each in partitions if each.error is not None]
        if error is not None or failed:
            why = (error or failed[0]).str()
            log.warning("Kafka did not commit, and will be asked again error=%s", why)
        else:
            self._committed(partitions)


def _check(answers: Iterable[TopicPartition]) -> None:
    for each in answers:
        if each.error is not None:
            raise KafkaError(f"Kafka did not commit ({each.error.str()}): has the group changed?")


def _refused(what: str, error: KafkaException) -> KafkaError:
    return KafkaError(f"Kafka did not {what} ({error.args[0].str()}): is the broker up?")
