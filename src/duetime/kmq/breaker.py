"""Back-pressure: where all work fails, less is read, then nothing, then one message as a test.

closed       reads; half as many at a time with each failure in a row
open         reads nothing for a while, once so many have failed in a row
half-open    reads one message: if its work is done it is closed, else open again
"""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pybreaker

from duetime import metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When to stop reading, and for how long."""

    #: So many failures in a row.
    failures: int = 20
    #: So long nothing is read then.
    pause: timedelta = timedelta(seconds=5)


#: What a breaker can be.
STATES = ("closed", "open", "half-open")


class _Failed(Exception):
    """What the breaker is told of a message whose work failed."""


class Breaker(pybreaker.CircuitBreakerListener):
    """Decides how many messages may be read, from how the last ones went. Thread-safe."""

    def __init__(self, policy: BreakerPolicy, topic: str) -> None:
        self._pause_s = policy.pause.total_seconds()
        self._topic = topic
        self._opened_s = 0.0
        #: A test message is under way since then; None where none is.
        self._testing_s: float | None = None
        self._lock = threading.RLock()
        #: The state that the log and Prometheus were told of; None once it is closed for good.
        self._told: str | None = "closed"
        for state in STATES:
            metrics.QUEUE_BREAKER.labels(topic, state).inc(state == self._told)
        self._circuit = pybreaker.CircuitBreaker(
            fail_max=policy.failures, reset_timeout=self._pause_s, listeners=[self]
        )

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        with self._lock:
            is_over = self._circuit.current_state == "open" and self._left_s() <= 0
            return "half-open" if is_over else self._circuit.current_state

    def room(self, most: int) -> int:
        """How many of `most` messages may be read now."""
        with self._lock:
            self._tell_state()
            if self.state == "closed":
                return max(1, most >> self._circuit.fail_counter)
            if self.state == "open" or self._is_testing():
                return 0
            self._testing_s = time.monotonic()
            return 1

    def cancel_test(self) -> None:
        """There was no message to test with."""
        with self._lock:
            self._testing_s = None

    def worked(self) -> None:
        """A message was acknowledged."""
        self._tell(lambda: None)

    def failed(self) -> None:
        """The work on a message failed."""
        self._tell(_fail)

    def state_change(self, cb: Any, old_state: Any, new_state: Any) -> None:  # noqa: ANN401, ARG002 (pybreaker's own types)
        """Called by the circuit, under our lock."""
        if new_state.name == "open":
            self._opened_s = time.monotonic()

    def close(self) -> None:
        """Nobody reads by it any more. Safe to repeat."""
        with self._lock:
            if self._told is not None:
                metrics.QUEUE_BREAKER.labels(self._topic, self._told).dec()
            self._told = None

    def _tell_state(self) -> None:
        """Tell if the state is another one. A pause ends by itself: the next look sees it."""
        state = self.state
        if self._told in (None, state):
            return
        log.warning("circuit breaker topic=%s state=%s", self._topic, state)
        metrics.QUEUE_BREAKER.labels(self._topic, self._told).dec()
        metrics.QUEUE_BREAKER.labels(self._topic, state).inc()
        self._told = state

    def _tell(self, outcome: Any) -> None:  # noqa: ANN401 (returns, or raises)
        with self._lock:
            self._testing_s = None
            # What was read before it opened, and ends while it is open, says nothing new.
            with suppress(_Failed, pybreaker.CircuitBreakerError):
                self._circuit.call(outcome)
            self._tell_state()

    def _left_s(self) -> float:
        return self._opened_s + self._pause_s - time.monotonic()

    def _is_testing(self) -> bool:
        """A test message that nobody says anything of does not close the circuit for ever."""
        since_s = self._testing_s
        return since_s is not None and time.monotonic() - since_s < max(self._pause_s, 1.0)


def _fail() -> None:
    raise _Failed
