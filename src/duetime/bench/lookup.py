"""`duetime bench lookup`: how fast one message is found, cancelled and rescheduled in a large slot.

The load generator writes all messages straight into one slot of the wheel, beside a running
pipeline, and the pipeline indexes the slot. Then single messages are looked up as the API and the
command line do. Each answer is compared with what is known of that message.
"""

import random
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

from duetime.bench.lateness import running_pipeline
from duetime.bench.load import LoadPlan
from duetime.bench.records import Shape
from duetime.bench.report import percentile
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import TIMEOUT_S, fill
from duetime.cancelling import cancel_surely
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import DuetimeError, KafkaError
from duetime.message import MessageId
from duetime.pipeline.blocks import LEAST_RECORDS
from duetime.reschedule import reschedule
from duetime.stores import Found
from duetime.stores.index import IndexReader
from duetime.stores.offsets import Offsets
from duetime.stores.opening import open_reader
from duetime.stores.records import RangeReader
from duetime.topics import TopicNames

#: When the messages are due, in ms from now: in a slot that is some days wide, on level 3.
DELAY_MS = 10 * 24 * 3_600_000

#: To when a message is rescheduled.
LATER = timedelta(days=30)

#: How often is looked whether the slot is indexed, in seconds.
LOOK_S = 1.0

#: What is looked up is drawn alike in each run.
SEED = 17

LABEL = "lookup"


@dataclass(slots=True)
class Answers:
    """How long requests of one kind took, each in ms, and how many answers were wrong."""

    took_ms: list[int] = field(default_factory=list)
    wrong: int = 0

    def figures(self, name: str) -> dict[str, int | None]:
        """Return the result as it is shown."""
        ordered = sorted(self.took_ms)
        return {
            f"{name}_p50_ms": percentile(ordered, 50),
            f"{name}_p99_ms": percentile(ordered, 99),
            f"{name}_max_ms": percentile(ordered, 100),
        }


def answers(question: Callable[[MessageId], bool], ids: Iterable[MessageId]) -> Answers:
    """Ask about each message; the question says whether the answer was right."""
    found = Answers()
    for each in ids:
        began_s = time.monotonic()
        try:
            is_right = question(each)
        except DuetimeError as error:
            say(f"wrong answer: {error}")
            is_right = False
        found.took_ms.append(round((time.monotonic() - began_s) * 1_000))
        found.wrong += not is_right
    return found


def lookup(
    settings: Settings, messages: int, times: int, value_bytes: int
) -> dict[str, int | float | None]:
    """Fill one slot, wait until it is indexed, and look up so many messages in each way.

    Raises KafkaError where the slot is not indexed.
    """
    (topic,) = create_destinations(settings, [LABEL])
    due_ms = SystemClock().now_ms() + DELAY_MS
    plan = LoadPlan(
        messages=messages,
        rate=0,
        delay_ms=(0, 0),
        due_ms=(due_ms, due_ms),
        destinations=(topic,),
        value_bytes=value_bytes,
        shape=Shape.WAITING,
        label=LABEL,
    )
    with running_pipeline(settings):
        fill(settings, plan)
        began_s = time.monotonic()
        blocks = _wait_until_indexed(settings, due_ms)
        indexed_s = round(time.monotonic() - began_s, 1)
        say(f"indexed in {indexed_s} s, looking up {times} messages in each way ...")
        asked = _ask_all(settings, due_ms, messages, times)
    figures: dict[str, int | float | None] = {
        "messages": messages,
        "indexed_s": indexed_s,
        "blocks": blocks,
        "wrong": sum(each.wrong for each in asked.values()),
    }
    for name, each in asked.items():
        figures |= each.figures(name)
    return figures


def _ask_all(settings: Settings, due_ms: int, messages: int, times: int) -> dict[str, Answers]:
    """Ask about other messages in each way, and about what was cancelled once more."""
    drawn = random.Random(SEED).sample(range(messages), min(messages, 3 * times))  # noqa: S311 (no secret)
    ids = [_id(due_ms, f"{LABEL}-{number}") for number in drawn]
    # Fewer are rescheduled: each takes a producer of its own.
    kept, cancelled, moved = ids[::3], ids[1::3], ids[2::12]
    unknown = [_id(due_ms, f"none-{number}") for number in range(times)]
    clock = SystemClock()

    def cancel(identity: MessageId) -> bool:
        cancel_surely(identity, settings, clock)
        return True

    def move(identity: MessageId) -> bool:
        again = reschedule(str(identity), in_=LATER, settings=settings, clock=clock)
        return again != str(identity)

    with closing(open_reader(settings)) as reader:

        def find(identity: MessageId) -> Found | None:
            return reader.find(identity, clock.now_ms())

        def is_waiting(identity: MessageId) -> bool:
            return (found := find(identity)) is not None and not found.cancelled

        def is_cancelled(identity: MessageId) -> bool:
            return (found := find(identity)) is not None and found.cancelled

        return {
            "find": answers(is_waiting, kept),
            "unknown": answers(lambda each: find(each) is None, unknown),
            "cancel": answers(cancel, cancelled),
            "cancelled": answers(is_cancelled, cancelled),
            "reschedule": answers(move, moved),
            # Those before have been taken in by now.
            "moved": answers(is_cancelled, moved[: len(moved) // 2]),
        }


def _id(due_ms: int, unique: str) -> MessageId:
    return MessageId(due_ms=due_ms, unique=unique)


def _wait_until_indexed(settings: Settings, due_ms: int) -> int:
    """Wait until less is left than is indexed; return of how many blocks the index is."""
    now_ms, deadline = SystemClock().now_ms(), time.monotonic() + TIMEOUT_S
    slot = settings.wheel.place(due_ms, now_ms)
    names = TopicNames(settings)
    place = names.wheel(slot.level), settings.wheel.partition(slot)
    with (
        closing(Offsets(settings, names.index_group)) as offsets,
        RangeReader(settings, group=names.index_group) as reader,
    ):
        while time.monotonic() < deadline:
            blocks = IndexReader(reader).directory(place).blocks
            left = offsets.ends([place])[place] - (blocks[-1].end if blocks else 0)
            if left < LEAST_RECORDS:
                return len(blocks)
            time.sleep(LOOK_S)
    raise KafkaError(f"{left:,} records are not indexed after {TIMEOUT_S:.0f} s: see the log")
