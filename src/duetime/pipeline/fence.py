"""A timer of the kernel's that ends the JVM of a leader that was paused: what it held is not sent.

Rows look at the lease, last before the sink. What a row has handed to a producer is sent by a
thread of Kafka's, which knows of no lease: paused with a request in its hands, it writes that when
it goes on, however late. But the kernel's timers run while a process is stopped, and SIGKILL ends
one that is. So the JVM is gone before another can lead, and what it left is read back as after any
crash. Source: timer_create(2), signal(7).
"""

import logging
import sys
import threading
import time
from signal import SIGKILL
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from duetime.pipeline.election import LEASE_S
from duetime.pipeline.jvm import JVM_ERRORS, java_array, jvm

log = logging.getLogger(__name__)

#: A pause of this length ends the JVM, in seconds. The lease was renewed up to a second before the
#: pause, and the group chooses another leader a second after the lease: this is sooner.
FENCE_S = LEASE_S - 0.1

#: How often the timer is put off, in seconds.
EVERY_S = 0.5

# Of <time.h> and <signal.h>, on Linux of every architecture with 64 bits.
CLOCK_MONOTONIC = 1
TIMER_ABSTIME = 1
SIGEVENT_BYTES, SIGEV_SIGNO = 64, 8
ITIMERSPEC_BYTES, IT_VALUE_S, IT_VALUE_NS = 32, 16, 24
POINTER_BYTES = 8


class Fence:
    """Ends this JVM if the process stands still for `FENCE_S`, from `start` to `stop`."""

    def __init__(self, spark: SparkSession) -> None:
        self._timer = _timer(spark)
        self._until_s = 0.0
        self._is_gone = False
        #: Whether the JVM was ended by it.
        self.has_fired = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on a pause ends the JVM."""
        if self._timer is None:
            return
        self._stopping.clear()
        self._set(self._timer, time.monotonic() + FENCE_S)
        self._thread = threading.Thread(target=self._keep, args=(self._timer,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """A pause does no harm any more. Safe to repeat."""
        self._stopping.set()
        if self._timer is None or self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._set(self._timer, 0)

    def _keep(self, timer: "KernelTimer") -> None:
        while not self._is_gone and not self._stopping.wait(EVERY_S):
            self._set(timer, time.monotonic() + FENCE_S)

    def _set(self, timer: "KernelTimer", until_s: float) -> None:
        if self._is_gone:
            return
        try:
            timer.set(until_s)
            self._until_s = until_s
        except JVM_ERRORS:
            # A JVM that ends for another reason is missed before the timer's time.
            self._is_gone = True
            self.has_fired = time.monotonic() > self._until_s


class KernelTimer:
    """Sends SIGKILL to the JVM's process at an instant. Raises Py4JJavaError or OSError."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._jna: Any = jvm(spark).com.sun.jna
        event = self._jna.Memory(SIGEVENT_BYTES)
        event.clear()
        event.setInt(SIGEV_SIGNO, int(SIGKILL))
        place = self._jna.Memory(POINTER_BYTES)
        self._call("timer_create", CLOCK_MONOTONIC, event, place)
        self._timer = place.getPointer(0)
        self._when = self._jna.Memory(ITIMERSPEC_BYTES)
        self._when.clear()

    def set(self, instant_s: float) -> None:
        """Fire at an instant of the monotonic clock, in seconds; 0: never."""
        seconds, part_s = divmod(instant_s, 1)
        self._when.setLong(IT_VALUE_S, int(seconds))
        self._when.setLong(IT_VALUE_NS, int(part_s * 1e9))
        self._call("timer_settime", self._timer, TIMER_ABSTIME, self._when, None)

    def _call(self, name: str, *given: Any) -> None:  # noqa: ANN401 (what C and Java take)
        function = self._jna.NativeLibrary.getProcess().getFunction(name)
        if function.invokeInt(java_array(self._spark, *given)):
            raise OSError(f"{name} failed")


def _timer(spark: SparkSession) -> KernelTimer | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return KernelTimer(spark)
    except (Py4JJavaError, TypeError, OSError) as error:
        log.warning(
            "a leader that is paused may send a request twice: the jar jna is not on Spark's class "
            "path, or the kernel has no timers (%s)",
            type(error).__name__,
        )
        return None
