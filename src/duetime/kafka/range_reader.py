"""Reads exact ranges of offsets without Spark, parses pending records, finds open transactions."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime.core import headers as H
from duetime.core.errors import InvalidMessage, KafkaError
from duetime.core.messages import MessageId, PendingMessage, Retry, SortKey
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import TIMEOUT_S, AnswerT, OffsetRange, Offsets, Partition, answer

#: Properties of a consumer that reads exact ranges of offsets, and commits nothing.
READS_RANGES = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Records that are settled or removed while they are read are gone: go on with the next ones.
    "auto.offset.reset": "earliest",
    # The only sign that nothing of a range is left, where a transaction's marker is last.
    "enable.partition.eof": True,
    # A fetch at the end of one range would hold up the first of the next.
    "fetch.wait.max.ms": 10,
    # Between two ranges, a client fetches until its queue is full. It would go on a second later,
    # also at another offset.
    "fetch.queue.backoff.ms": 5,
}

#: Bytes that are fetched of a partition at a time: the client's default.
FETCH_BYTES = 1024 * 1024

#: The most records taken from the client at a time.
BATCH_RECORDS = 2_000

#: How long one fetch waits, in seconds.
FETCH_S = 0.2

#: Partitions whose bounds are requested at a time.
CONCURRENT_REQUESTS = 8

#: The rough size of a record in Python besides its bytes.
OBJECT_BYTES = 1_000


@dataclass(slots=True)
class PendingHeaders:
    """The headers of a pending record: a message, or the cancel of one."""

    id: MessageId
    #: None for a cancel.
    topic: str | None
    partition: int | None
    #: The cluster that it is for; None is this one.
    cluster: str | None
    #: Epoch ms; None is never.
    expires_ms: int | None
    #: When it was to be delivered first, epoch ms; of the cancel of a retry, when that is.
    at_ms: int
    #: None before its first attempt.
    retry: Retry | None

    def pending_message(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[H.Header],
        *,
        cancelled: bool = False,
    ) -> PendingMessage:
        """Return the pending message of a record with these headers, among them the sender's."""
        return PendingMessage(
            id=self.id,
            topic=self.topic or "",
            partition=self.partition,
            cluster=self.cluster,
            expires_ms=self.expires_ms,
            key=key,
            value=value,
            headers=headers[len(H.SCHEDULED) :],
            cancelled=cancelled,
            retry=self.retry,
        )


@dataclass(slots=True)
class Entry(PendingHeaders):
    """A pending record of the wheel."""

    offset: int
    record: Message

    @property
    def due_ms(self) -> int:
        """When it is delivered, epoch ms: its time, or its next attempt."""
        return self.retry.at_ms if self.retry else self.at_ms

    @property
    def sort_key(self) -> SortKey:
        """The key by which it is listed; of a cancel, that of its message."""
        return SortKey.of(str(self.id), self.due_ms)

    @property
    def size_bytes(self) -> int:
        """Its rough size in memory."""
        return len(self.record.key() or b"") + len(self.record.value() or b"") + OBJECT_BYTES

    def to_message(self, *, cancelled: bool = False) -> PendingMessage:
        """Return the pending message."""
        record = self.record
        headers = headers_of(record)
        return self.pending_message(record.key(), record.value(), headers, cancelled=cancelled)


def entry(record: Message) -> Entry | None:
    """Parse a pending record; None where it is a foreign one."""
    parts = _parse(headers_of(record))
    return Entry(*parts, record.offset() or 0, record) if parts else None


def address(headers: Sequence[H.Header]) -> PendingHeaders | None:
    """Parse headers that begin with H.SCHEDULED; None where they do not."""
    parts = _parse(headers)
    return PendingHeaders(*parts) if parts else None


_Parts = tuple[MessageId, str | None, int | None, str | None, int | None, int, Retry | None]


