"""A member of a consumer group, as a consumer of delayed topics needs it; and leaving a group."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime.core.errors import KafkaError
from duetime.kafka.offsets import Partition
from duetime.kafka.range_reader import fetched

log = logging.getLogger(__name__)

#: Called with partitions that are assigned or revoked, or were committed.
OnPartitions = Callable[[list[TopicPartition]], None]

#: The most records read from the client at a time: all that it has, unless that is a backlog.
BATCH_RECORDS = 10_000

#: Timeout of the broker's answer, in seconds.
TIMEOUT_S = 20.0

#: Timeout of giving back a member's partitions, in seconds; it is a matter of milliseconds.
GIVE_BACK_S = 10.0

#: How long one poll takes that waits for that, in seconds.
GIVE_BACK_POLL_S = 0.02

#: Only the partitions that move are opened again, and not all of them for each new member.
COOPERATIVE = "cooperative-sticky"


class GroupMember:
    """Reads the assigned partitions, each record once, from the offsets that its caller gives.

    Not thread-safe. Errors of the cluster are raised as KafkaError.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """Connect with librdkafka's `properties`."""
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
                "on_commit": self._on_commit,
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
        """Read these topics, sharing their partitions with the group.

        The callbacks run inside of `read`; `committed` after an asynchronous commit.
        """
        self._committed = committed
        self._consumer.subscribe(
            list(topics),
            on_assign=self._deferring(assign),
            on_revoke=self._deferring(revoke),
            on_lost=self._deferring(lost),
        )

    def read(self, wait_s: float, append: Callable[[Partition, list[Message]], None]) -> bool:
        """Pass the next records to `append`, partition by partition. Rebalances happen in here.

        Returns whether there may be more at once.
        """
        found = fetched(self._consumer, BATCH_RECORDS, wait_s)
        records: dict[Partition, list[Message]] = {}
        failed = None
        for record in found:
            if (error := record.error()) is not None:
                failed = error
                continue
            records.setdefault((record.topic() or "", record.partition() or 0), []).append(record)
        for place, those in records.items():
            append(place, those)
        # Only now: records that came with the error do not come a second time.
        self._raise_deferred()
        if failed is not None:
            raise KafkaError(f"delayed topics cannot be read ({failed.str()}): is Kafka well?")
        return len(found) > BATCH_RECORDS

    def committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the group's committed offsets of these partitions."""
        try:
            return self._consumer.committed(partitions, timeout=TIMEOUT_S)
        except KafkaException as error:
            raise _refused("return committed offsets", error) from error

    def commit(self, offsets: list[TopicPartition], *, asynchronous: bool) -> None:
        """Commit these offsets; an asynchronous commit is not waited for."""
        try:
            if asynchronous:
                self._consumer.commit(offsets=offsets)
            else:
                for each in self._consumer.commit(offsets=offsets, asynchronous=False):
                    if each.error is not None:
                        why = each.error.str()
                        raise KafkaError(f"Kafka did not commit ({why}): has the group changed?")
        except KafkaException as error:
            raise _refused("commit", error) from error

    def assign(self, ends: list[TopicPartition]) -> None:
        """Begin to read these partitions from their offsets on."""
        if self._is_cooperative:
            self._consumer.incremental_assign(ends)
        else:
            self._consumer.assign(ends)

    def unassign(self, partitions: list[TopicPartition]) -> None:
        """Stop to read these partitions."""
        if self._is_cooperative:
            self._consumer.incremental_unassign(partitions)
        else:
            self._consumer.unassign()

    def close(self) -> None:
        """Leave the group. Safe to repeat."""
        leave(self._consumer, is_static=self._is_static)
        self._raise_deferred()

    def _deferring(
        self, callback: OnPartitions
    ) -> Callable[[Consumer, list[TopicPartition]], None]:
        # An error out of the client would take the records with it that were read already.
        def call(_: Consumer, partitions: list[TopicPartition]) -> None:
            try:
                callback(partitions)
            except Exception as error:  # noqa: BLE001 (raised once they are safe)
                self._raised = self._raised or error

        return call

    def _raise_deferred(self) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _on_commit(self, error: BrokerError | None, partitions: list[TopicPartition]) -> None:
        failed = [each.error for each in partitions if each.error is not None]
        if error is not None or failed:
            why = (error or failed[0]).str()
            log.warning("could not commit offsets, will retry error=%s", why)
        else:
            self._committed(partitions)


def _refused(what: str, error: KafkaException) -> KafkaError:
    return KafkaError(f"Kafka did not {what} ({error.args[0].str()}): is the broker up?")


def is_static_member(properties: Mapping[str, Any]) -> bool:
    """Return whether these properties of librdkafka make a static member of the group."""
    return bool(properties.get("group.instance.id"))


def leave(consumer: Consumer, *, is_static: bool = False) -> None:
    """Give back the consumer's partitions and close it; its callbacks run here. Safe to repeat.

    `close` alone answers a pending rebalance while the client ends. If that answer comes too late,
    it waits for ever, and confluent-kafka holds the interpreter's lock there: nothing in the
    process goes on. So pending rebalances are served before. A static member (KIP-345) keeps its
    partitions. Source: librdkafka's issues 4041, 4527 and 4884.
    """
    try:
        # A closed consumer has no other sign. This is outside of the next block, whose callbacks
        # may raise a RuntimeError, too.
        consumer.assignment()
    except RuntimeError:
        return
    try:
        if not is_static:
            consumer.unsubscribe()
        until_s = time.monotonic() + GIVE_BACK_S
        while time.monotonic() < until_s:
            # Records that are read on the way are not committed.
            passed = consumer.consume(BATCH_RECORDS, GIVE_BACK_POLL_S)
            if len(passed) < BATCH_RECORDS and (is_static or not consumer.assignment()):
                return
    finally:
        consumer.close()
