"""`duetime bench queue`: how fast a worker is, and how soon what it drops comes again.

Two queues through one warm pipeline. On the first, all messages are there when its worker process
begins, and none is dropped: that is its pace, beside that of a plain consumer. On the second they
come at a steady rate, and some are dropped when they come first. What came again, and when, is read
from the topic and from its markers after the run.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from confluent_kafka import Message, Producer

from duetime.admin import create_topics
from duetime.bench.lateness import running_pipeline
from duetime.bench.load import revealed
from duetime.bench.report import percentile
from duetime.bench.say import say
from duetime.bench.sender import bursts
from duetime.bench.testbed import destination
from duetime.bench.worker import Task, Worked, is_dropped
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError
from duetime.kmq.markers import REDELIVERY_COUNT, MarkerKey, decoded_count, decoded_timeout
from duetime.message import DUE_ID
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import RangeReader, headers_of
from duetime.tables import QueueSettings

#: How long messages come and are dropped before anything is measured, in seconds: the tracker's
#: first batches take seconds each.
WARM_S = 30

PARTITIONS = 8

#: Messages that may wait in the sender.
LOCAL = 50_000

#: How long after a time-out a message may come again until it counts as lost, in seconds.
LOST_S = 60.0

#: A worker that does fewer messages a second hangs.
LEAST_RATE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is worked on."""

    messages: int
    #: Messages a second, where they come at a rate.
    rate: float
    drop_every: int
    timeout_ms: int
    value_bytes: int

    def task(self, queue: str) -> Task:
        """For a worker that drops."""
        return Task(
            queue=queue,
            messages=self.messages,
            drop_every=self.drop_every,
            timeout_ms=self.timeout_ms,
            patience_s=self.patience_s,
        )

    @property
    def patience_s(self) -> float:
        """For how long a worker waits for one more message."""
        return self.timeout_ms / 1_000 + LOST_S

    @property
    def most_s(self) -> float:
        """How long a worker's process may take: it ends by itself long before."""
        return self.messages / min(self.rate, LEAST_RATE) + 5 * self.patience_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRun:
    """One run."""

    messages: int
    pace: Worked
    #: Messages of both queues that nobody acknowledged.
    lost: int
    redelivered: int
    #: Those that were acknowledged before: not dropped, or dropped once and then worked on.
    wrongly_redelivered: int
    #: How long after their deadline they were appended again, in ms, the least first.
    late_ms: list[int]

    def figures(self) -> dict[str, int | float | None]:
        """The result as it is shown."""
        raw = self.pace.raw_messages_per_s
        return {
            "messages": self.messages,
            "messages_per_s": self.pace.messages_per_s,
            "raw_messages_per_s": raw,
            "ratio": round(self.pace.messages_per_s / raw, 3),
            "lost": self.lost,
            "redelivered": self.redelivered,
            "wrongly_redelivered": self.wrongly_redelivered,
            "redelivery_lateness_p50_ms": percentile(self.late_ms, 50),
            "redelivery_lateness_p99_ms": percentile(self.late_ms, 99),
        }


def run_queue(settings: Settings, plan: Plan, runs: int) -> list[QueueRun]:
    """Work on so many messages, so many times, through one warm pipeline."""
    kinds = ["warm", *(f"{kind}-{nth}" for nth in range(runs) for kind in ("pace", "drop"))]
    names = {kind: destination(settings, kind) for kind in kinds}
    own = QueueSettings(partitions=PARTITIONS, redeliveries=100)
    settings = settings.model_copy(update={"queues": dict.fromkeys(names.values(), own)})
    create_topics(settings)
    with running_pipeline(settings):
        say(f"warming up for {WARM_S} s ...")
        warm = replace(plan, messages=max(1, int(plan.rate * WARM_S)))
        _come_and_work(settings, names["warm"], warm)
        return [
            _run(settings, names[f"pace-{nth}"], names[f"drop-{nth}"], plan) for nth in range(runs)
        ]


