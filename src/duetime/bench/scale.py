"""Measure what a Spark cluster costs: the same loads on more and more workers of this machine.

Each size has a broker, a Spark master with its workers, and a pipeline whose tasks run there, in
processes of their own; `local` has no cluster. On one machine, more workers bring no speed. So what
counts is the CPU time of a message, in all processes of the pipeline.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyspark

from duetime.bench.chaos import children, duetime_process
from duetime.bench.delivery import deliver, deliver_before, pending_load
from duetime.bench.loadgen import LoadPlan, run_load
from duetime.bench.testbed import (
    DEFECTS,
    Appends,
    Figures,
    create_destinations,
    open_testbed,
    progress,
    scratch,
)
from duetime.client.status import RUNS, status
from duetime.core.clock import SystemClock
from duetime.core.errors import DuetimeError
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.core.topics import DAY_MS, TopicNames
from duetime.local.process import HOST, GuardedProcess, free_port

#: Where Spark's programs are.
SPARK = Path(pyspark.__file__).parent

#: Task slots of a worker, which are no cores, and the heap of its executor.
SLOTS, EXECUTOR_MEMORY = 64, "1g"

#: How long a cluster and a pipeline may take to start, in seconds.
START_TIMEOUT_S = 300.0

#: The steady load before the one that is measured, in seconds: executors compile their code.
WARM_UP_S = 60.0

#: How long before it is due the load to catch up with is written, in seconds. It is one window.
AHEAD_S = 30.0

#: How long a burst may take, in seconds.
BURST_TIMEOUT_S = 600.0


def scale(
    kafka: str | None, *, workers: str, rate: float, seconds: float, messages: int
) -> Figures:
    """Measure `local`, then a cluster of each number of `workers`, such as 1,2,4.

    `cpu_ratio` is the CPU time of a message with the last number over that of `local`.
    """
    found = {}
    for size in (0, *map(int, workers.split(","))):
        name = f"workers_{size}" if size else "local"
        progress(f"{name} ...")
        found[name] = _measure(kafka, size, rate, seconds, messages)
    costs = [each["cpu_s_per_million"] for each in found.values()]
    totals = {name: sum(each[name] for each in found.values()) for name in DEFECTS}
    return {**totals, "cpu_ratio": round(costs[-1] / costs[0], 3), **found}


def _measure(
    kafka: str | None, workers: int, rate: float, seconds: float, messages: int
) -> Figures:
    with ExitStack() as stack:
        settings, pids = stack.enter_context(open_testbed(kafka, warm_up_seconds=0)), list[int]()
        if workers:
            cluster, pids = stack.enter_context(spark_cluster(workers))
            settings = settings.model_copy(update=cluster)
        pids.append(stack.enter_context(duetime_process(settings)).pid)
        await_queries(settings)
        steady = LoadPlan.steady(rate, seconds, delay_ms=(500, 15_000))
        deliver_before(settings, steady, WARM_UP_S)
        before_s = cpu_seconds(pids)
        arrived, count, _ = deliver(settings, steady, "steady")
        cpu_s = cpu_seconds(pids) - before_s
        figures = arrived.report(count)
        intake = _take_in(settings, messages)
        caught_up, of_burst = _catch_up(settings, messages)
        return {
            **{name: figures[name] + of_burst[name] for name in DEFECTS},
            **{name: figures[name] for name in ("p50_ms", "p99_ms", "max_ms")},
            "cpu_s_per_million": round(cpu_s / count * 1e6, 1),
            "intake_messages_per_s": intake,
            "catchup_messages_per_s": caught_up,
        }


def _take_in(settings: Settings, messages: int) -> int:
    """Return the messages a second from the intake topic into the wheel, in one burst."""
    names = TopicNames(settings)
    wheel = Appends(settings, [names.wheel(level) for level in range(settings.wheel_levels)])
    topics = tuple(create_destinations(settings, ["later"]))
    delay_ms = (DAY_MS // 2, DAY_MS)
    run_load(settings, LoadPlan(messages=messages, delay_ms=delay_ms, destinations=topics))
    wheel.wait_for(messages, BURST_TIMEOUT_S)
    return round(messages / wheel.seconds(from_first=True))


def _catch_up(settings: Settings, messages: int) -> tuple[int, Figures]:
    """Return the messages a second that are sent of one window, and the report."""
    due_ms = int((time.time() + AHEAD_S) * 1_000)
    plan = pending_load(settings, "burst", messages, due_ms=(due_ms, due_ms + 999))
    arrived = Appends(settings, plan.destinations)
    run_load(settings, plan)
    arrived.wait_for(messages, BURST_TIMEOUT_S)
    return round(messages / arrived.seconds(from_first=True)), arrived.report(messages)


def await_queries(settings: Settings) -> None:
    """Wait until a pipeline leads and all its queries run. Raises DuetimeError."""

    def are_running() -> bool:
        queries = status(settings, SystemClock()).queries
        return bool(queries) and set(queries.values()) == {RUNS}

    if not wait_until(are_running, START_TIMEOUT_S, 0.5):
        raise DuetimeError("the pipeline's queries do not run: see its log above")


@contextmanager
def spark_cluster(workers: int) -> Iterator[tuple[dict[str, object], list[int]]]:
    """Start a master and workers; yield the settings of a pipeline on them, and their pids."""
    port = free_port()
    url = f"spark://{HOST}:{port}"
    own = {"SPARK_WORKER_CORES": str(SLOTS), "SPARK_WORKER_MEMORY": "4g", "SPARK_LOCAL_IP": HOST}
    own |= {"SPARK_HOME": str(SPARK)}
    with scratch() as directory, ExitStack() as stack:
        started = list[GuardedProcess]()

        def start(role: str, *arguments: str) -> None:
            name = f"org.apache.spark.deploy.{role.lower()}.{role}"
            process = GuardedProcess.start(
                [str(SPARK / "bin" / "spark-class"), name, "--host", HOST, *arguments],
                cwd=directory,
                env=os.environ | own,
                output=directory / f"{role}-{len(started)}.log",
            )
            stack.callback(process.stop)
            started.append(process)

        start("Master", "--port", str(port), "--webui-port", "0")
        for _ in range(workers):
            start("Worker", "--work-dir", str(directory), "--webui-port", "0", url)
        properties = {
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.executor.memory": EXECUTOR_MEMORY,
        }
        cluster: dict[str, object] = {"spark_master": url, "spark_properties": properties}
        yield cluster, [each.pid for each in started]


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of these processes, and of all below them that run or have ended."""
    ticks, below = 0, list(pids)
    while below:
        pid = below.pop()
        # One may have ended meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
            # After the name, which may have spaces: utime, stime, cutime and cstime.
            ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
            below += children(pid)
    return ticks / os.sysconf("SC_CLK_TCK")
