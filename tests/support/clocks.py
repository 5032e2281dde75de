"""Clocks that tests set, and waiting for what is to happen."""

import time

import pytest

from duetime.core.clock import SystemClock


class SetClock:
    """Stands still until it is set."""

    def __init__(self, ms):
        self.ms = ms

    def now_ms(self):
        return self.ms


def eventually(holds, what="what was waited for", within_s=180.0):
    """Wait until it holds, and look often; gives what it gave. `what` may be made at the end."""
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, what() if callable(what) else what
        time.sleep(0.02)
    return found


@pytest.fixture
def now_ms():
    return SystemClock().now_ms()