def _parse(headers: Sequence[H.Header]) -> _Parts | None:
    """Return the fields of PendingHeaders."""
    first = headers[: len(H.SCHEDULED)]
    if tuple(name for name, _ in first) != H.SCHEDULED:
        return None
    try:
        texts = (None if value is None else value.decode() for _, value in first)
        topic, partition, state, at, name = texts
        identity = MessageId.parse(name or "")
        expires, retry = state_part(state, "expires"), state_part(state, "retry")
        attempts, failed = state_part(state, "attempts") or 0, state_part(state, "failed") or 0
        return (
            identity,
            topic,
            None if partition is None else int(partition),
            state_part(state, "cluster"),
            None if expires is None else int(expires),
            identity.due_ms if at is None else int(at),
            Retry(int(retry), int(attempts), int(failed)) if retry else None,
        )
    except (InvalidMessage, ValueError):
        return None


def state_part(state: str | None, name: str) -> str | None:
    """Return a part of a DUE_STATE header by its name in STATE; None where it is missing."""
    parts = (state or "").split(":")
    position = H.STATE.index(name)
    return (parts[position] or None) if len(parts) > position else None


def headers_of(record: Message) -> list[H.Header]:
    """Return a record's headers, in order."""
    # The client takes headers in many forms, and gives them in this one.
    return cast("list[H.Header]", record.headers() or [])


