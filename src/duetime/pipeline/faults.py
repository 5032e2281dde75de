"""Fault points: places between two steps where tests let the pipeline fail, a crash at its worst.

A test in the same process arms a point with an exception. For a process of `duetime run`, the
environment variable DUETIME_FAULT names the point at which it is killed. While no point is armed,
reaching one is a look-up in an empty dictionary.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from threading import Event


class Point(StrEnum):
    """A place where the pipeline can be made to fail."""

    #: A release job is noted as started, and nothing of it is sent.
    JOB_STARTED = "job.started"
    #: All of a release job is acknowledged, and nothing of it settled.
    JOB_SENT = "job.sent"
    #: The records that recovery writes for intake are acknowledged, and not committed.
    RECOVER_SENT = "recover.sent"
    #: The retries and dead letters of failed messages are acknowledged, and not committed.
    RETRIES_SENT = "retries.sent"
    SCHEDULES_NOTED = "schedules.noted"
    SCHEDULES_SENT = "schedules.sent"
    #: Redelivered messages are acknowledged, and no end marker is written.
    REDELIVERED = "redelivered"


class Fault(Exception):
    """The failure that a test wanted."""


def _die() -> None:
    # The JVM ends with the pipe that this process holds.
    os.kill(os.getpid(), signal.SIGKILL)


_armed: dict[Point, Callable[[], None]] = {}
if "DUETIME_FAULT" in os.environ:
    _armed[Point(os.environ["DUETIME_FAULT"])] = _die


def reach(point: Point) -> None:
    """Fail here, if a test wants it."""
    if point in _armed:
        _armed[point]()


@contextmanager
def armed(point: Point) -> Iterator[Event]:
    """Make the next call that reaches the point fail, once; the event is set then."""
    failed = Event()

    def fail() -> None:
        if not failed.is_set():
            failed.set()
            raise Fault(point)

    _armed[point] = fail
    try:
        yield failed
    finally:
        del _armed[point]
