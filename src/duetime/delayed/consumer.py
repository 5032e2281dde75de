"""A consumer of delayed topics, with confluent-kafka's manners and no Spark.

with DelayedConsumer({"bootstrap.servers": "127.0.0.1:9092", "group.id": "shop"}) as consumer:
    consumer.subscribe(["orders"])
    while (message := consumer.poll()) is not None:
        handle(message.value())

Two ways into the log: a member of the group reads the ends of its partitions, each record once, and
readers without a group fetch what was not kept. What is committed is the offset of the first record
that is not delivered, with the cursor as its metadata: other tools see a group like any other.
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

from duetime.clock import Clock, SystemClock
from duetime.delayed.log import Place
from duetime.delayed.member import Member
from duetime.delayed.message import DelayedMessage
from duetime.delayed.opening import Opening
from duetime.delayed.options import ConsumerOptions
from duetime.delayed.partition import DelayedPartition, Due, Position
from duetime.delayed.putting_off import PuttingOff
from duetime.errors import KafkaError

#: Called with the consumer and the partitions, as confluent-kafka does.
OnRebalance = Callable[["DelayedConsumer", list[TopicPartition]], None]

#: How many records of one partition are taken at a time, so that none starves another.
AT_ONCE = 200

#: The longest wait in one go, in seconds.
WAIT_S = 1.0

#: How often the client is served while there are records to be returned, in seconds: who does not
#: for `max.poll.interval.ms` is taken for dead, and loses its partitions.
SERVE_S = 1.0

#: How often the logs are read in one look, at most: with more than that, others wait too long.
LOOKS = 100

NO_NOTES: Mapping[Place, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a consumer has, and has met, in the partitions that it has now."""

    index_bytes: int
    index_entries: int
    kept_bytes: int
    #: Records that were read from the log once more, because they were not kept.
    read_again: int
    #: Records that retention has removed before they were delivered.
    removed: int