class LogReader:
    """A consumer that reads exact ranges of partitions, and commits nothing.

    Methods raise KafkaError.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """`properties` are librdkafka's, for the cluster."""
        self._consumer = Consumer(
            {"group.id": "duetime.delayed.reader"} | dict(properties) | READS_RANGES
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()

    def partitions(self, topic: str) -> list[Partition]:
        """Return the partitions of the topic."""
        found = _asked(lambda: self._consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic])
        if found.error is not None:
            raise _unreadable(found.error)
        return [(topic, partition) for partition in found.partitions]

    def exists(self, place: Partition) -> bool:
        """Return whether the cluster has this partition."""
        found = _asked(lambda: self._consumer.list_topics(timeout=TIMEOUT_S).topics).get(place[0])
        return found is not None and place[1] in found.partitions

    def bounds(self, place: Partition) -> tuple[int, int]:
        """Return the first offset that is still there, and that of the next record."""
        asked = TopicPartition(*place)
        return _asked(lambda: self._consumer.get_watermark_offsets(asked, timeout=TIMEOUT_S))

    def all_bounds(self, places: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
        """Return the bounds of several partitions, requested concurrently."""
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            return dict(zip(places, pool.map(self.bounds, places), strict=True))

    def batches(self, place: Partition, start: int, end: int) -> Iterator[list[Message]]:
        """Yield the remaining records from `start` up to, not including, `end`."""
        return (records for _, records in self.all_batches({place: (start, end)}))

    def all_batches(
        self, ranges: Mapping[Partition, tuple[int, int]]
    ) -> Iterator[tuple[Partition, list[Message]]]:
        """Yield the records of ranges of several partitions, fetched together."""
        ends = {place: end for place, (start, end) in ranges.items() if start < end}
        self._consumer.assign([TopicPartition(*place, ranges[place][0]) for place in ends])
        while ends:
            batches: dict[Partition, list[Message]] = {}
            for record in self._fetch():
                place = record.topic() or "", record.partition() or 0
                end, offset = ends.get(place, 0), record.offset() or 0
                # At a partition's end comes an event; before it, where a transaction is open.
                if record.error() or offset >= end - 1:
                    ends.pop(place, None)
                if not record.error() and offset < end:
                    batches.setdefault(place, []).append(record)
            yield from batches.items()

    def _fetch(self) -> list[Message]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            records = fetched(self._consumer, BATCH_RECORDS, FETCH_S)
            for error in filter(None, (record.error() for record in records)):
                if error.code() != BrokerError._PARTITION_EOF:  # noqa: SLF001 (its public name)
                    raise _unreadable(error)
            if records:
                return records
        raise KafkaError(f"Kafka gave no record for {TIMEOUT_S:.0f} s: is the broker up?")


class RangeReader(LogReader):
    """A reader of the wheel's topics: their records, and the pending messages in them."""

    def __init__(
        self,
        settings: Settings,
        *,
        committed_only: bool = True,
        group: str | None = None,
        fetch_bytes: int = FETCH_BYTES,
    ) -> None:
        """Connect; `group` is needed for `committed` alone.

        `fetch_bytes` are fetched at a time: of single records here and there, most of it in vain.
        """
        isolation = "read_committed" if committed_only else "read_uncommitted"
        super().__init__(
            librdkafka_properties(settings)
            | {"group.id": group or TopicNames(settings).reader_group, "isolation.level": isolation}
            | {"fetch.message.max.bytes": fetch_bytes}
        )
        #: Topics whose leaders the client knows.
        self._known = set[str]()

    def entries(self, ranges: Sequence[OffsetRange]) -> Iterator[Entry]:
        """Yield the pending records of these ranges, in order of offset within each."""
        for record in self.records(ranges):
            if (found := entry(record)) is not None:
                yield found

    def entries_of(self, id: MessageId, ranges: Sequence[OffsetRange]) -> Iterator[Entry]:  # noqa: A002 (its public name)
        """Yield the pending records with this id. Three times as fast: others are not parsed."""
        own = (H.DUE_ID, str(id).encode())
        for record in self.records(ranges):
            if own in headers_of(record)[: len(H.SCHEDULED)] and (found := entry(record)):
                yield found

    def records(self, ranges: Sequence[OffsetRange]) -> Iterator[Message]:
        """Yield all records of these ranges, except those of open transactions."""
        for topic in {each.topic for each in ranges} - self._known:
            # Once it is connected, the client looks for a leader a second after it is assigned.
            answer(partial(self._consumer.list_topics, topic, timeout=TIMEOUT_S))
            self._known.add(topic)
        wanted = {each.place: (each.start, each.end) for each in ranges}
        for _, records in self.all_batches(wanted):
            yield from records

    def committed(self, place: Partition) -> int | None:
        """Return what the group has committed for the partition, if anything. Raises KafkaError."""
        asked = [TopicPartition(*place)]
        (found,) = answer(lambda: self._consumer.committed(asked, timeout=TIMEOUT_S))
        if found.error is not None:
            raise KafkaError(f"Kafka did not answer about offsets ({found.error.str()})")
        return None if found.offset < 0 else int(found.offset)


def fetched(consumer: Consumer, limit: int, wait_s: float) -> list[Message]:
    """Return up to `limit` records that the client has fetched, once there is a first one.

    Returns none after `wait_s` seconds. `Consumer.consume` would wait for all of them.
    """
    first = consumer.poll(wait_s)
    return [] if first is None else [first, *consumer.consume(limit - 1, 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """The oldest open transaction in a partition."""

    topic: str
    partition: int
    #: When its first record was appended, epoch ms.
    since_ms: int


def open_transactions(
    settings: Settings, offsets: Offsets, topics: Iterable[str]
) -> list[OpenTransaction]:
    """Return the oldest open transaction of each partition. Raises KafkaError, Unreadable.

    No broker is asked for its list of transactions: the last stable offset of a partition is the
    first record of its oldest open transaction, or the end of the partition.
    """
    places = [place for topic in topics for place in offsets.readable_partitions(topic)]
    # The ends first: a record that is appended between the two is in no open transaction.
    ends = offsets.ends(places)
    stable = offsets.ends(places, committed_only=True)
    firsts = [
        OffsetRange(*place, first, first + 1)
        for place, first in stable.items()
        if first < ends[place]
    ]
    if not firsts:
        return []
    with RangeReader(settings, committed_only=False) as reader:
        return [
            OpenTransaction(
                topic=record.topic() or "",
                partition=record.partition() or 0,
                since_ms=record.timestamp()[1],
            )
            for record in reader.records(firsts)
        ]


def remedy(topic: str, transactional: str) -> str:
    """Return what an open transaction in this intake topic means, and what to do."""
    if topic == transactional:
        return (
            "later records of that partition wait for its end: end it, or abort it with "
            "kafka-transactions.sh where its producer is gone"
        )
    return (
        "intake does not wait for its end there, and delivers its records also if it is aborted: "
        f"send records of transactions to {transactional}"
    )


def _asked(ask: Callable[[], AnswerT]) -> AnswerT:
    try:
        return ask()
    except KafkaException as error:
        raise _unreadable(error.args[0]) from error


def _unreadable(error: BrokerError) -> KafkaError:
    return KafkaError(f"Kafka could not be read ({error.str()}): is the broker up?")
