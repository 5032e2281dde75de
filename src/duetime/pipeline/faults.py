"""Points at which tests let the pipeline fail: between two steps, where a crash is at its worst.

Unless a test has armed one, reaching a point is a look into an empty dictionary. A test in the same
process arms a point with what is to happen; for one that starts `duetime run`, the environment
variable DUETIME_FAULT names the point at which that process is killed.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from threading import Event


class Point(StrEnum):
    """Where the pipeline can be made to fail."""

    #: A turn is noted as begun, and nothing of it is sent.
    TURN_BEGUN = "turn.begun"
    #: All of a turn is acknowledged, and nothing of it settled.
    TURN_SENT = "turn.sent"
    #: What recovery does for the intake is acknowledged, and not committed.
    RECOVER_SENT = "recover.sent"
    #: What becomes of failed messages is acknowledged, and not committed.
    FAILURES_SENT = "failures.sent"
    RECURRING_NOTED = "recurring.noted"
    RECURRING_SENT = "recurring.sent"
    #: What is delivered again is acknowledged, and no end marker is written.
    REDELIVERED = "redelivered"


class Fault(Exception):
    """What a test wanted to happen."""


def _die() -> None:
    # The JVM ends with the pipe that this process holds.
    os.kill(os.getpid(), signal.SIGKILL)


_armed: dict[Point, Callable[[], None]] = {}
if "DUETIME_FAULT" in os.environ:
    _armed[Point(os.environ["DUETIME_FAULT"])] = _die


def reach(point: Point) -> None:
    """Fail here, if a test wants it."""
    if _armed and point in _armed:
        _armed[point]()


@contextmanager
def armed(point: Point) -> Iterator[Event]:
    """The next to reach the point fails, once; the event tells that it has."""
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
