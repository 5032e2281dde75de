"""A message of a queue: to be acknowledged, given back, or held for longer."""

import logging
import threading
import time
from datetime import timedelta
from typing import Self

import confluent_kafka

from duetime.core.errors import InvalidMessage, KafkaError, Reason
from duetime.kafka.range_reader import headers_of
from duetime.queue.circuit_breaker import CircuitBreaker
from duetime.queue.markers import (
    REDELIVERY_COUNT,
    GivenBack,
    MarkerKey,
    MarkerProducer,
    decoded_count,
)

log = logging.getLogger(__name__)


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
