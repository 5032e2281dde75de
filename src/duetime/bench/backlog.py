"""A backlog: messages that wait, far from due, while something else is measured."""

import time

from duetime.bench.load import LoadPlan
from duetime.bench.records import Shape
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import fill
from duetime.config import Settings
from duetime.pipeline.written import CLOCKS_MS

#: When they are due, in ms after they are written: past the end of a benchmark, up to 30 days.
DELAY_MS = (2 * 3_600_000, 30 * 24 * 3_600_000)


def fill_backlog(settings: Settings, messages: int, value_bytes: int = 200) -> None:
    """Write so many messages, or none, straight into the slots of the wheel. Raises KafkaError.

    Returns when they are no more of what a recovery reads back: messages that wait, and no others.
    """
    if not messages:
        return
    (topic,) = create_destinations(settings, ["backlog"])
    plan = LoadPlan(
        messages=messages,
        rate=0,
        delay_ms=DELAY_MS,
        destinations=(topic,),
        value_bytes=value_bytes,
        shape=Shape.WAITING,
    )
    fill(settings, plan)
    time.sleep(CLOCKS_MS / 1_000)
