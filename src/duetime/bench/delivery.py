"""A warm pipeline in this process, as in that of `duetime up`, and loads that go through it.

This process only waits while a load lasts.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from duetime.bench.loadgen import LoadPlan, Sent, run_load
from duetime.bench.testbed import (
    Appends,
    Arrival,
    Figures,
    committed_arrivals,
    create_destinations,
    destination,
    progress,
    report,
)
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.core.topics import DAY_MS, HOUR_MS
from duetime.local.jars import pipeline_jars
from duetime.pipeline.recovery.deduplicator import CLOCKS_MS
from duetime.pipeline.service import Pipeline

#: How long the pipeline may take to discover a new destination, and how long to wait for messages
#: after the last due time, in seconds.
DISCOVERY_S, GRACE_S = 3.0, 30.0


@contextmanager
def running_pipeline(settings: Settings) -> Iterator[Pipeline]:
    """A warm pipeline, watched as `duetime run` watches it."""
    progress("starting the pipeline and warming it up ...")
    with Pipeline(settings, jars=pipeline_jars()) as pipeline:
        watching = threading.Thread(target=pipeline.watch, daemon=True)
        watching.start()
        yield pipeline
        pipeline.ask_to_stop()
        watching.join()


def deliver(
    settings: Settings, plan: LoadPlan, name: str, topics: int = 1, missing: int = 0
) -> tuple[Appends, int, Sent]:
    """Send the plan to new topics in turn, and wait until all has arrived or is overdue.

    The last `missing` topics are not created. Return what was appended to the others, and the
    number of messages sent to them.
    """
    names, existing = [f"{name}-{number}" for number in range(topics)], topics - missing
    found = create_destinations(settings, names[:existing], cluster=plan.cluster)
    arrived = Appends(settings.at(plan.cluster), found)
    # The pipeline discovers topics every second; a message for an unknown one is retried later.
    time.sleep(DISCOVERY_S)
    everything = tuple(destination(settings, each) for each in names)
    sent = run_load(settings, replace(plan, destinations=everything))
    count = sum(len(range(each, plan.messages, topics)) for each in range(existing))
    arrived.wait_for(count, sent.last_due_ms / 1_000 - time.time() + GRACE_S)
    return arrived, count, sent


def fill_backlog(settings: Settings, messages: int, value_bytes: int = 200) -> None:
    """Write this many pending messages straight into the wheel. Raises KafkaError.

    Returns when they are old enough that a recovery does not read them back.
    """
    if messages:
        # They are due after the end of a benchmark.
        delay_ms = (2 * HOUR_MS, 30 * DAY_MS)
        run_load(
            settings, pending_load(settings, "backlog", messages, value_bytes, delay_ms=delay_ms)
        )
        time.sleep(CLOCKS_MS / 1_000)


def pending_load(
    settings: Settings,
    name: str,
    messages: int,
    value_bytes: int = 200,
    **due: Any,  # noqa: ANN401 (instants or delays)
) -> LoadPlan:
    """Return a load of pending messages for a new topic."""
    topics = tuple(create_destinations(settings, [name]))
    due |= {"destinations": topics, "value_bytes": value_bytes, "label": name}
    return LoadPlan(messages=messages, shape="pending", **due)


def deliver_before(settings: Settings, plan: LoadPlan, seconds: float, *topics: int) -> None:
    """Deliver the same load for `seconds` seconds, to warm up what is measured after it."""
    if seconds:
        before = replace(plan, messages=round(plan.rate * seconds), label="before")
        deliver(settings, before, "before", *topics)


def measured(
    settings: Settings, plan: LoadPlan, name: str, topics: int = 1, missing: int = 0
) -> tuple[Figures, Sequence[Arrival]]:
    """Deliver the plan as `deliver` does; return the report and the arrivals."""
    deliver_all = partial(deliver, settings, plan, name, topics, missing)
    if settings.transactional_delivery:
        names = [destination(settings, f"{name}-{number}") for number in range(topics)]
        with committed_arrivals(settings, names) as arrivals:
            _, count, sent = deliver_all()
            # Transactions write markers, so that there are more offsets than records.
            if not wait_until(lambda: len(arrivals) >= count, GRACE_S):
                progress(f"some messages were not committed within {GRACE_S:.0f} s")
    else:
        arrived, count, sent = deliver_all()
        arrivals = arrived.arrivals()
    return report(arrivals, count) | sent.figures, arrivals
