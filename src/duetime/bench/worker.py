"""A queue's worker in a process of its own: `python -m duetime.bench.worker`.

Reads what to do from stdin as JSON, works on a queue, and drops some messages when they come first.
Writes how it went as JSON.
"""

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from confluent_kafka import Consumer

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import DuetimeError
from duetime.kmq import Queue

#: Messages that are read at a time.
BATCH = 1_000

#: How long a plain consumer waits for messages that are there, in seconds.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is to do."""

    queue: str
    messages: int
    #: Every so many-th message is dropped when it comes first; 0 is none.
    drop_every: int
    timeout_ms: int
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


def work(settings: Settings, task: Task) -> Worked:
    """Work until each message is acknowledged."""
    raw = _read_raw(settings, task) if task.is_compared else 0
    acknowledged: set[bytes] = set()
    first, begun_s, ended_s = 0, 0.0, 0.0
    timeout = timedelta(milliseconds=task.timeout_ms)
    with Queue(
        task.queue, group="workers", settings=settings, timeout=timeout, batch=BATCH
    ) as queue:
        for message in queue:
            number = bytes(message.value or b"").split(maxsplit=1)[0]
            if message.attempt == 1:
                first += 1
                begun_s, ended_s = begun_s or time.monotonic(), time.monotonic()
            if message.attempt > 1 or not is_dropped(int(number), task.drop_every):
                message.ack()
                acknowledged.add(number)
            if len(acknowledged) == task.messages:
                break
    pace = round(first / max(ended_s - begun_s, 0.001))
    return Worked(acknowledged=len(acknowledged), messages_per_s=pace, raw_messages_per_s=raw)


def is_dropped(number: int, every: int) -> bool:
    """Whether the message is forgotten when it comes first."""
    return every > 0 and number % every == 0


def _read_raw(settings: Settings, task: Task) -> int:
    consumer = Consumer(
        librdkafka_properties(settings) | {"group.id": "raw", "auto.offset.reset": "earliest"}
    )
    begun: list[float] = []
    # From here on it fetches, also what nobody has asked for yet.
    consumer.subscribe([task.queue], on_assign=lambda *_: begun.append(time.monotonic()))
    read = 0
    while read < task.messages and (some := consumer.consume(BATCH, timeout=PATIENCE_S)):
        read += sum(1 for each in some if not each.error() and each.value())
    taken_s = time.monotonic() - min(begun, default=0.0)
    consumer.close()
    return round(read / max(taken_s, 0.001))


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
