"""Kill processes under load, and count in the end what is in the destination.

crash     kill the pipeline at random moments, also while it starts and recovers; or the broker
failover  kill, stop or cut off the leader of two pipelines, and measure how soon the other delivers

Each pipeline is a `duetime run` in a process of its own.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import typer
from pydantic import SecretStr

from duetime.bench.delivery import fill_backlog
from duetime.bench.history import Clients
from duetime.bench.loadgen import LoadPlan, parse_range, start_load
from duetime.bench.testbed import (
    COUNTS,
    Appends,
    Brokers,
    Figures,
    Outage,
    create_destinations,
    open_brokers,
    open_testbed,
    progress,
)
from duetime.core.clock import SystemClock, parse_duration
from duetime.core.errors import DuetimeError
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.kafka.heartbeats import MemberReader
from duetime.kafka.leadership import IS_WARM
from duetime.local.network import Proxy
from duetime.local.process import HOST, free_port

#: Delays of the load in ms: due at once, through lanes, and through the wheel.
DELAY_MS = (0, 30_000)

#: How long the next message, and after the end the last one, may take, in seconds; and the interval
#: at which arrivals are checked.
TIMEOUT_S, POLL_INTERVAL_S = 240.0, 0.05

#: How long one failover may take besides the pause, in seconds: a standby starts and warms up. How
#: long it may warm up, and how long it is left alone once it is warm.
FAILOVER_S, WARM_UP_S, QUIET_S = 100.0, 45, 10.0

#: After this long, all messages that were in flight when the leader died have arrived, in seconds.
IN_FLIGHT_S = 0.5

#: The interval between counts of the messages themselves, in seconds: each reads all of them.
RECOUNT_S = 5.0

#: The longest outage of one of several brokers, in seconds: the others notice it after 9 s.
AWAY_S = 20.0

#: How long a start was waited on for a message, in seconds, and whether one arrived.
Wait = tuple[float, bool]


def crash(  # noqa: PLR0913 (the options of a command)
    kafka: str | None,
    *,
    kills: int,
    rate: float,
    life: str,
    brokers: int,
    outage: Outage | None,
    backlog: int,
) -> Figures:
    """Kill the pipeline under load; or, with an `outage`, take brokers away in place of it.

    Each life has a random length in the range; a pipeline's start takes some 10 s of it. Temporary
    brokers keep each record on up to three.
    """
    if kafka and (outage or brokers > 1):
        raise typer.BadParameter("--brokers and --outage are for temporary ones, unlike --kafka")
    life_ms = parse_range(life)
    lives_s = [random.uniform(*life_ms) / 1_000 for _ in range(kills)]  # noqa: S311 (no secret)
    with ExitStack() as stack:
        local = None if kafka else stack.enter_context(open_brokers(brokers, outage))
        settings = stack.enter_context(open_testbed(kafka, brokers=local, warm_up_seconds=0))
        fill_backlog(settings, backlog)
        arrived, count = stack.enter_context(_load(settings, "crash", rate, sum(lives_s) + 10))
        clients = stack.enter_context(Clients(settings).running())
        if local and outage:
            waits = list(_broker_lives(settings, local, arrived, lives_s))
        else:
            waits = list(_pipeline_lives(settings, arrived, lives_s))
        with duetime_process(settings):
            waits.append(_next_arrival(arrived, TIMEOUT_S))
            counts, history = count(), _judged(clients)
    recovery = _spread("recovery_s", list(recoveries(waits)))
    return {"kills": kills, **counts, **recovery, "history": history}


def _judged(clients: Clients) -> Figures:
    """Return the verdict on the clients' history, and show each violation."""
    figures, stories = clients.judged(TIMEOUT_S)
    for each in stories:
        progress(each)
    return figures


def _spread(name: str, values_s: list[float]) -> Figures:
    middle_s = round(median(values_s), 1) if values_s else None
    return {f"{name}_p50": middle_s, f"{name}_max": round(max(values_s, default=0.0), 1)}


