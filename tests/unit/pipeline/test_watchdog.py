"""When the watchdog's timer would end the JVM."""

import time

import pytest

from duetime.pipeline.leadership import lease
from duetime.pipeline.leadership.lease import NEAR_S, Watchdog
from duetime.spark.session import JVM_ERRORS


class Timer:
    """In place of the kernel's; its JVM is gone once it `fails`."""

    def __init__(self):
        self.until_s, self.fails = None, False

    def set(self, instant_s):
        if self.fails:
            raise JVM_ERRORS[-1]
        self.until_s = instant_s


@pytest.fixture
def timer(monkeypatch):
    found = Timer()
    monkeypatch.setattr(lease, "_posix_timer", lambda _: found)
    return found


@pytest.mark.parametrize(
    ("left_s", "is_quiet", "is_postponed"),
    [
        (10.0, True, False),
        (10.0, False, False),
        # The lease is about to end: rows pass no more.
        (NEAR_S / 2, False, False),
        (NEAR_S / 2, True, True),
        # It has ended, and nothing is left to be sent.
        (-1.0, True, True),
        (-1.0, False, False),
    ],
)
def test_the_jvm_ends_with_the_lease_unless_nothing_is_left_to_send(
    timer, left_s, is_quiet, is_postponed
):
    end_s = time.monotonic() + left_s
    watched = Watchdog(None, lambda: end_s, lambda: is_quiet)
    watched._postpone()
    assert (timer.until_s > end_s) == is_postponed
    assert is_postponed or timer.until_s == end_s


@pytest.mark.parametrize(("left_s", "has_fired"), [(-0.5, True), (60.0, False)])
def test_a_jvm_that_is_missed_after_the_end_was_ended_by_the_watchdog(timer, left_s, has_fired):
    end_s = time.monotonic() + left_s
    watched = Watchdog(None, lambda: end_s, lambda: False)
    watched._postpone()
    timer.fails = True
    watched._postpone()
    assert watched.has_fired is has_fired
    # It is asked nothing more.
    timer.fails, timer.until_s = False, None
    watched._postpone()
    assert timer.until_s is None


def test_a_watchdog_that_is_stopped_lets_the_end_pass(timer):
    watched = Watchdog(None, lambda: time.monotonic() + 60, lambda: False)
    watched.start()
    watched.stop()
    assert timer.until_s == 0
