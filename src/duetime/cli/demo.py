"""demo: a temporary Kafka, 1,000 messages, and their lateness. Leaves nothing behind."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from duetime.bench.loadgen import LoadPlan, start_load
from duetime.bench.testbed import (
    COUNTS,
    DEFECTS,
    Appends,
    Figures,
    create_destinations,
    open_testbed,
    report,
)
from duetime.cli.logs import begin_log
from duetime.cli.run import PipelineThread, interruptible
from duetime.cli.terminal import console, histogram, table
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.local.jars import find_java, pipeline_jars

MESSAGES = 1_000

#: Messages sent a second.
RATE = 1_000

#: Least and most delay, in ms: some go through the lanes, most through the wheel.
DELAY_MS = (200, 15_000)

TOPICS = ("reminders", "retries")

#: Time to wait after the last due time, in seconds.
ARRIVAL_TIMEOUT_S = 15.0

#: Interval between two updates of the progress: on a terminal, and in lines, in seconds.
UPDATE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 3.0

#: Lower ends of the rows of the lateness histogram, in ms.
LATENESS_MS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


def demo() -> None:
    """Deliver 1,000 messages by a temporary Kafka.

    Shows their lateness, and leaves nothing behind.

    Exit code 1 if a message is lost, early or duplicated.
    """
    begin_log(logging.WARNING)
    find_java()
    out = console()
    with interruptible():
        made, late_ms = _run(out)
    latenesses = [made[each] for each in ("p50_ms", "p99_ms", "max_ms")]
    row = table(*COUNTS, "lateness p50", "p99", "max", justify="right")
    row.add_row(
        *(f"{made[each]:,}" for each in COUNTS),
        *("-" if late is None else f"{late:,} ms" for late in latenesses),
    )
    out.print()
    out.print(row)
    out.print("\nlateness: time from the due time of a message until it was in its topic\n")
    out.print(histogram(by_lateness(late_ms)))
    if any(made[each] for each in DEFECTS):
        raise typer.Exit(1)


def by_lateness(late_ms: Sequence[int]) -> list[tuple[str, int]]:
    """Count the messages by lateness, in rows up to the latest."""
    rows = []
    for low, high in zip(LATENESS_MS, (*LATENESS_MS[1:], sys.maxsize), strict=True):
        name = f"{low} ms" if high - low == 1 else f"{low} to {high - 1} ms"
        count = sum(1 for each in late_ms if low <= each < high)
        rows.append((f"{low} ms and more" if high == sys.maxsize else name, count))
    while len(rows) > 1 and not rows[-1][1]:
        rows.pop()
    early = sum(1 for each in late_ms if each < 0)
    return [("early", early), *rows] if early else rows


def _run(out: Console) -> tuple[Figures, Sequence[int]]:
    # Spark takes a second to import, and most commands do not need it.
    from duetime.pipeline.service import Pipeline  # noqa: PLC0415

    with ExitStack() as bed, ExitStack() as running:
        with _step(out, "starting Kafka in a temporary directory"):
            # Also if the configuration has another store: nothing of the demo goes there.
            settings = bed.enter_context(open_testbed(None, store="kafka"))
            topics = create_destinations(settings, TOPICS)
        with _step(out, "starting Spark, and warming it up"):
            thread = PipelineThread(Pipeline(settings, jars=pipeline_jars()))
            running.enter_context(thread).wait_until_ready()
        arrived = _send(settings, topics, out)
        with _step(out, "stopping"):
            running.close()
        arrivals = arrived.arrivals()
        return report(arrivals, MESSAGES), [each.late_ms for each in arrivals]


def _send(settings: Settings, topics: Sequence[str], out: Console) -> Appends:
    """Send the messages, and wait until all have arrived, or should have."""
    plan = LoadPlan(
        messages=MESSAGES, rate=RATE, delay_ms=DELAY_MS, destinations=tuple(topics), label="demo"
    )
    out.print(f"sending {MESSAGES:,} messages, due in 0.2 to 15 s, to {' and '.join(TOPICS)}")
    arrived = Appends(settings, topics)
    with start_load(settings, plan) as load:
        sent = load()
    with _progress(out) as update:

        def have_all_arrived() -> bool:
            count = arrived.count()
            update(count)
            return count >= MESSAGES

        timeout_s = sent.last_due_ms / 1_000 + ARRIVAL_TIMEOUT_S - time.time()
        wait_until(have_all_arrived, timeout_s, UPDATE_INTERVAL_S)
    return arrived


@contextmanager
def _step(out: Console, text: str) -> Iterator[None]:
    """Show what the block does, and how long it took."""
    started_s = time.monotonic()
    if out.is_terminal:
        with out.status(text):
            yield
    else:
        out.print(f"{text} ...")
        yield
    out.print(f"✓ {text} ({time.monotonic() - started_s:.0f} s)")


@contextmanager
def _progress(out: Console) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows the number of messages that have arrived."""
    if out.is_terminal:
        columns = (TextColumn("delivered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=out) as progress:
            task = progress.add_task("delivered", total=MESSAGES)
            yield lambda count: progress.update(task, completed=count)
        return
    next_line_s = 0.0

    def print_line(count: int) -> None:
        nonlocal next_line_s
        if count >= MESSAGES or time.monotonic() >= next_line_s:
            next_line_s = time.monotonic() + LINE_INTERVAL_S
            out.print(f"delivered {count:,} of {MESSAGES:,}")

    yield print_line