def _pipeline_lives(settings: Settings, arrived: Appends, lives_s: list[float]) -> Iterator[Wait]:
    for number, life_s in enumerate(lives_s, 1):
        with duetime_process(settings):
            end_s = time.monotonic() + life_s
            yield _next_arrival(arrived, life_s)
            time.sleep(max(0.0, end_s - time.monotonic()))
        progress(f"kill {number} of {len(lives_s)}, after {life_s:.1f} s")


def _broker_lives(
    settings: Settings, brokers: Brokers, arrived: Appends, lives_s: list[float]
) -> Iterator[Wait]:
    with duetime_process(settings):
        yield _next_arrival(arrived, TIMEOUT_S)
        for life_s in lives_s:
            time.sleep(life_s)
            number = random.randrange(brokers.count)  # noqa: S311 (no secret)
            brokers.begin_outage(number)
            away_s = random.uniform(0, AWAY_S if brokers.count > 1 else 5.0)  # noqa: S311 (no secret)
            time.sleep(away_s)
            brokers.end_outage(number)
            progress(f"broker {number + 1} was away for {away_s:.1f} s")
            yield _next_arrival(arrived, TIMEOUT_S)


def recoveries(waits: Iterable[Wait]) -> Iterator[float]:
    """Yield the seconds from each start to the next arrival; a life without one counts to it."""
    waited_s = 0.0
    for seconds, has_arrived in waits:
        waited_s += seconds
        if has_arrived:
            yield waited_s
            waited_s = 0.0


def failover(kafka: str | None, *, times: int, rate: float, pause: str, cut: str) -> Figures:
    """Kill the leader `times` times; or stop it for `pause`, or cut it off for `cut`, unless 0.

    A stopped leader is a machine that hangs. One that is cut off reaches no broker, and works on.
    A killed one is started again as the next standby.
    """
    pause_s, cut_s = parse_duration(pause) / 1_000, parse_duration(cut) / 1_000
    if cut_s and (kafka or pause_s):
        raise typer.BadParameter("--cut is for a temporary broker, and not together with --pause")
    takeovers_s = list[float]()
    seconds = (times + 1) * (FAILOVER_S + pause_s + cut_s)
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(free_port())) for _ in range(2 if cut_s else 0)]
        local = None if kafka else stack.enter_context(open_brokers(doors=proxies))
        settings = stack.enter_context(open_testbed(kafka, brokers=local))
        pipelines = _Pipelines(stack, settings, proxies, is_paused=bool(pause_s))
        _leader_pid(settings)
        arrived, count = stack.enter_context(_load(settings, "failover", rate, seconds))
        clients = stack.enter_context(Clients(settings).running())
        for number in range(1, times + 1):
            leader = _leader_pid(settings)
            # By then, work that pipelines repeat every few seconds has begun.
            time.sleep(QUIET_S)
            _require_arrival(arrived)
            pipelines.begin_outage(leader)
            begun_s = time.monotonic()
            time.sleep(IN_FLIGHT_S)
            _require_arrival(arrived)
            takeovers_s.append(time.monotonic() - begun_s)
            progress(f"takeover {number} of {times} after {takeovers_s[-1]:.1f} s")
            time.sleep(max(0.0, begun_s + pause_s + cut_s - time.monotonic()))
            pipelines.end_outage(leader)
        counts, history = count(), _judged(clients)
    return {"times": times, **counts, **_spread("takeover_s", takeovers_s), "history": history}


