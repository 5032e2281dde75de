"""Heartbeats of the leader and the standbys: one log in Kafka, and the fence on it.

Everybody reads the topic `duetime.leader`, of one partition. A standby writes there as anybody may.
A leader writes each heartbeat in a transaction of its own with the transactional id of that name.
Who takes over initialises that id: the broker's coordinator refuses all commits of the earlier
leader from then on. A heartbeat counts for its writer once it is committed, so before any fence; it
is visible to readers before that. Source: KIP-98.

Members read uncommitted records, too: else one transaction that a dead leader left open would hide
everything behind it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.leadership import LONE_LEASE_S, PRESENT_S, Heartbeat
from duetime.kafka.offsets import OffsetRange, Partition
from duetime.kafka.range_reader import RangeReader, fetched

#: Timeout of one step of a heartbeat's transaction, in seconds: what is not done goes on later.
STEP_S = 0.5

#: Timeout of the fence, and of leaving, in seconds.
FENCE_S, LEAVE_S = 5.0, 2.0

#: Timeouts of the clients that try to fence, one after the other, in seconds.
FENCE_TRIES_S = (0.05, 0.1, 0.2, 0.4, FENCE_S)

#: Records taken from the client at a time.
BATCH_RECORDS = 500

#: Offsets at the end of the log in which the latest heartbeats are: a leader takes two a heartbeat.
TAIL = 400

#: How far clocks of brokers and readers may be apart for `present_members`, in seconds.
SKEW_S = 5.0


# That it was fenced off is no fatal error to us: `Fenced` says so.
_silent = logging.getLogger(f"{__name__}.silent")
_silent.setLevel(logging.CRITICAL + 1)


class Written(NamedTuple):
    """A leader's heartbeat that no other process has fenced off."""

    #: From when its lease counts, in seconds of the monotonic clock.
    begun_s: float
    heartbeat: Heartbeat


class Fenced(Exception):
    """Another process has fenced off this one's heartbeats as a leader."""


class HeartbeatLog:
    """Reads all heartbeats, and writes those of one standby. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._topic, self._partition = leader_partition(settings)
        properties = librdkafka_properties(settings)
        self._consumer = Consumer(
            properties
            | {
                "group.id": TopicNames(settings).reader_group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                # A log that has lost its end: its old part says nothing of now.
                "auto.offset.reset": "error",
                "isolation.level": "read_uncommitted",
                "fetch.wait.max.ms": 100,
            }
        )
        self._producer = Producer(
            # One that waits for its broker says nothing of now.
            properties | {"linger.ms": 0, "message.timeout.ms": int(STEP_S * 1_000)}
        )

    def start(self) -> bool:
        """Begin to read at the end; return whether the log is empty. Raises KafkaException."""
        place = TopicPartition(self._topic, self._partition)
        start, end = self._consumer.get_watermark_offsets(place, timeout=FENCE_S)
        first = max(start, end - TAIL)
        self._consumer.assign([TopicPartition(self._topic, self._partition, first)])
        return bool(end == 0)

    def read(self, wait_s: float) -> Iterator[Heartbeat]:
        """Yield what has been written since the last call, after `wait_s` seconds at most.

        Raises KafkaException where the log is another: call `start` again.
        """
        self._producer.poll(0)
        for record in fetched(self._consumer, BATCH_RECORDS, wait_s):
            error = record.error()
            if error and error.code() == BrokerError._AUTO_OFFSET_RESET:  # noqa: SLF001 (its public name)
                raise KafkaException(error)
            if error is None and (found := Heartbeat.decode(record.value())):
                yield found

    def write(self, heartbeat: Heartbeat) -> None:
        """Write a standby's heartbeat, without waiting for it."""
        with suppress(BufferError):
            self._producer.produce(
                self._topic, heartbeat.encode(), heartbeat.name, partition=self._partition
            )

    def close(self) -> None:
        """Close the connections."""
        self._producer.purge()
        self._producer.flush(0)
        self._consumer.close()