def _run(settings: Settings, pace_queue: str, drop_queue: str, plan: Plan) -> QueueRun:
    say(f"{plan.messages:,} messages that are there ...")
    _fill(settings, pace_queue, plan, rate=0)
    task = replace(plan.task(pace_queue), drop_every=0, is_compared=True)
    pace = _work(settings, task, plan.most_s)
    say(f"{plan.messages:,} messages that come, {plan.rate:,.0f} a second ...")
    worked = _come_and_work(settings, drop_queue, plan)
    say("reading what came again ...")
    deadlines_ms = _deadlines_ms(settings, drop_queue)
    topics = pace_queue, drop_queue
    again = [one for name in topics for one in _records(settings, name) if _is_again(one)]
    wrongly = [one for one in again if is_wrong(one, pace_queue, plan.drop_every)]
    late_ms = [
        one.timestamp()[1] - deadlines_ms[_came_from(one)]
        for one in again
        if one.topic() == drop_queue
    ]
    return QueueRun(
        messages=plan.messages,
        pace=pace,
        lost=2 * plan.messages - pace.acknowledged - worked.acknowledged,
        redelivered=len(again),
        wrongly_redelivered=len(wrongly),
        late_ms=sorted(late_ms),
    )


def _come_and_work(settings: Settings, queue: str, plan: Plan) -> Worked:
    """Work on messages while they come."""
    arguments = settings, queue, plan
    coming = threading.Thread(target=_fill, args=arguments, kwargs={"rate": plan.rate})
    coming.start()
    worked = _work(settings, plan.task(queue), plan.most_s)
    coming.join()
    return worked


def _fill(settings: Settings, queue: str, plan: Plan, *, rate: float) -> None:
    """Send them, in turn to each partition; at a rate of 0 as fast as it goes."""
    producer = Producer(librdkafka_properties(settings) | {"linger.ms": 5})
    for numbers, _ in bursts(plan.messages, rate):
        for number in numbers:
            value = str(number).ljust(plan.value_bytes).encode()
            producer.produce(queue, value, partition=number % PARTITIONS)
        # Its local queue has room for 100,000.
        producer.poll(0 if len(producer) < LOCAL else 1)
    if producer.flush(60):
        raise KafkaError("not all messages were acknowledged: is the broker's disk full?")


def _work(settings: Settings, task: Task, most_s: float) -> Worked:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "duetime.bench.worker"],
            input=json.dumps({"settings": revealed(settings), "task": asdict(task)}),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=most_s,
        )
    except subprocess.TimeoutExpired as error:
        raise KafkaError(
            f"the worker did not end within {most_s:.0f} s: is the broker up?"
        ) from error
    if done.returncode:
        raise KafkaError("the worker failed, with the words above: is the broker up?")
    return Worked(**json.loads(done.stdout))


def _deadlines_ms(settings: Settings, queue: str) -> dict[MarkerKey, int]:
    """By the last start marker of each message."""
    deadlines_ms = {}
    for marker in _records(settings, settings.queue(queue).markers_topic(queue)):
        key, timeout_ms = MarkerKey.decoded(marker.key()), decoded_timeout(marker.value())
        if key is not None and timeout_ms is not None:
            deadlines_ms[key] = marker.timestamp()[1] + timeout_ms
    return deadlines_ms


def _records(settings: Settings, topic: str) -> Iterator[Message]:
    offsets = Offsets(settings, f"{settings.namespace}.bench")
    places = offsets.readable_places(topic)
    ends = offsets.ends(places)
    offsets.close()
    with RangeReader(settings) as reader:
        yield from reader.records([OffsetRange(*place, 0, ends[place]) for place in places])


def _by_name(record: Message) -> dict[str, bytes | None]:
    return dict(headers_of(record))


def _is_again(record: Message) -> bool:
    return REDELIVERY_COUNT in _by_name(record)


def is_wrong(again: Message, pace_queue: str, drop_every: int) -> bool:
    """Whether it was acknowledged before it came again: only first deliveries are dropped."""
    is_first_time = decoded_count(_by_name(again)[REDELIVERY_COUNT]) == 1
    was_dropped = again.topic() != pace_queue and is_dropped(_number(again), drop_every)
    return not (was_dropped and is_first_time)


def _came_from(record: Message) -> MarkerKey:
    """The place of the delivery before this one: its id ends in it."""
    *_, partition, offset = (_by_name(record)[DUE_ID] or b"").decode().split(".")
    return MarkerKey(int(partition), int(offset))


def _number(record: Message) -> int:
    return int((record.value() or b"").split(maxsplit=1)[0])
