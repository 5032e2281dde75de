"""`duetime bench failover`: how soon a standby delivers when the pipeline that leads is gone.

Two `duetime run` on one cluster, under load. The one that leads is killed, or stopped for a while
as a machine that hangs, and the other takes over; what was killed is started again, as the next
standby. In the end the destination is read: what is there is what counts.
"""

import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from duetime.bench.appends import Appends
from duetime.bench.crash import (
    DELAY_MS,
    LOOK_S,
    PATIENCE_S,
    next_arrival,
    outcome,
    pipeline_process,
    send_signal,
)
from duetime.bench.load import LoadPlan, start_load
from duetime.bench.report import COUNTS, Report
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import DuetimeError
from duetime.status import status

#: How long one round may take besides the pause, in seconds: a standby starts and warms up.
ROUND_S = 100.0

#: How long a standby may warm up, in seconds.
WARM_UP_S = 45

#: How long a standby that was just started is left alone until it is warm, in seconds.
WARM_S = 60.0

#: What was on its way when the leader died has arrived after this long, in seconds.
ON_ITS_WAY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Failovers:
    """What the messages had from it."""

    times: int
    report: Report
    #: From each end of a leader until the next message arrived, in seconds.
    takeovers_s: list[float]

    def figures(self) -> dict[str, int | float | None]:
        """The result as it is shown."""
        return {
            "times": self.times,
            **{name: getattr(self.report, name) for name in COUNTS},
            "takeover_s_p50": round(median(self.takeovers_s), 1),
            "takeover_s_max": round(max(self.takeovers_s), 1),
        }


def failover(settings: Settings, times: int, rate: float, pause_s: float) -> Failovers:
    """End the leader so many times, or stop it for `pause_s` where that is not 0."""
    (topic,) = create_destinations(settings, ["failover"])
    plan = LoadPlan(
        messages=round(rate * (times + 1) * (ROUND_S + pause_s)),
        rate=rate,
        delay_ms=DELAY_MS,
        destinations=(topic,),
    )
    warm = settings.model_copy(update={"warm_up_seconds": WARM_UP_S})
    arrived, takeovers_s = Appends(settings, [topic]), []
    with ExitStack() as pipelines:
        pipelines.enter_context(pipeline_process(warm))
        pipelines.enter_context(pipeline_process(warm))
        _leader(settings)
        with start_load(settings, plan) as load:
            for number in range(1, times + 1):
                leader = _leader(settings)
                time.sleep(WARM_S)
                _wait_for_more(arrived)
                send_signal(leader, signal.SIGSTOP if pause_s else signal.SIGKILL)
                stopped_s = time.monotonic()
                time.sleep(ON_ITS_WAY_S)
                _wait_for_more(arrived)
                takeovers_s.append(time.monotonic() - stopped_s)
                say(f"takeover {number} of {times} after {takeovers_s[-1]:.1f} s")
                if pause_s:
                    time.sleep(max(0.0, stopped_s + pause_s - time.monotonic()))
                    send_signal(leader, signal.SIGCONT)
                else:
                    pipelines.enter_context(pipeline_process(warm))
            report = outcome(settings, topic, load, arrived)
    return Failovers(times=times, report=report, takeovers_s=takeovers_s)


def _leader(settings: Settings) -> int:
    """Wait until one leads and another stands by; returns the leader's process id."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = status(settings, SystemClock())
        if found.leader and found.standbys:
            return int(found.leader.rpartition(":")[2])
        time.sleep(LOOK_S)
    raise DuetimeError("there is no leader and a standby: the words of the pipelines are above")


def _wait_for_more(arrived: Appends) -> None:
    if not next_arrival(arrived, PATIENCE_S)[1]:
        raise DuetimeError(f"nothing arrived for {PATIENCE_S:.0f} s")
