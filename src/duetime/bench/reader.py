"""Reading what came out: how late each message was by the broker's stamp, not the reader's pace.

Read after a run, so that the reader does not compete with what is measured. But what is delivered
in a transaction is stamped before it ends: that is read while it comes.
"""

import threading
import time
import uuid
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaException,
    Message,
    TopicPartition,
)

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError, KafkaError
from duetime.message import DUE_AT_MS, DUE_ID

#: Records fetched at a time.
BATCH = 5_000

#: How often is looked whether there are more, in seconds.
LOOK_S = 0.1

#: How long records that exist may take to come, in seconds.
PATIENCE_S = 20.0


@dataclass(slots=True)
class Arrivals:
    """Every record of some destinations; element n of both arrays is the same record."""

    due_ms: "array[int]" = field(default_factory=lambda: array("q"))
    #: Append time minus due; negative is early.
    late_ms: "array[int]" = field(default_factory=lambda: array("q"))
    ids: set[str | bytes | None] = field(default_factory=set)

    def add(self, due_ms: int, late_ms: int, message_id: str | bytes | None) -> None:
        """One more record."""
        self.due_ms.append(due_ms)
        self.late_ms.append(late_ms)
        self.ids.add(message_id)


def read_arrivals(settings: Settings, topics: Sequence[str]) -> Arrivals:
    """All that the topics hold now.

    Raises ConfigError where the sender and not the broker stamps the records, and KafkaError where
    they do not come.
    """
    consumer = Consumer(
        librdkafka_properties(settings)
        | {"group.id": f"{settings.namespace}.bench", "enable.auto.commit": False}
    )
    try:
        return _read(consumer, topics)
    except KafkaException as error:
        raise KafkaError(
            f"Kafka did not answer ({error.args[0].str()}): is the broker up?"
        ) from error
    finally:
        consumer.close()


class CommittedReader:
    """Reads destinations while they fill, as a consumer of committed records: `arrivals`.

    How late one is says this machine's clock. Topics may be created later.
    """

    def __init__(self, settings: Settings, topics: Sequence[str]) -> None:
        self.arrivals = Arrivals()
        self._consumer = Consumer(
            librdkafka_properties(settings)
            | {"group.id": f"{settings.namespace}.bench-{uuid.uuid4().hex}"}
            | {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
            | {"isolation.level": "read_committed", "topic.metadata.refresh.interval.ms": 500}
        )
        self._consumer.subscribe(list(topics))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._consumer.close()

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Whether at least so many came within the time."""
        deadline = time.monotonic() + timeout_s
        while len(self.arrivals.late_ms) < count and time.monotonic() < deadline:
            self._stopping.wait(LOOK_S)
        return len(self.arrivals.late_ms) >= count

    def _read(self) -> None:
        while not self._stopping.is_set():
            first = self._consumer.poll(LOOK_S)
            messages = [first, *self._consumer.consume(BATCH - 1, 0)] if first else []
            now_ms = time.time_ns() // 1_000_000
            for message in messages:
                # Of a topic that is not there yet.
                if not message.error():
                    headers = dict(message.headers() or ())
                    due_ms = int(headers[DUE_AT_MS] or b"")
                    self.arrivals.add(due_ms, now_ms - due_ms, headers[DUE_ID])


def _read(consumer: Consumer, topics: Sequence[str]) -> Arrivals:
    starts, left = _assignment(consumer, topics)
    consumer.assign(starts)
    arrivals = Arrivals()
    while left > 0:
        messages = consumer.consume(min(BATCH, left), timeout=PATIENCE_S)
        if not messages:
            raise KafkaError(
                f"{left} records of {', '.join(topics)} did not come: is the broker up?"
            )
        left -= len(messages)
        _note(messages, arrivals)
    return arrivals


def _assignment(consumer: Consumer, topics: Sequence[str]) -> tuple[list[TopicPartition], int]:
    """Where to begin in each partition, and how many records there are."""
    starts, count = [], 0
    for topic in topics:
        partitions = consumer.list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions
        for partition in partitions:
            place = TopicPartition(topic, partition)
            start, end = consumer.get_watermark_offsets(place, timeout=PATIENCE_S)
            starts.append(TopicPartition(topic, partition, start))
            count += end - start
    return starts, count


def _note(messages: Iterable[Message], arrivals: Arrivals) -> None:
    for message in messages:
        error = message.error()
        if error:
            raise KafkaException(error)
        kind, appended_ms = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            raise ConfigError(
                f"topic {message.topic()} keeps its senders' timestamps, so lateness cannot be "
                "measured: set message.timestamp.type to LogAppendTime"
            )
        headers = dict(message.headers() or ())
        due_ms = int(headers[DUE_AT_MS] or b"")
        arrivals.add(due_ms, appended_ms - due_ms, headers[DUE_ID])
