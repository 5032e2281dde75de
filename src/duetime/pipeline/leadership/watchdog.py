"""Watchdog: a kernel timer that ends the JVM of a leader before another may lead.

What a row has handed to a producer is sent by a thread of Kafka's, which knows of no lease: paused
with a request in its hands, it writes that when it goes on, however late; cut off from its brokers,
it tries again when they are back. But the kernel's timers run while a process is stopped, and
SIGKILL ends one that is. So the watchdog ends the JVM before another can lead, and recovery reads
back as after any crash. Source: timer_create(2), signal(7).
"""

import logging
import sys
import time
from collections.abc import Callable
from signal import SIGKILL
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from duetime.core.threads import PeriodicThread
from duetime.spark.catalyst import java_array
from duetime.spark.session import JVM_ERRORS, jvm

log = logging.getLogger(__name__)

#: Interval in which the timer is set again, in seconds.
INTERVAL_S = 0.1

#: So long before the end, in seconds, no row passes any more, and the producers are checked.
NEAR_S = 0.3


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
        _call(self._function("timer_create"), java_array(self.CLOCK_MONOTONIC, event, place))
        self._when = self._jna.Memory(self.ITIMERSPEC_BYTES)
        self._when.clear()
        # Looked up once: it is called ten times a second.
        self._settime = self._function("timer_settime")
        self._given = java_array(place.getPointer(0), self.TIMER_ABSTIME, self._when, None)

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
