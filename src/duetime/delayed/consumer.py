"""A consumer of delayed topics, with confluent-kafka's interface and without Spark.

with DelayedConsumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "shop"}) as consumer:
    consumer.subscribe(["orders"])
    while (message := consumer.poll()) is not None:
        handle(message.value())

There are two ways into the log: a member of the group reads the ends of its partitions, each record
once, and readers without a group fetch what is not cached. The offset committed is that of the
first record that is not delivered, with the cursor as its metadata: other tools see a normal group.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Self

from confluent_kafka import Message, TopicPartition

from duetime.core import headers as H
from duetime.core.clock import Clock, SystemClock
from duetime.core.errors import KafkaError
from duetime.delayed.group import ConsumerOptions, DeliveryAttempts, RetryProducer
from duetime.delayed.partition import (
    CommittedPosition,
    DelayedPartition,
    DueRecord,
    PartitionOpener,
)
from duetime.kafka.consumer_group import GroupMember
from duetime.kafka.offsets import Partition
from duetime.kafka.range_reader import headers_of

#: Called with the consumer and the partitions, as confluent-kafka does.
OnRebalance = Callable[["DelayedConsumer", list[TopicPartition]], None]

#: Records of one partition taken at a time, so that none starves another.
BATCH = 200

#: The longest wait for the client, in seconds.
MAX_WAIT_S = 1.0

#: Interval in seconds at which the client is polled while records are ready: a client that is not
#: polled for `max.poll.interval.ms` loses its partitions.
SERVE_S = 1.0

#: The most fetches in one check of the logs: with more than that, due records wait too long.
MAX_FETCHES = 100

NO_NOTES: Mapping[Partition, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of the partitions that a consumer is assigned."""

    index_bytes: int
    index_entries: int
    #: Bytes of cached records.
    kept_bytes: int
    #: Records that were read from the log again, because they were not cached.
    read_again: int
    #: Records that retention removed before they were delivered.
    removed: int


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A due record: confluent-kafka's Message, with its due time, attempts and `nack`."""

    due: DueRecord
    source: DelayedPartition
    #: Retries the message after a delay, or after the backoff.
    retry: Callable[["DelayedMessage", timedelta | None], None]

    @property
    def deliver_after_ms(self) -> int:
        """When the record was due, epoch ms; 0 is at once."""
        return self.due.deliver_after_ms

    @property
    def attempts(self) -> int:
        """The number of failed attempts before this one."""
        return DeliveryAttempts.of(self.due.record).attempts

    def nack(self, retry_in: timedelta | None = None) -> None:
        """Retry the message after `retry_in`, or after a backoff that doubles each time.

        The retry is another record of the same partition, for this group alone; after the last
        attempt it is a dead letter. It is safe once `commit` has returned, which waits for it.
        """
        self.retry(self, retry_in)

    def topic(self) -> str:
        """Return the delayed topic."""
        return self.due.record.topic() or ""

    def partition(self) -> int:
        """Return the partition."""
        return self.due.record.partition() or 0

    def offset(self) -> int:
        """Return the offset: not ascending, because records come in the order of due times."""
        return self.due.record.offset() or 0

    def key(self) -> bytes | None:
        """Return the key."""
        return self.due.record.key()

    def value(self) -> bytes | None:
        """Return the value."""
        return self.due.record.value()

    def headers(self) -> list[H.Header]:
        """Return all headers, in order; an empty list if there are none."""
        return headers_of(self.due.record)

    def timestamp(self) -> tuple[int, int]:
        """Return the type of the timestamp and the timestamp, as confluent-kafka does."""
        return self.due.record.timestamp()

    def error(self) -> None:
        """Return None: errors are raised by `poll`."""


