"""The pipeline in a thread of its own, so that a signal never cuts into a call to the JVM.

The main thread only waits, and a signal interrupts nothing but that. Ways to end:

```
first signal            the pipeline stops: windows end, what waits is kept
6 seconds after it      Spark is ended hard (3 if it was still starting): as after a crash,
                        nothing is lost
second signal           this process ends at once, and with it Spark and the local broker
```
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Protocol, Self

from duetime.cli.logs import end_log
from duetime.errors import DuetimeError, words

log = logging.getLogger(__name__)

#: How long the pipeline may take to stop, in seconds: the broker needs time as well on a busy
#: machine, and all of it is over in 10.
STOP_S = 6.0

#: The same where it has not done anything yet that would be worth waiting for.
STOP_STARTING_S = 3.0

#: How often the main thread looks around while it waits, in seconds.
LOOK_S = 0.5

#: Exit code of a program that Ctrl-C ended.
INTERRUPTED = 130

#: A program in the background is started with SIGINT ignored, and may yet be sent one.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """A `duetime.pipeline.runner.Pipeline`, named without importing Spark."""

    def start(self) -> None:
        """Returns when it is ready."""

    def watch(self) -> None:
        """Returns when it was asked to stop."""

    def ask_to_stop(self) -> None:
        """Make `watch` return."""

    def stop(self) -> None:
        """Stop everything."""


class Service:
    """Runs a pipeline while the block lasts; leaving it stops the pipeline and its JVM.

    `look` is called now and then while there is nothing else to do, and may raise.
    """

    def __init__(self, pipeline: Stoppable, look: Callable[[], None] = lambda: None) -> None:
        self._pipeline = pipeline
        self._look = look
        self._ready = threading.Event()
        # Not `Thread.join`: one that a signal interrupts takes a running thread for ended (CPython
        # 3.11, bpo-45274).
        self._ended = threading.Event()
        self._failed: DuetimeError | None = None
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)

    def wait_until_ready(self) -> None:
        """Wait for the end of the warm-up. Raises what the pipeline raised."""
        while not self._ready.wait(LOOK_S):
            self._look()
        self._raise_failure()

    def wait(self) -> None:
        """Wait until the pipeline ends by itself, which is a failure, and raise it."""
        while not self._ended.wait(LOOK_S):
            self._look()
        self._raise_failure()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._ready.is_set() or self._is_ended_by(error):
            # All that is said from here on comes of that.
            end_log()
        stop_s = STOP_S if self._ready.is_set() else STOP_STARTING_S
        self._pipeline.ask_to_stop()
        if not self._ended.wait(stop_s):
            log.warning("not stopped after %.0f s: ending Spark, nothing is lost", stop_s)
        elif self._failed and self._failed is not error:
            log.warning("not stopped as it should be: %s", self._failed, exc_info=self._failed)
        end_spark(kill=not self._ended.is_set())

    def _is_ended_by(self, error: BaseException | None) -> bool:
        """Whether this is why it ends, and not what the pipeline said itself."""
        return isinstance(error, DuetimeError) and error is not self._failed

    def _run(self) -> None:
        try:
            self._pipeline.start()
            self._ready.set()
            try:
                self._pipeline.watch()
            finally:
                self._pipeline.stop()
        except DuetimeError as error:
            self._failed = error
        except Exception as error:
            log.debug("the pipeline failed", exc_info=True)
            self._failed = _named(error)
        finally:
            self._ready.set()
            self._ended.set()

    def _raise_failure(self) -> None:
        if self._failed:
            raise self._failed


def _named(error: Exception) -> DuetimeError:
    """The failure in words, taken down while the JVM that knows them is there."""
    return DuetimeError(f"the pipeline failed ({words(error)}): run it with --verbose to see where")


def end_spark(*, kill: bool = False) -> None:
    """End the JVM that PySpark started, if it did; it cannot start another in this process then."""
    # Spark is in this process already, or there is nothing to end.
    from pyspark import SparkContext  # noqa: PLC0415

    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 (PySpark has no other name for it)
    if process is None:
        return
    if process.stdin and not kill:
        # It ends when this pipe does.
        process.stdin.close()
    try:
        process.wait(0 if kill else 1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal interrupt as Ctrl-C does; the second signal ends all."""
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            # The JVM and the broker's watchdog read pipes that break now, and end.
            os._exit(INTERRUPTED)
        interrupted = True
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in _heeded()}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _heeded() -> Iterator[signal.Signals]:
    yield from SIGNALS
    # `nohup` has it ignored, and means it.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        yield signal.SIGHUP
