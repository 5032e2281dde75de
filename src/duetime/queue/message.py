"""A message of a queue, and the markers of who processes it, and until when. Their bytes are kmq's.

    key      int32 partition, int64 offset of the message, big-endian
    value    1, int64 timeout in ms      start marker: processing begins
             0                           end marker: processing is complete
             anything else               ignored

A marker is written to the partition of its message, so the last marker of a message is the valid
one: another start marker replaces the timeout, an end marker ends it. Source: kmq's MarkerKey,
StartMarker, EndMarker and DefaultRedeliverer; tests/support/golden/markers.toml has bytes that they
wrote.
"""

import logging
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from typing import NamedTuple, Self

import confluent_kafka
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, Producer

from duetime.core import headers as H
from duetime.core.errors import ClientFailed, InvalidMessage, KafkaError, Reason
from duetime.core.settings import Settings
from duetime.kafka.producer import OnDelivery, enqueue, is_fatal, producer_properties
from duetime.kafka.range_reader import headers_of
from duetime.queue.circuit_breaker import CircuitBreaker

log = logging.getLogger(__name__)

#: The first byte of a value.
END, START = 0, 1

END_VALUE = bytes([END])

#: kmq's header on a message: how often it was redelivered.
REDELIVERY_COUNT = "kmq-redelivery-count"

#: A header on a start marker, which kmq ignores: processing has stopped, and the timeout is the
#: wait before redelivery.
GIVEN_BACK = "duetime-given-back"

#: The length of an int32, in bytes.
INT_BYTES = 4

#: The last offset that a record can have: the next one must be an int64 as well.
LAST_OFFSET = 2**63 - 2

#: How long start markers may take to be acknowledged, in seconds.
TIMEOUT_S = 30.0

#: How long a marker waits for others, in ms: markers are small, and batches of them are not.
LINGER_MS = 2

_KEY = struct.Struct(">iq")
_START = struct.Struct(">Bq")


class GivenBack(StrEnum):
    """Why a message was given back: the value of the GIVEN_BACK header."""

    #: Processing failed: redeliver after the queue's backoff.
    FAILED = "failed"
    #: Processing failed: redeliver after the timeout.
    RETRY = "retry"
    #: No worker has seen it: redeliver without counting an attempt.
    UNSEEN = "unseen"


class MarkerKey(NamedTuple):
    """The message that a marker is about, by its position in the queue's topic."""

    partition: int
    offset: int

    def encoded(self) -> bytes:
        """Return the marker's key."""
        return _KEY.pack(*self)

    @classmethod
    def decoded(cls, key: bytes | None) -> "MarkerKey | None":
        """Parse a marker's key; None if it is not one."""
        return cls(*_KEY.unpack(key)) if key and len(key) == _KEY.size else None


def start_value(timeout_ms: int) -> bytes:
    """Return the value of a start marker: redeliver unless it is replaced within the timeout."""
    return _START.pack(START, timeout_ms)


def decoded_timeout(value: bytes | None) -> int | None:
    """Return the timeout of a start marker in ms; None for any other value."""
    if value and len(value) == _START.size and value[0] == START:
        return int(_START.unpack(value)[1])
    return None


def decoded_count(value: bytes | None) -> int:
    """Return the redeliveries that the first REDELIVERY_COUNT header counts.

    Like kmq, read one byte or the first four, signed. A negative count, or another length, is 0.
    `pipeline.redelivery` computes the same in Spark.
    """
    data = (value or b"")[:INT_BYTES]
    return max(0, int.from_bytes(data, signed=True)) if len(data) in (1, INT_BYTES) else 0