class _Pipelines:
    """Two pipelines, and the outages of the one that leads."""

    def __init__(
        self, stack: ExitStack, settings: Settings, proxies: Sequence[Proxy], *, is_paused: bool
    ) -> None:
        """Each connects by a proxy of its own, if there are any. `stack` ends them."""
        self._stack, self._is_paused = stack, is_paused
        self._settings = settings.model_copy(update={"warm_up_seconds": WARM_UP_S})
        self._proxies = {self._start(f"{HOST}:{each.port}"): each for each in proxies}
        if not proxies:
            self._start(settings.bootstrap)
            self._start(settings.bootstrap)

    def begin_outage(self, leader: int) -> None:
        """Cut off, stop or kill the leader of this process id."""
        if leader in self._proxies:
            self._proxies[leader].cut()
        else:
            send_signal(leader, signal.SIGSTOP if self._is_paused else signal.SIGKILL)

    def end_outage(self, leader: int) -> None:
        """Let it go on, or start another in place of a killed one."""
        if leader in self._proxies:
            self._proxies[leader].heal()
        elif self._is_paused:
            send_signal(leader, signal.SIGCONT)
        else:
            self._start(self._settings.bootstrap)

    def _start(self, bootstrap: str) -> int:
        own = self._settings.model_copy(update={"bootstrap": bootstrap})
        return self._stack.enter_context(duetime_process(own)).pid


def _leader_pid(settings: Settings) -> int:
    """Wait until one pipeline leads and another stands by, warm; return the leader's process id."""
    with closing(MemberReader(settings)) as reader:

        def named() -> str | None:
            leader, standbys = reader.read(SystemClock().now_ms())
            is_warm = any(each.status.get(IS_WARM) for each in standbys)
            return leader.name if leader and is_warm else None

        found = wait_until(named, TIMEOUT_S, POLL_INTERVAL_S)
    if not found:
        raise DuetimeError("no leader with a warm standby appeared: see the pipelines' log above")
    return int(found.rpartition(":")[2])


def _require_arrival(arrived: Appends) -> None:
    if not _next_arrival(arrived, TIMEOUT_S)[1]:
        raise DuetimeError(f"nothing arrived for {TIMEOUT_S:.0f} s: see the pipelines' log above")


def _next_arrival(arrived: Appends, timeout_s: float) -> Wait:
    started_s, before = time.monotonic(), arrived.count()
    has_arrived = wait_until(lambda: arrived.count() > before, timeout_s, POLL_INTERVAL_S)
    return time.monotonic() - started_s, bool(has_arrived)


@contextmanager
def _load(
    settings: Settings, name: str, rate: float, seconds: float
) -> Iterator[tuple[Appends, Callable[[], Figures]]]:
    """Send to a new destination while the block runs; yield its appends, and what counts them."""
    topics = create_destinations(settings, [name])
    plan = LoadPlan.steady(rate, seconds, delay_ms=DELAY_MS, destinations=tuple(topics))
    arrived = Appends(settings, topics)
    with start_load(settings, plan) as load:

        def count() -> Figures:
            load()
            arrived.wait_for(plan.messages, TIMEOUT_S)
            if settings.transactional_delivery:
                # Ends of transactions have offsets, too.
                wait_until(lambda: not arrived.report(plan.messages)["lost"], TIMEOUT_S, RECOUNT_S)
            # A duplicate may arrive now.
            time.sleep(settings.overdue_scan_interval_ms / 1_000)
            found = arrived.report(plan.messages)
            return {each: found[each] for each in COUNTS}

        yield arrived, count


@contextmanager
def duetime_process(
    settings: Settings, command: str = "run"
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `duetime COMMAND` while the block lasts; then kill it, and its JVM with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "duetime", command],
        env=os.environ | environment(settings),
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        yield process
        if process.poll() not in (None, -signal.SIGKILL):
            raise DuetimeError(f"duetime {command} ended by itself: see its log above")
    finally:
        send_signal(process.pid, signal.SIGKILL)
        process.wait()


def environment(settings: Settings) -> dict[str, str]:
    """Return the settings as environment variables."""
    return {
        f"DUETIME_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in revealed(settings).items()
        if value is not None
    }


def revealed(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON with readable passwords: only for child processes."""

    def plain(value: object) -> str:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    found: dict[str, Any] = json.loads(json.dumps(settings.model_dump(), default=plain))
    return found


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process and its children; those that have ended are skipped."""
    for each in [*children(pid), pid]:
        with suppress(ProcessLookupError):
            os.kill(each, number)


def children(pid: int) -> list[int]:
    """Return the processes that it has started and not reaped."""
    # A child belongs to the thread that started it.
    found = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in found for child in children.split()]