class DelayedConsumer:
    """Returns each record at or after its time, by (deliverAfter, offset) in each partition.

    `properties` are librdkafka's, and those that begin with `delayed.` (docs/delayed-topics.md).
    Not thread-safe. Errors of the cluster are raised as KafkaError; polling may continue after one.
    """

    def __init__(self, properties: Mapping[str, Any], *, clock: Clock | None = None) -> None:
        self._options = options = ConsumerOptions.of(properties)
        self._clock = clock or SystemClock()
        self._opener = PartitionOpener(options)
        self._retries = RetryProducer(options)
        self._partitions: dict[Partition, DelayedPartition] = {}
        #: False while partitions are being opened, and after that has failed.
        self._is_open = True
        self._ready: deque[tuple[DelayedPartition, DueRecord]] = deque()
        self._auto_commits = options.auto_commit
        self._commit_ms = self._clock.now_ms() + options.auto_commit_ms
        #: Everything that was in the logs at this time is known.
        self._known_ms = 0
        #: When the client was last polled, by the monotonic clock.
        self._served_s = 0.0
        self._member = GroupMember(options.librdkafka)

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: OnRebalance | None = None,
        on_revoke: OnRebalance | None = None,
        on_lost: OnRebalance | None = None,
    ) -> None:
        """Read these topics, sharing their partitions with the group."""

        def call(callback: OnRebalance | None, partitions: list[TopicPartition]) -> None:
            if callback is not None:
                callback(self, partitions)

        def assign(partitions: list[TopicPartition]) -> None:
            self._assign(partitions)
            call(on_assign, partitions)

        def revoke(partitions: list[TopicPartition]) -> None:
            try:
                if self._auto_commits:
                    self.commit(asynchronous=False)
                call(on_revoke, partitions)
            finally:
                # Another member has them, whether or not the commit succeeded.
                self._unassign(partitions)

        def lost(partitions: list[TopicPartition]) -> None:
            try:
                call(on_lost or on_revoke, partitions)
            finally:
                self._unassign(partitions)

        self._member.subscribe(
            topics, assign=assign, revoke=revoke, lost=lost, committed=self._committed
        )

    def poll(self, timeout: float = -1) -> DelayedMessage | None:
        """Return the next due record, or None after `timeout` seconds; -1 is no limit.

        Raises KafkaError.
        """
        if not self._is_open:
            raise KafkaError(
                "a partition could not be opened: close this consumer, and create another"
            )
        now_ms = self._clock.now_ms()
        if self._auto_commits and now_ms >= self._commit_ms:
            self._commit_ms = now_ms + self._options.auto_commit_ms
            self.commit()
        if self._ready and time.monotonic() - self._served_s > SERVE_S:
            self._read(0)
        until_ms = None if timeout < 0 else self._clock.now_ms() + int(timeout * 1_000)
        while not self._ready:
            self._read_and_take()
            if self._ready:
                break
            now_ms = self._clock.now_ms()
            if until_ms is not None and now_ms >= until_ms:
                return None
            self._read(self._wait_s(now_ms, until_ms))
        return self._next()

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[DelayedMessage]:
        """Return up to `num_messages` records that are due when the first one is, or none.

        Raises KafkaError if there is no first one; after it, the next call raises it.
        """
        first = self.poll(timeout)
        found = [first] if first else []
        # Without a fetch: a rebalance in it would commit records that are not returned yet.
        while found and len(found) < num_messages and self._has_ready():
            found.append(self._next())
        return found

    def commit(
        self,
        message: DelayedMessage | None = None,
        *,
        asynchronous: bool = True,
        notes: Mapping[Partition, str] = NO_NOTES,
    ) -> None:
        """Commit everything returned, or everything up to this message, once retries are sent.

        A note is stored with its partition until the next one: see `notes`. An asynchronous commit
        waits for retries only. Raises KafkaError.
        """
        self._retries.flush()
        moved = {}
        for partition in self._partitions.values():
            if message is None or message.source is partition:
                due = message.due if message else None
                position = partition.to_commit(due, notes.get(partition.place))
                if position is not None:
                    moved[partition] = position
        if moved:
            self._commit(moved, asynchronous=asynchronous)

    def notes(self) -> dict[Partition, str]:
        """Return the notes of the last commits."""
        return {place: each.note for place, each in self._partitions.items()}

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions assigned to this consumer."""
        return [TopicPartition(*place) for place in self._partitions]

    def metrics(self) -> Metrics:
        """Return figures of the assigned partitions."""
        partitions = self._partitions.values()
        return Metrics(
            index_bytes=sum(each.index.nbytes for each in partitions),
            index_entries=sum(each.index.count for each in partitions),
            kept_bytes=self._opener.budget.used_bytes,
            read_again=sum(each.cache.read_again for each in partitions),
            removed=sum(each.cache.removed for each in partitions),
        )

    def close(self) -> None:
        """Commit, if that is automatic, and leave the group. Safe to repeat."""
        try:
            if self._auto_commits:
                self.commit(asynchronous=False)
            self._retries.flush()
        finally:
            self._member.close()
            self._drop(list(self._partitions))
            self._opener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception without a commit: the last record may be unhandled."""
        if kind is not None and issubclass(kind, Exception):
            self._auto_commits = False
        self.close()

    def _next(self) -> DelayedMessage:
        partition, due = self._ready.popleft()
        partition.returned(due)
        return DelayedMessage(due, partition, self._retry)

    def _retry(self, message: DelayedMessage, retry_in: timedelta | None) -> None:
        self._retries.retry(message.due.record, retry_in, self._clock.now_ms())

    def _has_ready(self) -> bool:
        if not self._ready:
            with suppress(KafkaError):
                self._take()
        return bool(self._ready)

    def _read_and_take(self) -> None:
        """Take what is due now, once the logs are read up to their present ends.

        Records that arrived while this process was paused may be due before those it knew.
        """
        self._known_ms = self._clock.now_ms()
        for _ in range(MAX_FETCHES):
            if not self._read(0):
                break
        self._take()

    def _read(self, wait_s: float) -> bool:
        """Append what the logs have next; return whether there may be more at once.

        Rebalances happen in here.
        """
        self._served_s = time.monotonic()
        return self._member.read(wait_s, self._append)

    def _append(self, place: Partition, records: list[Message]) -> None:
        if place in self._partitions:
            self._partitions[place].append(records, self._clock.now_ms())

    def _take(self) -> None:
        for partition in self._partitions.values():
            if partition.next_ms() <= self._known_ms:
                for due in partition.take(self._known_ms, BATCH):
                    self._ready.append((partition, due))

    def _wait_s(self, now_ms: int, until_ms: int | None) -> float:
        times = [each.next_ms() for each in self._partitions.values()]
        if until_ms is not None:
            times.append(until_ms)
        wait_ms = min([*times, now_ms + int(MAX_WAIT_S * 1_000)]) - now_ms
        # Half a ms more: the client truncates it to whole ms.
        return (max(wait_ms, 0) + 0.5) / 1_000

    def _commit(
        self, positions: Mapping[DelayedPartition, CommittedPosition], *, asynchronous: bool
    ) -> None:
        offsets = [
            TopicPartition(*partition.place, at.offset, metadata=at.metadata)
            for partition, at in positions.items()
        ]
        self._member.commit(offsets, asynchronous=asynchronous)
        if not asynchronous:
            self._committed(offsets)

    def _committed(self, offsets: Iterable[TopicPartition]) -> None:
        for each in offsets:
            if partition := self._partitions.get((each.topic, each.partition)):
                partition.committed(CommittedPosition.parse(each.offset, each.metadata or ""))

    def _assign(self, partitions: list[TopicPartition]) -> None:
        # Until all are open: without this, one that fails would be skipped silently.
        self._is_open = False
        committed = self._member.committed(partitions)
        now_ms = self._clock.now_ms()
        opened = [
            self._opener.open((each.topic, each.partition), self._opener.position(each), now_ms)
            for each in committed
        ]
        self._partitions |= {each.place: each for each in opened}
        # Without a commit, the next member would begin at a later end, and skip what is pending.
        begun = [each for each, at in zip(opened, committed, strict=True) if at.offset < 0]
        if begun and not self._options.from_beginning:
            self._commit({each: each.position() for each in begun}, asynchronous=False)
        self._member.assign([TopicPartition(*each.place, each.index.end) for each in opened])
        self._is_open = True

    def _unassign(self, partitions: list[TopicPartition]) -> None:
        self._drop((each.topic, each.partition) for each in partitions)
        self._member.unassign(partitions)

    def _drop(self, places: Iterable[Partition]) -> None:
        gone = [self._partitions.pop(each) for each in places if each in self._partitions]
        self._ready = deque(each for each in self._ready if each[0] not in gone)
        for each in gone:
            each.cache.clear()
