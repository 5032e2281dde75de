"""Threads that repeat one step, and waiting for a condition."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

log = logging.getLogger(__name__)

FoundT = TypeVar("FoundT")


class PeriodicThread:
    """Runs `step` every `interval_s` seconds in a daemon thread, from `start` until `stop`.

    An exception of `step` is logged, and the next interval runs it again: a background service
    never ends by itself. As a context manager it starts and stops.
    """

    def __init__(self, name: str, interval_s: float, step: Callable[[], object]) -> None:
        self._interval_s, self._step = interval_s, step
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run the first step at once, in the thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Let the current step end within `timeout_s` seconds; return whether it has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stopping(self) -> threading.Event:
        """Set once the thread is to stop: a long step waits on it in place of `time.sleep`."""
        return self._stopping

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except Exception:
                # Whatever the step needs may be gone by then.
                if self._stopping.is_set():
                    return
                log.exception("step failed, will be repeated thread=%s", self._thread.name)
            self._stopping.wait(self._interval_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def wait_until(
    condition: Callable[[], FoundT], timeout_s: float, interval_s: float = 0.1
) -> FoundT:
    """Poll `condition` until it is true, for `timeout_s` seconds at most; return its last value.

    It is called at least once, and once more after the time is over.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        if (left_s := deadline_s - time.monotonic()) <= 0:
            break
        time.sleep(min(interval_s, left_s))
    return found
