"""The lease, and the watchdog: a former leader sends nothing, also if it stood still meanwhile.

A process may be paused at any instant (SIGSTOP, a long collection) without noticing. So each row
checks the *lease*, last before the sink: a system property of its JVM, in nanoseconds of that JVM's
monotonic clock (`spark.executors` brings it to those of other machines).

Each *term* has a lease of its own, and a plan names the lease of the term that it was made in. A
row that waits for the lease of an older term is never sent, even if the same process leads again:
others may have led in between, and have sent it.

What a row has handed to a producer is sent by a thread of Kafka's, which knows of no lease: paused
with a request in its hands, it writes that when it goes on, however late; cut off from its brokers,
it tries again when they are back. But the kernel's timers run while a process is stopped, and
SIGKILL ends one that is. So the *watchdog*, such a timer, ends the JVM before another can lead, and
recovery reads back as after any crash. Source: timer_create(2), signal(7).
"""

import logging
import sys
import time
from collections.abc import Callable
from signal import SIGKILL
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.spark import catalyst
from duetime.spark.session import DEFAULT_LEASE, HELD, JVM_ERRORS, STARTED_BEFORE, jvm

log = logging.getLogger(__name__)

#: Waits of a row for a lease that has ended, in ms: a broker that is restarted, or replaced by
#: others, is no reason to fail. After each it checks again, and after the last it raises.
WAITS_MS = (100, 400, 1_500, 3_000, 5_000, 5_000)

#: Interval in which the watchdog's timer is set again, in seconds.
INTERVAL_S = 0.1

#: So long before the JVM's end, in seconds, no row passes, and the producers are checked.
NEAR_S = 0.3


def lease_name(settings: Settings) -> str:
    """Return the name of the JVM's property with the lease of the settings' term.

    Term 0 has no lease: a plan outside of any term is not held up.
    """
    return f"{settings.namespace}.lease.{settings.term}"


def lease_is_held(settings: Settings) -> Column:
    """A filter for rows: true while we lead in the settings' term.

    Otherwise it waits a while for the lease, then raises. It raises also in a task that was started
    before: Spark repeats one whose executor was taken away, and the pipeline has not read back what
    that one has sent.
    """
    is_held = require_lease(
        lease_name(settings), "the lead is lost: the next leader sends the rest"
    )
    repeated = f"{STARTED_BEFORE}: the pipeline repeats it, without what it has sent"
    return F.when(catalyst.task_attempt() == 0, is_held).otherwise(raised(repeated))


def require_lease(name: str, otherwise: str) -> Column:
    """A filter for rows: true while the lease is held, waits a while for it, then raises."""
    found = _is_held(name)
    for wait_ms in reversed(WAITS_MS):
        found = _is_held(name) | (catalyst.slept(F.lit(wait_ms)) & found)
    return F.when(found, True).otherwise(raised(otherwise))


def raised(text: str) -> Column:
    """boolean: no value, but an error."""
    return F.raise_error(F.lit(text)).cast("boolean")


def _is_held(name: str) -> Column:
    default = catalyst.number_property(DEFAULT_LEASE, F.lit(int(HELD)))
    return catalyst.nano_time() < catalyst.number_property(name, default)


class Watchdog:
    """Ends this JVM at the instant that `end_s` returned last, from `start` to `stop`.

    It is called ten times a second, and the instant passes only where this process is paused, or
    where its lease is not renewed.
    """

    def __init__(
        self, spark: SparkSession, end_s: Callable[[], float], is_quiet: Callable[[], bool]
    ) -> None:
        """`end_s` returns an instant of time.monotonic().

        `is_quiet` returns whether no row passes, and no producer holds a record: then the JVM need
        not end. It may raise JVM_ERRORS.
        """
        self._timer, self._end_s, self._is_quiet = _posix_timer(spark), end_s, is_quiet
        self._until_s = 0.0
        self._is_jvm_gone = False
        #: Whether it has ended the JVM.
        self.has_fired = False
        self._thread: PeriodicThread | None = None

    def start(self) -> None:
        """End the JVM at that instant, from now on."""
        if self._timer is None:
            return
        self._postpone()
        self._thread = PeriodicThread("watchdog", INTERVAL_S, self._postpone)
        self._thread.start()

    def stop(self) -> None:
        """Let the instant pass. Safe to repeat."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
            self._set(float)

    def _postpone(self) -> None:
        def end_s() -> float:
            end_s = self._end_s()
            near_s = time.monotonic() + NEAR_S
            return near_s if end_s < near_s and self._is_quiet() else end_s

        self._set(end_s)

    def _set(self, end_s: Callable[[], float]) -> None:
        if self._timer is None or self._is_jvm_gone:
            return
        try:
            until_s = end_s()
            self._timer.set(until_s)
            self._until_s = until_s
        except JVM_ERRORS:
            # A JVM that ends for another reason is missed before the timer's time.
            self._is_jvm_gone = True
            self.has_fired = time.monotonic() > self._until_s


class PosixTimer:
    """Sends SIGKILL to the JVM's process at an instant. Raises Py4JJavaError or OSError."""

    # Of <time.h> and <signal.h>, on Linux of every architecture with 64 bits.
    CLOCK_MONOTONIC = 1
    TIMER_ABSTIME = 1
    SIGEVENT_BYTES, SIGEV_SIGNO = 64, 8
    ITIMERSPEC_BYTES, IT_VALUE_S, IT_VALUE_NS = 32, 16, 24
    POINTER_BYTES = 8

    def __init__(self, spark: SparkSession) -> None:
        self._jna: Any = jvm(spark).com.sun.jna
        event = self._jna.Memory(self.SIGEVENT_BYTES)
        event.clear()
        event.setInt(self.SIGEV_SIGNO, int(SIGKILL))
        place = self._jna.Memory(self.POINTER_BYTES)
        _call(
            self._function("timer_create"), catalyst.java_array(self.CLOCK_MONOTONIC, event, place)
        )
        self._when = self._jna.Memory(self.ITIMERSPEC_BYTES)
        self._when.clear()
        # Looked up once: it is called ten times a second.
        self._settime = self._function("timer_settime")
        self._given = catalyst.java_array(place.getPointer(0), self.TIMER_ABSTIME, self._when, None)

    def set(self, instant_s: float) -> None:
        """Fire at an instant of the monotonic clock, in seconds; 0 is never."""
        seconds, part_s = divmod(instant_s, 1)
        self._when.setLong(self.IT_VALUE_S, int(seconds))
        self._when.setLong(self.IT_VALUE_NS, int(part_s * 1e9))
        _call(self._settime, self._given)

    def _function(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        return self._jna.NativeLibrary.getProcess().getFunction(name)


def _call(function: Any, given: Any) -> None:  # noqa: ANN401 (what C and Java take)
    if function.invokeInt(given):
        raise OSError(f"{function.getName()} failed")


def _posix_timer(spark: SparkSession) -> PosixTimer | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return PosixTimer(spark)
    except (Py4JJavaError, TypeError, OSError) as error:
        log.warning(
            "a leader that is paused may send a request twice: add the jar jna to Spark's class "
            "path, unless the kernel has no timers error=%s",
            type(error).__name__,
        )
        return None
