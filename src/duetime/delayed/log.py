"""Reading one partition's log by offset, and what its records say about their time."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime.delayed.entries import Entries, entries_of
from duetime.errors import KafkaError
from duetime.message import DELIVER_AFTER_MS, DELIVER_GROUP
from duetime.stores.records import READS_RANGES, headers_of

#: A consumer's properties, as confluent-kafka takes them.
Properties = Mapping[str, Any]

#: A partition of a topic.
Place = tuple[str, int]

#: The most records taken from the client at a time.
BATCH = 2_000

#: How long the broker may take to give the next record, in seconds.
TIMEOUT_S = 20.0

#: How long one wait for it is, in seconds.
WAIT_S = 0.2

#: Partitions whose bounds are asked for at a time.
AT_ONCE_ASKED = 8

#: Ranges that are so many offsets apart, or less, are read as one: another fetch costs as much as
#: some hundred records.
GAP = 500

#: When a record without the header is to be delivered: at once, and so before all others.
AT_ONCE = 0

#: The most digits that a time may have: it cannot overflow then.
DIGITS = 18


class LogReader:
    """Reads stretches of partitions, one after another; commits nothing. Raises KafkaError."""

    def __init__(self, properties: Properties) -> None:
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

    def places(self, topic: str) -> list[Place]:
        """The topic's partitions."""
        try:
            found = self._consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic]
        except KafkaException as error:
            raise _unreadable(error.args[0]) from error
        if found.error is not None:
            raise _unreadable(found.error)
        return [(topic, partition) for partition in found.partitions]

    def bounds(self, place: Place) -> tuple[int, int]:
        """The first offset that there still is, and the one that the next record will get."""
        try:
            first, end = self._consumer.get_watermark_offsets(
                TopicPartition(*place), timeout=TIMEOUT_S
            )
        except KafkaException as error:
            raise _unreadable(error.args[0]) from error
        return first, end

    def all_bounds(self, places: Sequence[Place]) -> dict[Place, tuple[int, int]]:
        """The same of several partitions, asked for at once: each answer takes as long as all."""
        with ThreadPoolExecutor(AT_ONCE_ASKED) as pool:
            return dict(zip(places, pool.map(self.bounds, places), strict=True))

    def batches(self, place: Place, start: int, end: int) -> Iterator[list[Message]]:
        """The records from `start` up to, not including, `end`, as far as they are there."""
        for _, records in self.all_batches({place: (start, end)}):
            yield records

    def all_batches(
        self, stretches: Mapping[Place, tuple[int, int]]
    ) -> Iterator[tuple[Place, list[Message]]]:
        """The same of stretches of several partitions, fetched together."""
        left = {place: end for place, (start, end) in stretches.items() if start < end}
        self._consumer.assign([TopicPartition(*place, stretches[place][0]) for place in left])
        while left:
            for place, found in _by_place(self._next()).items():
                if place not in left:
                    continue
                records, is_over = _cut(found, left[place])
                if records:
                    yield place, records
                if is_over:
                    del left[place]

    def _next(self) -> list[Message]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            record = self._consumer.poll(WAIT_S)
            if record is not None:
                # Waits for nothing: what has been fetched is there.
                return [record, *self._consumer.consume(BATCH, 0)]
        raise KafkaError(f"Kafka gave no record for {TIMEOUT_S:.0f} s: is the broker up?")


def merged(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges, end not included, that hold these ascending offsets: near ones together."""
    start = last = None
    for offset in offsets:
        if start is None or last is None:
            start = offset
        elif offset - last > GAP:
            yield start, last + 1
            start = offset
        last = offset
    if start is not None and last is not None:
        yield start, last + 1


def entries(
    records: Iterable[Message], group: str | None, longest_ms: int | None = None
) -> Entries:
    """When each of these is to be delivered; without what was put off for another group.

    What would wait for longer than the longest is to be delivered at once.
    """
    times, offsets = [], []
    for record in records:
        time_ms = deliver_after_ms(record, group)
        if time_ms is not None:
            over = longest_ms is not None and delay_ms(record, time_ms) > longest_ms
            times.append(AT_ONCE if over else time_ms)
            offsets.append(record.offset() or 0)
    return entries_of(times, offsets)


def delay_ms(record: Message, time_ms: int) -> int:
    """How long after its own timestamp a record is to be delivered."""
    return time_ms - record.timestamp()[1]


def deliver_after_ms(record: Message, group: str | None) -> int | None:
    """When the record is to be delivered to this group; None is never.

    Of several headers the last counts. What is no number of milliseconds is as good as no header.
    """
    found = AT_ONCE
    for name, value in headers_of(record):
        if name == DELIVER_AFTER_MS:
            found = _whole_number(value)
        elif name == DELIVER_GROUP and value != (group or "").encode():
            return None
    return found


def _whole_number(text: bytes | None) -> int:
    return int(text) if text and len(text) <= DIGITS and text.isdigit() else AT_ONCE


def _by_place(records: Iterable[Message]) -> dict[Place, list[Message]]:
    """The records, and the signs that a partition has no more, of each partition."""
    found: dict[Place, list[Message]] = {}
    for record in records:
        error = record.error()
        if error is not None and error.code() != BrokerError._PARTITION_EOF:  # noqa: SLF001 (its public name)
            raise _unreadable(error)
        found.setdefault((record.topic() or "", record.partition() or 0), []).append(record)
    return found


def _cut(records: list[Message], end: int) -> tuple[list[Message], bool]:
    """Those before the end, and whether nothing more is to be expected."""
    kept: list[Message] = []
    for record in records:
        offset = record.offset() or 0
        if record.error() is not None or offset >= end:
            return kept, True
        kept.append(record)
        if offset == end - 1:
            return kept, True
    return kept, False


def _unreadable(error: BrokerError) -> KafkaError:
    return KafkaError(f"a delayed topic could not be read ({error.str()}): is the broker up?")