class DelayedConsumer:
    """Returns each record at or after its time, by (deliverAfter, offset) in each partition.

    `properties` are librdkafka's, and ours, which begin with `delayed.` (docs/delayed-topics.md).
    Not thread-safe. Errors of the cluster are raised as KafkaError; polling may go on after one.
    """

    def __init__(self, properties: Mapping[str, Any], *, clock: Clock | None = None) -> None:
        self._options = options = ConsumerOptions.of(properties)
        self._clock = clock or SystemClock()
        self._opening = Opening(options)
        self._putting_off = PuttingOff(options)
        self._partitions: dict[Place, DelayedPartition] = {}
        self._is_whole = True
        self._ready: deque[tuple[DelayedPartition, Due]] = deque()
        self._commits = options.auto_commit
        self._commit_ms = self._clock.now_ms() + options.auto_commit_ms
        #: As of when everything in the logs is known that had been fetched by then.
        self._known_ms = 0
        #: When the client was last served, by the monotonic clock.
        self._served_s = 0.0
        self._member = Member(options.librdkafka)

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: OnRebalance | None = None,
        on_revoke: OnRebalance | None = None,
        on_lost: OnRebalance | None = None,
    ) -> None:
        """Read these topics, sharing their partitions with the group."""

        def assign(partitions: list[TopicPartition]) -> None:
            self._assign(partitions)
            _call(on_assign, self, partitions)

        def revoke(partitions: list[TopicPartition]) -> None:
            try:
                if self._commits:
                    self.commit(asynchronous=False)
                _call(on_revoke, self, partitions)
            finally:
                # They are another's, whether or not that was committed.
                self._unassign(partitions)

        def lost(partitions: list[TopicPartition]) -> None:
            try:
                _call(on_lost or on_revoke, self, partitions)
            finally:
                self._unassign(partitions)

        self._member.subscribe(
            topics, assign=assign, revoke=revoke, lost=lost, committed=self._committed
        )

    def poll(self, timeout: float = -1) -> DelayedMessage | None:
        """The next record whose time has come, or None after so many seconds; -1 is for ever.

        Raises KafkaError.
        """
        if not self._is_whole:
            raise KafkaError(
                "a partition could not be opened: close this consumer, and open another"
            )
        self._commit_now_and_then()
        if self._ready and time.monotonic() - self._served_s > SERVE_S:
            self._read(0)
        begun_ms = self._clock.now_ms()
        until_ms = None if timeout < 0 else begun_ms + int(timeout * 1_000)
        while not self._ready:
            self._look()
            if self._ready:
                break
            now_ms = self._clock.now_ms()
            if until_ms is not None and now_ms >= until_ms:
                return None
            self._read(self._wait_s(now_ms, until_ms))
        return self._next()

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[DelayedMessage]:
        """Up to so many records: what is due by the time that the first one is, or none.

        Raises KafkaError where there is none yet; later, the next call does.
        """
        first = self.poll(timeout)
        found = [first] if first else []
        # Without looking for others: a rebalance would commit what nobody has been given yet.
        while found and len(found) < num_messages and self._is_ready():
            found.append(self._next())
        return found

    def commit(
        self,
        message: DelayedMessage | None = None,
        *,
        asynchronous: bool = True,
        notes: Mapping[Place, str] = NO_NOTES,
    ) -> None:
        """Commit what was returned so far, or up to this message; and what was put off.

        A note of yours is kept with a partition, until there is another one: see `notes`. Not
        waited for if it is asynchronous, except for what was put off. Raises KafkaError.
        """
        self._putting_off.flush()
        moved = {}
        for partition in self._partitions.values():
            if message is None or message.source is partition:
                position = partition.to_commit(
                    message.due if message else None, notes.get(partition.place)
                )
                if position is not None:
                    moved[partition] = position
        if moved:
            self._commit(moved, asynchronous=asynchronous)

    def notes(self) -> dict[Place, str]:
        """What was noted with the last commits."""
        return {place: each.note for place, each in self._partitions.items()}

    def assignment(self) -> list[TopicPartition]:
        """The partitions that this consumer has now."""
        return [TopicPartition(*place) for place in self._partitions]

    def metrics(self) -> Metrics:
        """Figures of the partitions that this consumer has now."""
        partitions = self._partitions.values()
        return Metrics(
            index_bytes=sum(each.index.nbytes for each in partitions),
            index_entries=sum(each.index.count for each in partitions),
            kept_bytes=self._opening.room.used_bytes,
            read_again=sum(each.payloads.read_again for each in partitions),
            removed=sum(each.payloads.removed for each in partitions),
        )

    def close(self) -> None:
        """Commit, if that is automatic, and leave the group. Safe to repeat."""
        try:
            if self._commits:
                self.commit(asynchronous=False)
            self._putting_off.flush()
        finally:
            self._member.close()
            self._let_go(list(self._partitions))
            self._opening.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an exception without a commit: the last record was perhaps not handled."""
        if kind is not None and issubclass(kind, Exception):
            self._commits = False
        self.close()

    def _commit(
        self, positions: Mapping[DelayedPartition, Position], *, asynchronous: bool
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
                partition.committed(Position.committed(each.offset, each.metadata or ""))

    def _next(self) -> DelayedMessage:
        partition, due = self._ready.popleft()
        partition.returned(due)
        return DelayedMessage(due, partition, self._put_off)

    def _put_off(self, message: DelayedMessage, retry_in: timedelta | None) -> None:
        self._putting_off.put_off(message.due.record, retry_in, self._clock.now_ms())

    def _is_ready(self) -> bool:
        """Whether there is another of those that are known."""
        if not self._ready:
            with suppress(KafkaError):
                self._take()
        return bool(self._ready)

    def _look(self) -> None:
        """Take what is due now, once the logs are read as they are now.

        What came in while this process stood still may be due before what it knew already.
        """
        self._known_ms = self._clock.now_ms()
        for _ in range(LOOKS):
            if not self._read(0):
                break
        self._take()

    def _take(self) -> None:
        for partition in self._partitions.values():
            if partition.next_ms() <= self._known_ms:
                for due in partition.take(self._known_ms, AT_ONCE):
                    self._ready.append((partition, due))

    def _wait_s(self, now_ms: int, until_ms: int | None) -> float:
        times = [each.next_ms() for each in self._partitions.values()]
        wait_ms = min([*times, now_ms + int(WAIT_S * 1_000)]) - now_ms
        if until_ms is not None:
            wait_ms = min(wait_ms, until_ms - now_ms)
        # Half a ms more: the client cuts what it is given to whole ms.
        return (max(wait_ms, 0) + 0.5) / 1_000

    def _read(self, wait_s: float) -> bool:
        """Tell the indexes what their logs have got, and whether there may be more at once.

        Rebalances happen in here.
        """
        self._served_s = time.monotonic()
        return self._member.read(wait_s, self._append)

    def _append(self, place: Place, records: list[Message]) -> None:
        if place in self._partitions:
            self._partitions[place].append(records, self._clock.now_ms())

    def _assign(self, partitions: list[TopicPartition]) -> None:
        # Until this is done: a partition that could not be opened would be passed over.
        self._is_whole = False
        committed = self._member.committed(partitions)
        now_ms = self._clock.now_ms()
        opened = [self._opening.open(each, now_ms) for each in committed]
        self._partitions |= {each.place: each for each in opened}
        # Whoever comes next would begin elsewhere, and pass over what waits until now.
        begun = [each for each, at in zip(opened, committed, strict=True) if at.offset < 0]
        if begun and not self._options.from_beginning:
            self._commit({each: each.position() for each in begun}, asynchronous=False)
        self._member.assign([TopicPartition(*each.place, each.index.end) for each in opened])
        self._is_whole = True

    def _unassign(self, partitions: list[TopicPartition]) -> None:
        self._let_go((each.topic, each.partition) for each in partitions)
        self._member.unassign(partitions)

    def _let_go(self, places: Iterable[Place]) -> None:
        gone = [self._partitions.pop(each) for each in places if each in self._partitions]
        self._ready = deque(each for each in self._ready if each[0] not in gone)
        for each in gone:
            each.close()

    def _commit_now_and_then(self) -> None:
        now_ms = self._clock.now_ms()
        if self._commits and now_ms >= self._commit_ms:
            self._commit_ms = now_ms + self._options.auto_commit_ms
            self.commit()


def _call(
    callback: OnRebalance | None, consumer: DelayedConsumer, partitions: list[TopicPartition]
) -> None:
    if callback is not None:
        callback(consumer, partitions)
