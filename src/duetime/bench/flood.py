"""`duetime bench flood`: a million messages due in one second, and how punctual others are then.

The flood is written straight into a far slot of the wheel, where it would wait if it had been sent
long before: so it is cascaded first, and then released. The others go the whole way, at a steady
rate, to a topic of their own.
"""

import math
import time
from dataclasses import dataclass, replace

from duetime.bench.appends import Appends
from duetime.bench.lateness import KNOWN_S, PATIENCE_S, deliver, running_pipeline
from duetime.bench.load import LoadPlan, start_load
from duetime.bench.memory import driver_rss_mb
from duetime.bench.records import Shape
from duetime.bench.report import Report, measure
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import fill
from duetime.clock import SystemClock
from duetime.config import Settings

#: The others wait in lanes and slots.
DELAY_MS = (500, 15_000)

#: The flood is due so long after it begins to be written, in seconds: it is two levels up then.
AHEAD_S = 90

#: How long the others go on after it, in seconds.
AFTER_S = 60

#: How long the others go before all this, so that the JVM is warm, in seconds.
BEFORE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """What came of both."""

    flood: Report
    others: Report
    rss_mb: int

    def figures(self) -> dict[str, int | None]:
        """The result as it is shown."""
        both = self.flood, self.others
        return {
            "sent": sum(each.sent for each in both),
            "lost": sum(each.lost for each in both),
            "duplicated": sum(each.duplicated for each in both),
            "early": sum(each.early for each in both),
            "others_p50_ms": self.others.p50_ms,
            "others_p99_ms": self.others.p99_ms,
            "others_max_ms": self.others.max_ms,
            "flood_max_ms": self.flood.max_ms,
            "driver_rss_mb": self.rss_mb,
        }


def flood(settings: Settings, messages: int, rate: float) -> Flood:
    """Let so many messages be due in one second, beside a steady rate of others."""
    others = LoadPlan(
        messages=round(rate * BEFORE_S), rate=rate, delay_ms=DELAY_MS, destinations=()
    )
    with running_pipeline(settings) as pipeline:
        deliver(settings, others, "before")
        to_flood, to_others = create_destinations(settings, ["flood", "others"])
        Appends(settings, [to_flood, to_others]).wait_for(0, KNOWN_S)
        time.sleep(KNOWN_S)
        beside = replace(
            others, messages=round(rate * (AHEAD_S + AFTER_S)), destinations=(to_others,)
        )
        with start_load(settings, beside) as load:
            flooded = fill(settings, _all_at_once(messages, to_flood))
            sent = load.wait()
        say("waiting for the last of both ...")
        arrived = Appends(settings, [to_flood, to_others])
        if not arrived.wait_for(flooded.sent + sent.sent, PATIENCE_S):
            say(f"not all came within {PATIENCE_S:.0f} s")
        rss_mb = driver_rss_mb(pipeline.spark)
    return Flood(
        flood=measure(settings, [to_flood], flooded.sent),
        others=measure(settings, [to_others], sent.sent),
        rss_mb=rss_mb,
    )


def _all_at_once(messages: int, topic: str) -> LoadPlan:
    second_ms = math.ceil(SystemClock().now_ms() / 1_000 + AHEAD_S) * 1_000
    return LoadPlan(
        messages=messages,
        rate=0,
        delay_ms=(0, 0),
        due_ms=(second_ms, second_ms + 999),
        destinations=(topic,),
        shape=Shape.WAITING,
        label="flood",
    )
