"""A message that is worked on: to be acknowledged, given back, or kept for longer."""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import confluent_kafka

from duetime.errors import InvalidMessage, KafkaError, Reason
from duetime.kmq.breaker import Breaker
from duetime.kmq.markers import REDELIVERY_COUNT, GivenBack, MarkerKey, decoded_count
from duetime.kmq.marking import Marking
from duetime.stores.records import headers_of

log = logging.getLogger(__name__)


class Message:
    """One message of a queue. Thread-safe.

    A context manager: acknowledged when the block ends, given back when it raises. An exception is
    logged by its type, and ends the block but not the loop around it.
    """

    def __init__(
        self,
        record: confluent_kafka.Message,
        marking: Marking,
        breaker: Breaker,
        timeout_ms: int,
        most_ms: int,
    ) -> None:
        self._record = record
        self._marking = marking
        self._breaker = breaker
        self._timeout_ms, self._most_ms = timeout_ms, most_ms
        self._started_s = time.monotonic()
        self._is_over = False
        self._lock = threading.Lock()
        self.topic: str = record.topic() or ""
        self.key, self.value = record.key(), record.value()
        self.headers = tuple(headers_of(record))
        self.place = place_of(record)
        #: When it was appended or, if its topic does not stamp, sent: epoch ms.
        self.timestamp_ms = record.timestamp()[1]

    @property
    def attempt(self) -> int:
        """1 when it is delivered for the first time."""
        counts = (value for name, value in self.headers if name == REDELIVERY_COUNT)
        return decoded_count(next(counts, None)) + 1

    def ack(self) -> None:
        """Step 5: its work is done. Only the first of `ack` and `nack` counts: safe to repeat."""
        if self._ends():
            self._marking.end(self.place)
            self._breaker.worked()

    def nack(self, retry_in: timedelta | None = None) -> None:
        """Its work failed. It is delivered again in so long; else as the queue's back-off has it.

        Raises InvalidMessage (bad-timeout).
        """
        retry_ms = 0 if retry_in is None else self._checked_ms(retry_in)
        if self._ends():
            why = GivenBack.FAILED if retry_in is None else GivenBack.RETRY
            self._marking.give_back(self.place, why, retry_ms)
            self._breaker.failed()

    def extend(self, seconds: float) -> None:
        """From now on its work may take so long. Raises InvalidMessage (bad-timeout)."""
        timeout_ms = self._checked_ms(timedelta(seconds=seconds))
        with self._lock:
            self._restart(timeout_ms, time.monotonic())

    def give_back(self) -> None:
        """Nobody has worked on it: it is delivered again at once, and that is no new attempt."""
        if self._ends():
            self._marking.give_back(self.place, GivenBack.UNSEEN, 0)

    def keep(self, now_s: float) -> bool:
        """Whether there is time for its work. It is given more if half has passed already.

        What waited here until its time was over belongs to whoever gets it again.
        """
        with self._lock:
            left_s = self._deadline_s() - now_s
            if 0 < left_s < self._timeout_ms / 2_000:
                try:
                    self._restart(self._timeout_ms, now_s)
                except KafkaError as error:
                    log.warning("a message is not given more time error=%s", error)
        return left_s > 0

    def is_overdue(self, now_s: float) -> bool:
        """Whether its time is over: who works on it still hangs, or should have asked for more."""
        with self._lock:
            return self._deadline_s() <= now_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is None:
            self.ack()
            return False
        log.warning(
            "message failed topic=%s partition=%d offset=%d attempt=%d error=%s",
            self.topic,
            *self.place,
            self.attempt,
            kind.__name__,
        )
        self.nack()
        # Ctrl-C and its like are not about this message.
        return issubclass(kind, Exception)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self.__exit__(kind, error, trace)

    def _deadline_s(self) -> float:
        return self._started_s + self._timeout_ms / 1_000

    def _restart(self, timeout_ms: int, now_s: float) -> None:
        """Under the lock: an end that is told meanwhile is written after it."""
        if not self._is_over:
            self._marking.restart(self.place, timeout_ms)
            self._timeout_ms, self._started_s = timeout_ms, now_s

    def _ends(self) -> bool:
        """Whether this is the first to say what became of it."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        return not was_over

    def _checked_ms(self, wait: timedelta) -> int:
        return checked_timeout_ms(wait, self._most_ms)


def checked_timeout_ms(wait: timedelta, most_ms: int) -> int:
    """A time-out in ms. Raises InvalidMessage (bad-timeout)."""
    wait_ms = int(wait.total_seconds() * 1_000)
    if 0 <= wait_ms <= most_ms:
        return wait_ms
    raise InvalidMessage(
        Reason.BAD_TIMEOUT,
        f"{wait} is negative, or longer than the queue's timeout_max_ms ({most_ms}): choose less",
    )


def place_of(record: confluent_kafka.Message) -> MarkerKey:
    """The key of its markers."""
    return MarkerKey(record.partition() or 0, record.offset() or 0)


#: Makes a message of a record.
MakeMessage = Callable[[confluent_kafka.Message], Message]