class LeaderHeartbeats:
    """A leader's heartbeats, from its fence on. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        """Fence off those of any other process. Raises KafkaException."""
        self._topic, self._partition = leader_partition(settings)
        self._producer = _fencing_producer(settings)
        #: The heartbeat whose transaction has begun.
        self._begun: Written | None = None
        #: Whether a transaction has failed and is not aborted yet.
        self._is_failed = False

    def write(self, heartbeat: Heartbeat) -> Written | None:
        """Write a heartbeat, or go on with an earlier one; return the one that is done, if any.

        Raises Fenced.
        """
        try:
            return self._write(heartbeat)
        except KafkaException as error:
            self._on_error(error.args[0])
            return None

    def close(self) -> None:
        """Close the connection. Nothing is waited for."""
        self._producer.purge()

    def _write(self, heartbeat: Heartbeat) -> Written | None:
        if self._is_failed:
            self._abort()
        if self._begun is None:
            begun = Written(time.monotonic(), heartbeat)
            self._producer.begin_transaction()
            try:
                self._producer.produce(
                    self._topic, heartbeat.encode(), heartbeat.name, partition=self._partition
                )
            except (KafkaException, BufferError):
                # Without a record the client would commit by itself, and no broker would refuse it.
                self._is_failed = True
                return None
            self._begun = begun
        self._producer.commit_transaction(STEP_S)
        done, self._begun = self._begun, None
        return done

    def _on_error(self, error: BrokerError) -> None:
        """Have the next call go on with what is only slow, and abort what has failed."""
        if error.fatal() or error.code() == BrokerError._FENCED:  # noqa: SLF001 (its public name)
            raise Fenced(error.str())
        self._is_failed = self._is_failed or error.txn_requires_abort()

    def _abort(self) -> None:
        """Abort the transaction. Where a broker has died, several calls may be needed."""
        self._begun = None
        try:
            self._producer.abort_transaction(STEP_S)
        except KafkaException as error:
            if not error.args[0].retriable():
                raise Fenced(error.args[0].str()) from error
            raise
        self._is_failed = False


def _fencing_producer(settings: Settings) -> Producer:
    """Return a producer that has fenced off all that were before it. Raises KafkaException.

    Where the last one left a transaction open, the coordinator aborts that first, within
    milliseconds. A client asks again half a second later, and a new client at once.
    """
    topic, _ = leader_partition(settings)
    properties = librdkafka_properties(settings) | {"transactional.id": topic, "linger.ms": 0}
    for timeout_s in FENCE_TRIES_S:
        producer = Producer(properties, logger=_silent)
        # Without a connection, it asks for the coordinator half a second later.
        producer.list_topics(topic, timeout=FENCE_S)
        try:
            producer.init_transactions(timeout_s)
        except KafkaException as error:
            if timeout_s == FENCE_S or not error.args[0].retriable():
                raise
        else:
            break
    return producer


def leader_partition(settings: Settings) -> Partition:
    """Return the partition of the heartbeats."""
    return TopicNames(settings).leader, 0


class MemberReader:
    """Reads repeatedly who leads and who stands by. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._partition = leader_partition(settings)
        # One that was fenced off may have left a last heartbeat, which was never committed.
        self._reader = RangeReader(settings)

    def read(self, now_ms: int) -> tuple[Heartbeat | None, list[Heartbeat]]:
        """Return the last heartbeats of the leader, if there is one, and of the standbys.

        Raises KafkaError.
        """
        if not self._reader.exists(self._partition):
            return None, []
        start, end = self._reader.bounds(self._partition)
        tail = OffsetRange(*self._partition, max(start, end - TAIL), end)
        records = [(each.timestamp()[1], each.value()) for each in self._reader.records([tail])]
        heard = [(at_ms, found) for at_ms, value in records if (found := Heartbeat.decode(value))]
        return present_members(heard, now_ms)

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()


def present_members(
    heard: Sequence[tuple[int, Heartbeat]], now_ms: int
) -> tuple[Heartbeat | None, list[Heartbeat]]:
    """Return the same, given heartbeats in the log's order and when each was appended, epoch ms."""
    # The last, and not the greatest: a broker's clock may have been set back.
    latest_ms = heard[-1][0] if heard else 0
    if now_ms - latest_ms > (LONE_LEASE_S + SKEW_S) * 1_000:
        return None, []
    leads = [(at_ms, each) for at_ms, each in heard if each.lease_ms is not None]
    leader: Heartbeat | None = None
    if leads:
        at_ms, last = leads[-1]
        if last.lease_ms and latest_ms - at_ms <= LONE_LEASE_S * 1_000:
            leader = last
    last_of = {each.member: (at_ms, each) for at_ms, each in heard}
    standbys = [
        each
        for at_ms, each in last_of.values()
        if each.lease_ms is None and latest_ms - at_ms <= PRESENT_S * 1_000
    ]
    return leader, sorted(standbys, key=lambda each: each.name)
