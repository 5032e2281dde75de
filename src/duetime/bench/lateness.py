"""`duetime bench lateness`: how late messages are that go the whole way through a warm pipeline.

The pipeline runs in this process, as it does in that of `duetime up`; this process only waits while
a run lasts. The load generator is a process of its own, and what came is read after the run.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from duetime.bench.appends import Appends
from duetime.bench.load import LoadPlan, Sent, start_load
from duetime.bench.reader import Arrivals, CommittedReader, read_arrivals
from duetime.bench.report import Report, Second, report, timeline
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations, destination
from duetime.config import Settings
from duetime.local.jars import pipeline_jars
from duetime.pipeline.runner import Pipeline

#: How long the pipeline may take to know a new destination, in seconds.
KNOWN_S = 3.0

#: How long after the last message's time is still waited for it, in seconds.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: what was sent, and what came of it."""

    sent: Sent
    report: Report
    seconds: list[Second]

    def figures(self) -> dict[str, int | float | None]:
        """The result as it is shown."""
        return {
            **asdict(self.report),
            "rate_reached": self.sent.rate_reached,
            "load_cores": self.sent.cores,
            "load_behind_ms": self.sent.behind_ms,
        }


@dataclass(frozen=True, slots=True)
class Targets:
    """How many destinations the messages are for, in turn; some of which do not exist."""

    topics: int = 1
    missing: int = 0

    def reached(self, sent: int) -> int:
        """How many of so many messages have a destination: the missing ones are the last."""
        rounds, more = divmod(sent, self.topics)
        there = self.topics - self.missing
        return rounds * there + min(more, there)


ONE = Targets()


def lateness(
    settings: Settings, plan: LoadPlan, runs: int, warm_up_s: float, targets: Targets
) -> list[Run]:
    """Send the plan through a warm pipeline, so many times, one after the other.

    A load of its kind goes first, for so long, and is not measured: the JVM goes on compiling for
    some minutes after the pipeline is ready.
    """
    with running_pipeline(settings):
        if warm_up_s:
            before = round(plan.rate * warm_up_s)
            deliver(settings, replace(plan, messages=before, label="before"), "before", targets)
        names = [f"run-{number}" for number in range(1, runs + 1)]
        return [run_once(settings, plan, name, targets) for name in names]


@contextmanager
def running_pipeline(settings: Settings) -> Iterator[Pipeline]:
    """A warm pipeline, watched as `duetime run` watches it."""
    say("starting the pipeline and warming it up ...")
    with Pipeline(settings, jars=pipeline_jars()) as pipeline:
        watching = threading.Thread(target=pipeline.watch, daemon=True)
        watching.start()
        yield pipeline
        pipeline.ask_to_stop()
        watching.join()


def run_once(settings: Settings, plan: LoadPlan, name: str, targets: Targets) -> Run:
    """Send the plan to new destinations, wait until all of it came, and read it there."""
    if settings.transactional_delivery:
        arrivals, sent = _committed(settings, plan, name, targets)
    else:
        topics, sent = deliver(settings, plan, name, targets)
        arrivals = read_arrivals(_there(settings, plan), topics)
    return Run(sent=sent, report=report(arrivals, sent.sent), seconds=timeline(arrivals))


def _committed(
    settings: Settings, plan: LoadPlan, name: str, targets: Targets
) -> tuple[Arrivals, Sent]:
    topics = [destination(settings, f"{name}-{number}") for number in range(targets.topics)]
    with CommittedReader(settings, topics) as reader:
        _, sent = deliver(settings, plan, name, targets)
        # Transactions leave marks, so that there are more offsets than records.
        if not reader.wait_for(sent.sent, PATIENCE_S):
            say(f"not all were committed within {PATIENCE_S:.0f} s")
        return reader.arrivals, sent


def deliver(
    settings: Settings, plan: LoadPlan, name: str, targets: Targets = ONE
) -> tuple[list[str], Sent]:
    """Send the plan to new destinations; returns when all of it came, or should have long ago.

    `sent` counts what is for a destination that exists.
    """
    names = [f"{name}-{number}" for number in range(targets.topics)]
    there = names[: targets.topics - targets.missing]
    topics = create_destinations(settings, there, cluster=plan.cluster)
    # The pipeline looks for new topics every second; what it does not know is tried again later.
    time.sleep(KNOWN_S)
    say(f"sending {plan.messages:,} messages to {topics[0]} ...")
    nowhere = [destination(settings, each) for each in names[len(there) :]]
    with start_load(settings, replace(plan, destinations=(*topics, *nowhere))) as load:
        sent = load.wait()
    sent = replace(sent, sent=targets.reached(sent.sent))
    left_s = sent.last_due_ms / 1_000 - time.time()
    if not Appends(_there(settings, plan), topics).wait_for(sent.sent, left_s + PATIENCE_S):
        say(f"not all came within {PATIENCE_S:.0f} s of their time")
    return topics, sent


def _there(settings: Settings, plan: LoadPlan) -> Settings:
    return settings.at(plan.cluster) if plan.cluster else settings
