"""`duetime bench crash`: whether each message comes once, however often something is killed.

`duetime run` is a process of its own here, killed with its JVM at random moments, also while it
starts and recovers, and started again at once; the load goes on all the time. Or the broker is
killed, while the pipeline has to bear it. In the end the destination is read: what is there is what
counts.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from duetime.bench.appends import Appends
from duetime.bench.load import Load, LoadPlan, revealed, start_load
from duetime.bench.report import COUNTS, Report, measure
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.config import Settings
from duetime.errors import DuetimeError
from duetime.local.broker import LocalBroker

#: Delays of the load: at once, through lanes, and through the wheel.
DELAY_MS = (0, 30_000)

#: How long after the last kill the last message may take, in seconds.
PATIENCE_S = 240.0

#: How long a broker that was killed stays down at most, in seconds.
MOST_DOWN_S = 5.0

#: How often is looked whether messages arrive, in seconds.
LOOK_S = 0.05

#: How long was waited for a message after a start, in seconds, and whether one arrived.
Wait = tuple[float, bool]

#: Lives so many lives, in seconds, and gives how long was waited in each.
Lives = Callable[[Settings, Appends, list[float]], Iterator[Wait]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashes:
    """What the kills did to the messages."""

    kills: int
    report: Report
    #: From a start until the next message arrived, in seconds, if need be over several lives.
    recoveries_s: list[float]

    def figures(self) -> dict[str, int | float | None]:
        """The result as it is shown."""
        return {
            "kills": self.kills,
            **{name: getattr(self.report, name) for name in COUNTS},
            "recovery_s_p50": round(median(self.recoveries_s), 1) if self.recoveries_s else None,
            "recovery_s_max": round(max(self.recoveries_s, default=0.0), 1),
        }


def crash(settings: Settings, kills: int, rate: float, life_ms: tuple[int, int]) -> Crashes:
    """Kill and start the pipeline so many times under load, then wait until all has arrived.

    It lives from the one to the other time, in ms, its start of some 10 s included.
    """
    return _crashes(settings, kills, rate, life_ms, _pipeline_lives)


def crash_broker(
    settings: Settings, broker: LocalBroker, kills: int, rate: float, life_ms: tuple[int, int]
) -> Crashes:
    """The same with the broker, under a pipeline that is left alone."""

    def lives(settings: Settings, arrived: Appends, lives_s: list[float]) -> Iterator[Wait]:
        with pipeline_process(settings):
            yield next_arrival(arrived, PATIENCE_S)
            for life_s in lives_s:
                time.sleep(life_s)
                broker.kill()
                down_s = random.uniform(0, MOST_DOWN_S)  # noqa: S311 (no secret)
                time.sleep(down_s)
                broker.start()
                say(f"broker killed, and down for {down_s:.1f} s")
                yield next_arrival(arrived, PATIENCE_S)

    return _crashes(settings, kills, rate, life_ms, lives)


def _crashes(
    settings: Settings, kills: int, rate: float, life_ms: tuple[int, int], lives: Lives
) -> Crashes:
    """Send a load while the lives are lived, and look what became of it."""
    (topic,) = create_destinations(settings, ["crash"])
    lives_s = [random.uniform(*life_ms) / 1_000 for _ in range(kills)]  # noqa: S311 (no secret)
    plan = LoadPlan(
        messages=round(rate * (sum(lives_s) + 10)),
        rate=rate,
        delay_ms=DELAY_MS,
        destinations=(topic,),
    )
    cold = settings.model_copy(update={"warm_up_seconds": 0})
    arrived = Appends(settings, [topic])
    with start_load(settings, plan) as load:
        waits = list(lives(cold, arrived, lives_s))
        with pipeline_process(cold):
            waits.append(next_arrival(arrived, PATIENCE_S))
            report = outcome(settings, topic, load, arrived)
    return Crashes(kills=kills, report=report, recoveries_s=list(recoveries(waits)))


def recoveries(waits: Iterable[Wait]) -> Iterator[float]:
    """From each start until the next message arrived; a life that had none counts to the next."""
    waited_s = 0.0
    for seconds, has_arrived in waits:
        waited_s += seconds
        if has_arrived:
            yield waited_s
            waited_s = 0.0


def outcome(settings: Settings, topic: str, load: Load, arrived: Appends) -> Report:
    """Wait until the load is sent and has arrived, or should have long ago, and count it."""
    sent = load.wait()
    if not arrived.wait_for(sent.sent, PATIENCE_S):
        say(f"not all came within {PATIENCE_S:.0f} s")
    # A message that comes twice may come now.
    time.sleep(settings.rescue_every_ms / 1_000)
    return measure(settings, [topic], sent.sent)


def _pipeline_lives(settings: Settings, arrived: Appends, lives_s: list[float]) -> Iterator[Wait]:
    for number, life_s in enumerate(lives_s, 1):
        with pipeline_process(settings):
            ends_s = time.monotonic() + life_s
            yield next_arrival(arrived, life_s)
            time.sleep(max(0.0, ends_s - time.monotonic()))
        say(f"kill {number} of {len(lives_s)}, after {life_s:.1f} s")


@contextmanager
def pipeline_process(settings: Settings) -> Iterator[None]:
    """A `duetime run` while the block lasts; then it is killed, and its JVM with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "duetime", "run"],
        env=os.environ | environment(settings),
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        yield
        if process.poll() not in (None, -signal.SIGKILL):
            raise DuetimeError("the pipeline ended by itself: its words are above")
    finally:
        kill(process.pid)
        process.wait()


def kill(pid: int) -> None:
    """End the process and its children at once, as a power cut would."""
    send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: signal.Signals) -> None:
    """To the process and its children, as far as they live."""
    for each in [*children(pid), pid]:
        with suppress(ProcessLookupError):
            os.kill(each, number)


def environment(settings: Settings) -> dict[str, str]:
    """The settings as environment variables."""
    return {
        f"DUETIME_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in revealed(settings).items()
        if value is not None
    }


def next_arrival(arrived: Appends, within_s: float) -> Wait:
    """Wait until something arrives, at most for so long."""
    began_s, before = time.monotonic(), arrived.count()
    while (taken_s := time.monotonic() - began_s) < within_s:
        if arrived.count() > before:
            return taken_s, True
        time.sleep(LOOK_S)
    return within_s, False


def children(pid: int) -> list[int]:
    """The processes that it has started, and that nobody has waited for yet."""
    # A child belongs to the thread that started it.
    found = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in found for child in children.split()]
