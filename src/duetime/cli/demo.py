"""demo: a Kafka of its own, 1,000 messages, and how punctual they were. Leaves nothing behind."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from duetime.bench.appends import Appends
from duetime.bench.load import LoadPlan, Sent, start_load
from duetime.bench.reader import read_arrivals
from duetime.bench.report import COUNTS, Report, report
from duetime.bench.testbed import create_destinations, testbed
from duetime.cli.display import console, histogram
from duetime.cli.logs import begin_log
from duetime.cli.service import Service, interruptible
from duetime.config import Settings
from duetime.local.jars import pipeline_jars
from duetime.local.java import find_java

MESSAGES = 1_000

#: How many are sent a second.
RATE = 1_000

#: Due this long after they are sent, in ms: some go through the lanes, most through the wheel.
DELAY_MS = (200, 15_000)

TOPICS = ("reminders", "retries")

#: How long after the last message's time is still waited, in seconds.
PATIENCE_S = 15.0

#: How often the progress is looked at, in seconds.
LOOK_S = 0.2

#: How often it is said where there is no terminal to draw on, in seconds.
SAY_S = 3.0

#: Upper ends of the rows of the lateness histogram, in ms.
LATENESS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


LATENESSES = ("lateness p50", "p99", "max")


def demo() -> None:
    """Send 1,000 messages through a temporary Kafka.

    Exit code 1 if one is lost, early or double. Leaves nothing behind.
    """
    begin_log(logging.WARNING)
    find_java()
    out = console()
    with interruptible():
        made, late_ms = _run(out)
    out.print()
    out.print(_outcome(made))
    out.print("\nlateness: how long after its time a message was in its topic\n")
    out.print(histogram(by_lateness(late_ms)))
    if not made.flawless:
        raise typer.Exit(1)


def by_lateness(late_ms: Sequence[int]) -> list[tuple[str, int]]:
    """How many were how late, in rows up to the latest."""
    edges = zip((0, *LATENESS_MS), (*LATENESS_MS, sys.maxsize), strict=True)
    rows = [(_row_name(low, high), _between(late_ms, low, high)) for low, high in edges]
    while len(rows) > 1 and not rows[-1][1]:
        rows.pop()
    early = _between(late_ms, -sys.maxsize, 0)
    return [("early", early), *rows] if early else rows


def _between(late_ms: Sequence[int], low: int, high: int) -> int:
    return sum(1 for each in late_ms if low <= each < high)


def _row_name(low: int, high: int) -> str:
    if high == sys.maxsize:
        return f"{low} ms and more"
    return f"{low} ms" if high - low == 1 else f"{low} to {high - 1} ms"


def _run(out: Console) -> tuple[Report, Sequence[int]]:
    with ExitStack() as bed:
        with _step(out, "starting Kafka in a temporary directory"):
            # Also where the configuration has another store: nothing of the demo goes there.
            settings = bed.enter_context(testbed(None, store="kafka"))
            topics = create_destinations(settings, TOPICS)
        sent = _through_pipeline(settings, topics, out)
        arrivals = read_arrivals(settings, topics)
        return report(arrivals, sent.sent), arrivals.late_ms


def _through_pipeline(settings: Settings, topics: Sequence[str], out: Console) -> Sent:
    # Here and not above, because Spark takes a second to import, and most commands need none.
    from duetime.pipeline.runner import Pipeline  # noqa: PLC0415

    with ExitStack() as running:
        with _step(out, "starting Spark, and warming it up"):
            service = Service(Pipeline(settings, jars=pipeline_jars()))
            running.enter_context(service).wait_until_ready()
        sent = _send(settings, topics, out)
        with _step(out, "stopping"):
            running.close()
        return sent


def _send(settings: Settings, topics: Sequence[str], out: Console) -> Sent:
    """Send, and wait until all came or should have come."""
    plan = LoadPlan(
        messages=MESSAGES, rate=RATE, delay_ms=DELAY_MS, destinations=tuple(topics), label="demo"
    )
    out.print(f"sending {MESSAGES:,} messages, due in 0.2 to 15 s, to {' and '.join(TOPICS)}")
    arrived = Appends(settings, topics)
    with start_load(settings, plan) as load:
        sent = load.wait()
    until_s = sent.last_due_ms / 1_000 + PATIENCE_S
    with _progress(out) as update:
        while (count := arrived.count()) < sent.sent and time.time() < until_s:
            update(count)
            time.sleep(LOOK_S)
        update(count)
    return sent


@contextmanager
def _step(out: Console, text: str) -> Iterator[None]:
    """Say what is being waited for, and how long it took."""
    begun_s = time.monotonic()
    if out.is_terminal:
        with out.status(text):
            yield
    else:
        out.print(f"{text} ...")
        yield
    out.print(f"✓ {text} ({time.monotonic() - begun_s:.0f} s)")


@contextmanager
def _progress(out: Console) -> Iterator[Callable[[int], None]]:
    """Gives what shows how many messages have come."""
    if not out.is_terminal:
        yield _Said(out)
        return
    columns = (TextColumn("delivered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out) as progress:
        task = progress.add_task("delivered", total=MESSAGES)
        yield lambda count: progress.update(task, completed=count)


class _Said:
    """The progress in lines, some seconds apart."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._next_s = 0.0

    def __call__(self, count: int) -> None:
        if count >= MESSAGES or time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SAY_S
            self._out.print(f"delivered {count:,} of {MESSAGES:,}")


def _outcome(made: Report) -> Table:
    """One row."""
    counts = (made.sent, made.delivered, made.lost, made.duplicated, made.early)
    latenesses = (made.p50_ms, made.p99_ms, made.max_ms)
    row = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (*COUNTS, *LATENESSES):
        row.add_column(heading, justify="right", no_wrap=True)
    row.add_row(
        *(f"{count:,}" for count in counts),
        *("-" if late is None else f"{late:,} ms" for late in latenesses),
    )
    return row
