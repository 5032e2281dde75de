"""A queue's worker in a process of its own: `python -m duetime.bench.worker`.

Reads what to do from stdin as JSON, works on a queue, and drops some messages when they come first.
Writes how it went as JSON.
"""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

from confluent_kafka import Consumer

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import DuetimeError
from duetime.kmq import Queue
from duetime.leaving import leave

#: Messages that are read at a time.
BATCH = 1_000

#: How long a plain consumer waits for messages that are there, in seconds.
PATIENCE_S = 30.0

#: How often is looked whether anything was acknowledged, in seconds.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is to do."""

    queue: str
    messages: int
    #: Every so many-th message is dropped when it comes first; 0 is none.
    drop_every: int
    timeout_ms: int
    #: For how long nothing new may be acknowledged until it is given up, in seconds.
    patience_s: float
    #: Whether to read the topic without markers before.
    is_compared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What it has done."""

    #: Different messages that were acknowledged.
    acknowledged: int
    #: First deliveries a second, from the first to the last.
    messages_per_s: int
    #: The same of a consumer that writes no markers, and commits once in a while; 0 of none.
    raw_messages_per_s: int


@dataclass(slots=True)
class Pace:
    """Counts messages: the same way with markers and without."""

    messages: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def count(self, messages: int, now_s: float) -> None:
        """So many came together."""
        self.first_s = self.first_s or now_s
        self.messages, self.last_s = self.messages + messages, now_s

    def per_s(self) -> int:
        """How many a second, from when the first came to when the last did."""
        return round(self.messages / max(self.last_s - self.first_s, 0.001))


def work(settings: Settings, task: Task) -> Worked:
    """Work until each message is acknowledged, or nothing new is for too long."""
    raw = _read_raw(settings, task) if task.is_compared else Pace()
    acknowledged: set[bytes] = set()
    pace, timeout = Pace(), timedelta(milliseconds=task.timeout_ms)
    with (
        Queue(
            task.queue, group="workers", settings=settings, timeout=timeout, batch=BATCH
        ) as queue,
        _closed_when_idle(queue, lambda: len(acknowledged), task.patience_s),
    ):
        for message in queue:
            number = bytes(message.value or b"").split(maxsplit=1)[0]
            if message.attempt == 1:
                pace.count(1, time.monotonic())
            if message.attempt > 1 or not is_dropped(int(number), task.drop_every):
                message.ack()
                acknowledged.add(number)
            if len(acknowledged) == task.messages:
                break
    return Worked(
        acknowledged=len(acknowledged),
        messages_per_s=pace.per_s(),
        raw_messages_per_s=raw.per_s(),
    )


@contextmanager
def _closed_when_idle(
    queue: Queue, reached: Callable[[], int], patience_s: float
) -> Iterator[None]:
    """Close the queue, which ends its messages, once nothing more is reached for so long."""
    is_over = threading.Event()

    def watch() -> None:
        known, since_s = 0, time.monotonic()
        while not is_over.wait(LOOK_S):
            if (now := reached()) != known:
                known, since_s = now, time.monotonic()
            elif time.monotonic() > since_s + patience_s:
                queue.close()
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()


def is_dropped(number: int, every: int) -> bool:
    """Whether the message is forgotten when it comes first."""
    return every > 0 and number % every == 0


def _read_raw(settings: Settings, task: Task) -> Pace:
    consumer = Consumer(
        librdkafka_properties(settings) | {"group.id": "raw", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([task.queue])
    pace = Pace()
    while pace.messages < task.messages and (some := consumer.consume(BATCH, timeout=PATIENCE_S)):
        read = sum(1 for each in some if not each.error() and each.value())
        pace.count(read, time.monotonic())
    leave(consumer)
    return pace


def main() -> None:
    """Read what to do, do it, say what was done."""
    asked = json.load(sys.stdin)
    # Messages are freed by counting references; there are no cycles to look for.
    gc.disable()
    try:
        done = work(Settings(**asked["settings"]), Task(**asked["task"]))
    except DuetimeError as error:
        sys.exit(f"worker: {error}")
    sys.stdout.write(json.dumps(asdict(done)) + "\n")


if __name__ == "__main__":
    main()