class MarkerProducer:
    """Writes the markers of one queue. Thread-safe.

    A client that fails for good is replaced, and the markers it still held are lost. That is safe:
    a batch without its start markers is read again, a message without its end marker redelivered.
    """

    def __init__(self, settings: Settings, topic: str) -> None:
        self._topic = topic
        self._properties = producer_properties(settings) | {"linger.ms": LINGER_MS}
        self._producer = Producer(self._properties)
        self._lock = threading.Lock()
        self._unwritten = 0
        self._is_closed = False

    def start_all(self, keys: Sequence[MarkerKey], timeout_ms: int) -> None:
        """Write start markers, and wait for their acknowledgement.

        Raises KafkaError; ClientFailed if the client was replaced and the caller may try again.
        """
        self._write_all(keys, start_value(timeout_ms))

    def end_all(self, keys: Sequence[MarkerKey]) -> None:
        """Write end markers, and wait for their acknowledgement. Raises as `start_all` does."""
        self._write_all(keys, END_VALUE)

    def restart(self, key: MarkerKey, timeout_ms: int) -> None:
        """Replace the timeout of a message. Does not wait."""
        self._write(key, start_value(timeout_ms))

    def give_back(self, key: MarkerKey, reason: GivenBack, retry_ms: int) -> None:
        """Redeliver a message in `retry_ms`. Does not wait."""
        self._write(key, start_value(retry_ms), [(GIVEN_BACK, reason.encode())])

    def end(self, key: MarkerKey) -> None:
        """End the processing of a message. Does not wait: a lost marker repeats the message."""
        self._write(key, END_VALUE)

    def close(self) -> None:
        """Wait until all markers are written or have failed. Later calls wait each time."""
        self._is_closed = True
        with suppress(KafkaException):
            self._producer.flush(TIMEOUT_S)
        with self._lock:
            unwritten, self._unwritten = self._unwritten, 0
        self._log_unwritten(unwritten)

    def _write_all(self, keys: Sequence[MarkerKey], value: bytes) -> None:
        errors = list[str]()

        def report(error: BrokerError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                errors.append(error.str())

        with self._client() as producer:
            for key in keys:
                self._produce(producer, key, value, report)
            # Also waits for markers that other threads have written meanwhile: harmless.
            left = producer.flush(TIMEOUT_S)
        if left or errors:
            detail = errors[0] if errors else f"no answer for {TIMEOUT_S:.0f} s"
            raise KafkaError(f"markers were not written to {self._topic} ({detail})")

    def _write(self, key: MarkerKey, value: bytes, headers: Sequence[H.Header] = ()) -> None:
        try:
            self._try_write(key, value, headers)
        except ClientFailed:
            self._try_write(key, value, headers)

    def _try_write(self, key: MarkerKey, value: bytes, headers: Sequence[H.Header]) -> None:
        with self._client() as producer:
            self._produce(producer, key, value, self._count_unwritten, headers)
            if self._is_closed:
                producer.flush(TIMEOUT_S)

    def _produce(
        self,
        producer: Producer,
        key: MarkerKey,
        value: bytes,
        on_delivery: OnDelivery,
        headers: Sequence[H.Header] = (),
    ) -> None:
        enqueue(
            producer,
            self._topic,
            value=value,
            key=key.encoded(),
            headers=headers,
            # That of the message, so that its markers stay in order.
            partition=key.partition,
            on_delivery=on_delivery,
        )
        producer.poll(0)

    @contextmanager
    def _client(self) -> Iterator[Producer]:
        """Yield the client. The first thread to see a fatal error replaces it.

        Raises KafkaError; ClientFailed after a fatal error.
        """
        producer = self._producer
        try:
            yield producer
        except KafkaException as error:
            detail = f"a marker cannot be written to {self._topic} ({error.args[0].str()})"
            if not is_fatal(error.args[0]):
                raise KafkaError(detail) from error
            with self._lock:
                if self._producer is producer:
                    log.error("marker producer failed, replacing it: %s", detail)  # noqa: TRY400 (its trace says nothing)
                    self._log_unwritten(len(producer))
                    self._producer = Producer(self._properties)
            raise ClientFailed(detail) from error

    def _log_unwritten(self, markers: int) -> None:
        if markers:
            log.warning("markers not written topic=%s markers=%d", self._topic, markers)

    def _count_unwritten(self, error: BrokerError | None, _: confluent_kafka.Message) -> None:
        if error is not None:
            with self._lock:
                self._unwritten += 1


class Message:
    """One message of a queue. Thread-safe.

    As a context manager, sync or async, it is acknowledged at the end of the block and given back
    by an exception, which is logged by its type and ends only the block.

    Attributes
    ----------
    topic (str), key (bytes | None), value (bytes | None): of the record.
    headers: pairs of a name (str) and a value (bytes | None).
    position: its partition and offset (MarkerKey).
    timestamp_ms: when it was appended or, if its topic does not stamp, sent: epoch ms.

    """

    def __init__(
        self,
        record: confluent_kafka.Message,
        markers: MarkerProducer,
        breaker: CircuitBreaker,
        timeout_ms: int,
        max_timeout_ms: int,
    ) -> None:
        self._markers = markers
        self._breaker = breaker
        self._timeout_ms, self._max_timeout_ms = timeout_ms, max_timeout_ms
        self._started_s = time.monotonic()
        self._is_over = False
        self._lock = threading.Lock()
        self.position = key_of(record)
        self.topic: str = record.topic() or ""
        self.key, self.value = record.key(), record.value()
        self.headers = tuple(headers_of(record))
        self.timestamp_ms = record.timestamp()[1]

    @property
    def attempt(self) -> int:
        """The delivery's number, from 1."""
        counts = (value for name, value in self.headers if name == REDELIVERY_COUNT)
        return decoded_count(next(counts, None)) + 1

    def ack(self) -> None:
        """Acknowledge the message. Only the first of `ack` and `nack` counts: safe to repeat."""
        if self._end():
            self._markers.end(self.position)
            self._breaker.worked()

    def nack(self, retry_in: timedelta | None = None) -> None:
        """Have the message redelivered in `retry_in`, by default after the queue's backoff.

        Processing has failed. Raises InvalidMessage (bad-timeout).
        """
        retry_ms = 0 if retry_in is None else checked_timeout_ms(retry_in, self._max_timeout_ms)
        if self._end():
            reason = GivenBack.FAILED if retry_in is None else GivenBack.RETRY
            self._markers.give_back(self.position, reason, retry_ms)
            self._breaker.failed()

    def extend_visibility(self, seconds: float) -> None:
        """Let processing take `seconds` from now on. Raises InvalidMessage (bad-timeout)."""
        timeout_ms = checked_timeout_ms(timedelta(seconds=seconds), self._max_timeout_ms)
        with self._lock:
            self._restart(timeout_ms, time.monotonic())

    def give_back(self) -> None:
        """Have the message redelivered at once, as the same attempt: no worker has seen it."""
        if self._end():
            self._markers.give_back(self.position, GivenBack.UNSEEN, 0)

    def hold(self, now_s: float) -> bool:
        """Extend the timeout if half of it has passed; return whether it had not ended.

        After its end the message belongs to the worker that gets it redelivered.
        """
        with self._lock:
            left_s = self._deadline_s() - now_s
            if 0 < left_s < self._timeout_ms / 2_000:
                try:
                    self._restart(self._timeout_ms, now_s)
                except KafkaError as error:
                    log.warning("timeout of a waiting message not extended error=%s", error)
        return left_s > 0

    def is_overdue(self, now_s: float) -> bool:
        """Return whether its timeout has passed: its worker hangs, or should have extended it."""
        with self._lock:
            return self._deadline_s() <= now_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            self.ack()
            return False
        log.warning(
            "message failed topic=%s partition=%d offset=%d attempt=%d error=%s",
            self.topic,
            *self.position,
            self.attempt,
            kind.__name__,
        )
        self.nack()
        # Ctrl-C and the like are not about this message.
        return issubclass(kind, Exception)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return self.__exit__(kind)

    def _deadline_s(self) -> float:
        return self._started_s + self._timeout_ms / 1_000

    def _restart(self, timeout_ms: int, now_s: float) -> None:
        """Replace the timeout. The caller holds the lock, so that an end marker comes after it."""
        if not self._is_over:
            self._markers.restart(self.position, timeout_ms)
            self._timeout_ms, self._started_s = timeout_ms, now_s

    def _end(self) -> bool:
        """End processing; return whether it had not ended before."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        return not was_over


def checked_timeout_ms(wait: timedelta, max_ms: int) -> int:
    """Return a timeout in ms. Raises InvalidMessage (bad-timeout)."""
    wait_ms = int(wait.total_seconds() * 1_000)
    if 0 <= wait_ms <= max_ms:
        return wait_ms
    raise InvalidMessage(
        Reason.BAD_TIMEOUT,
        f"{wait} is negative, or longer than the queue's max_visibility_timeout_ms ({max_ms}): "
        "choose less",
    )


def key_of(record: confluent_kafka.Message) -> MarkerKey:
    """Return the key of the record's markers."""
    return MarkerKey(record.partition() or 0, record.offset() or 0)
