"""The circuit breaker of a queue: reads less while processing fails, then nothing, then a test.

closed       reads; each failure in a row halves the number of messages
open         reads nothing for a pause, after `failures` failures in a row
half-open    reads one message as a test: closed if it succeeds, open again if it fails
"""

import logging
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from duetime.core import metrics

log = logging.getLogger(__name__)

STATES = ("closed", "open", "half-open")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When a worker stops reading, and for how long.

    Parameters
    ----------
    failures: open after as many failures in a row.
    pause: how long to read nothing before a test message.

    """

    failures: int = 20
    pause: timedelta = timedelta(seconds=5)


class CircuitBreaker:
    """Decides how many messages a worker may read. Thread-safe."""

    def __init__(self, policy: BreakerPolicy, topic: str) -> None:
        self._max_failures, self._pause_s = policy.failures, policy.pause.total_seconds()
        self._topic = topic
        #: Failures in a row.
        self._failures = 0
        #: When the circuit opened; None while it is closed.
        self._opened_s: float | None = None
        #: When the test message was let through; None while there is none.
        self._testing_since_s: float | None = None
        self._lock = threading.RLock()
        #: The state that log and metrics show; None after `close`.
        self._reported: str | None = "closed"
        for state in STATES:
            metrics.QUEUE_BREAKER.labels(topic, state).inc(state == self._reported)

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        with self._lock:
            if self._opened_s is None:
                return "closed"
            return "half-open" if time.monotonic() >= self._opened_s + self._pause_s else "open"

    def room(self, limit: int) -> int:
        """Return how many of `limit` messages may be read now."""
        with self._lock:
            # A pause ends without an event: this call reports it.
            self._report_state()
            if self.state == "closed":
                return max(1, limit >> self._failures)
            if self.state == "open" or self._is_testing():
                return 0
            self._testing_since_s = time.monotonic()
            return 1

    def cancel_test(self) -> None:
        """Let another message be the test: there was none to read."""
        with self._lock:
            self._testing_since_s = None

    def worked(self) -> None:
        """Count a message that was processed."""
        self._count(has_failed=False)

    def failed(self) -> None:
        """Count a message whose processing failed."""
        self._count(has_failed=True)

    def close(self) -> None:
        """Remove the state from the metrics. Idempotent."""
        with self._lock:
            if self._reported is not None:
                metrics.QUEUE_BREAKER.labels(self._topic, self._reported).dec()
            self._reported = None

    def _count(self, *, has_failed: bool) -> None:
        with self._lock:
            self._testing_since_s = None
            state = self.state
            # A message read before the circuit opened tells nothing new while it is open.
            if state != "open":
                self._failures = self._failures + 1 if has_failed else 0
                is_over = self._failures >= self._max_failures or state == "half-open"
                self._opened_s = time.monotonic() if has_failed and is_over else None
            self._report_state()

    def _report_state(self) -> None:
        state = self.state
        if self._reported in (None, state):
            return
        log.warning("circuit breaker topic=%s state=%s", self._topic, state)
        metrics.QUEUE_BREAKER.labels(self._topic, self._reported).dec()
        metrics.QUEUE_BREAKER.labels(self._topic, state).inc()
        self._reported = state

    def _is_testing(self) -> bool:
        """Return whether a test is recent: one without an outcome must not block for ever."""
        since_s = self._testing_since_s
        return since_s is not None and time.monotonic() - since_s < max(self._pause_s, 1.0)
