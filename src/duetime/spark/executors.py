"""Executors: the JVMs of a Spark cluster that run tasks, and how the driver reaches them.

The driver makes an *exchange* with each executor every second (`task_jvms.Exchange`): it brings
what rows read there, and takes back what they have requested, and how their producers fare.

A *lease* is an instant of the executor's monotonic clock, which has nothing in common with the
driver's. An exchange reads it: the executor's clock showed `nano_ns` when the driver's showed at
most `ended_s`. So `nano_ns + (until_s - ended_s)` there is never later than `until_s` here, however
long the exchange has taken. A driver that dies or is paused extends no lease, and every executor
stops by itself. So does one that is cut off from the driver, before what it had is sent elsewhere.

A *new executor* starts with a property (DEFAULT_LEASE) that holds every row back, until an exchange
has published the leases and the destinations. An executor whose wall clock is off gets no
lease at all: it would send too early or too late.
"""

import logging
import math
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import SparkSession

from duetime.core import metrics
from duetime.core.errors import SetupError
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread, wait_until
from duetime.spark.catalyst import java_class
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S
from duetime.spark.session import DEFAULT_LEASE, ENDED, HELD, STARTED_BEFORE, is_local, jvm
from duetime.spark.task_jvms import (
    ERRORS,
    SENT,
    Bean,
    DriverJvm,
    Exchange,
    ExecutorReport,
    ProducerMetrics,
    TaskJvms,
)

log = logging.getLogger(__name__)

#: The interval of exchanges with an executor, in seconds. One more makes a lease shorter by that.
EXCHANGE_INTERVAL_S = 0.25

#: The interval in which new executors are looked for, in seconds.
WATCH_INTERVAL_S = 0.5

#: How long an exchange that someone waits for may take, in seconds.
ANSWER_TIMEOUT_S = 10.0

#: How long the first executor may take to start, in seconds.
START_TIMEOUT_S = 120.0

#: Exchanges of which the best reading of the clock counts: clocks drift by less than 0.1 ms in it.
READINGS = 10

#: Interval of warnings about an executor's clock, in seconds.
WARNING_INTERVAL_S = 60.0

#: How long an executor's lease is at most, in seconds: longer than exchanges are apart.
LEASE_S = 2.5

#: Words for the end of an executor's process, or of its connection, after which nothing extends its
#: lease: Spark's own, and ours where Spark has started the task again. Not for one that is only
#: silent.
ENDED_EXECUTOR = re.compile(
    "ExecutorLostFailure.*(Remote RPC client disassociated|exited with (exit )?code)"
    f"|{STARTED_BEFORE}",
    re.DOTALL,
)

#: Where the plan of a query begins in its error: it has the text of whatever a row may raise.
PLAN = "=== Streaming Query ==="

#: How long an executor may go on to send after that, in seconds: the rest is for requests on their
#: way to the broker.
END_S = LEASE_S + 0.5

#: The keys of a bean.
Keys = tuple[tuple[str, str], ...]

#: The attributes that count up.
COUNTS = (ERRORS, SENT)


@dataclass(slots=True)
class Published:
    """The state that every executor is brought to. Changed under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    properties: dict[str, str] = field(default_factory=dict)
    #: Instants of this process's monotonic clock, in seconds.
    leases: dict[str, float] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    requests: dict[str, set[str]] = field(default_factory=dict)


class ExecutorLink:
    """Keeps one executor up to date, in a thread of its own."""

    def __init__(
        self,
        executor: str,
        exchange: Callable[[Mapping[str, str], Iterable[str]], ExecutorReport],
        published: Published,
        max_skew_ms: float,
        on_report: Callable[[ExecutorReport], None],
    ) -> None:
        self.executor = executor
        self._exchange, self._published, self._max_skew_ms = exchange, published, max_skew_ms
        self._on_report = on_report
        #: The last report.
        self.report: ExecutorReport | None = None
        #: Until when the executor may hold each lease, by this process's monotonic clock.
        self.granted: dict[str, float] = {}
        #: Everything published has arrived.
        self._is_published = False
        self._sent: dict[str, str] = {}
        #: By how much the executor's clock is ahead, in ns, at least, at each of the last readings.
        self._ahead_ns: deque[int] = deque(maxlen=READINGS)
        self._skews_ms: deque[float] = deque(maxlen=READINGS)
        self._warned_s = 0.0
        self._changed, self._stopping = threading.Condition(), False
        self._is_wanted = False
        self._thread = threading.Thread(target=self._run, name=f"executor-{executor}", daemon=True)

    def start(self) -> None:
        """Begin to exchange."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for its exchange."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def is_ready(self) -> bool:
        """True once rows may be sent there."""
        return self._is_published and not self._is_skewed

    @property
    def _skew_ms(self) -> float:
        # Each reading is a lower bound, and a slow exchange makes it lower.
        return max(self._skews_ms, default=0.0)

    @property
    def _is_skewed(self) -> bool:
        return self._skew_ms > self._max_skew_ms

    def wake(self) -> None:
        """Begin an exchange now, or directly after the present one."""
        with self._changed:
            self._is_wanted = True
            self._changed.notify_all()

    def refresh(self) -> None:
        """Return once an exchange is over that began after this call, or the executor is gone.

        Raises SetupError without an answer.
        """
        since_s = time.monotonic()

        def is_fresh() -> bool:
            return self._stopping or (self.report is not None and self.report.started_s >= since_s)

        self.wake()
        with self._changed:
            if not self._changed.wait_for(is_fresh, ANSWER_TIMEOUT_S):
                raise SetupError(
                    f"executor {self.executor} does not answer: see its log, and end it if it hangs"
                )

    def _run(self) -> None:
        while not self._stopping:
            has_failed = False
            try:
                self._step()
            except Exception as error:
                has_failed = True
                log.debug("exchange failed executor=%s", self.executor, exc_info=error)
            pause_s = EXCHANGE_INTERVAL_S if self._is_published or has_failed else 0.0
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_wanted or self._stopping, pause_s)
                self._is_wanted = False

    def _step(self) -> None:
        """Exchange once: the first time to read the clock, then with all that is new."""
        published = self._published
        with published.lock:
            until_s = time.monotonic() + LEASE_S
            leases = {name: min(each, until_s) for name, each in published.leases.items()}
            properties, flags = self._new(), list(published.flags)
            is_first = not self._ahead_ns
            if self._is_skewed:
                # Also what it had before.
                leases = dict.fromkeys([*leases, DEFAULT_LEASE], 0.0)
            if not is_first:
                # Under the lock: who ends a lease sees what may be under way.
                before = self.granted
                self.granted = {name: max(leases[name], before.get(name, 0.0)) for name in leases}
        if is_first:
            self._note(self._exchange({}, flags))
            return
        self._note(self._exchange(properties | self._by_its_clock(leases), flags))
        self.granted = leases
        self._sent |= properties
        self._is_published = True

    def _note(self, report: ExecutorReport) -> None:
        self._ahead_ns.append(report.nano_ns - math.ceil(report.ended_s * 1e9))
        self._skews_ms.append(report.skew_ms)
        self.report = report
        metrics.EXECUTOR_SKEW.labels(self.executor).set(report.skew_ms / 1_000)
        self._warn_of_skew()
        with self._published.lock:
            for flag, names in report.requests.items():
                self._published.requests.setdefault(flag, set()).update(names)
        self._on_report(report)

    def _new(self) -> dict[str, str]:
        known = self._sent
        return {
            name: value
            for name, value in self._published.properties.items()
            if known.get(name) != value
        }

    def _by_its_clock(self, leases: Mapping[str, float]) -> dict[str, str]:
        """Return the leases as properties. The last one no longer holds back rows without one."""
        ahead_ns = max(self._ahead_ns)
        values = {
            name: str(int(until_s * 1e9) + ahead_ns) if until_s else ENDED
            for name, until_s in leases.items()
        }
        return {**values, DEFAULT_LEASE: values.get(DEFAULT_LEASE, HELD)}

    def _warn_of_skew(self) -> None:
        now_s = time.monotonic()
        if self._is_skewed and now_s - self._warned_s > WARNING_INTERVAL_S:
            self._warned_s = now_s
            log.error(
                "executor's clock is off, it sends nothing: synchronise clocks (NTP) "
                "executor=%s ms=%.0f limit_ms=%.0f",
                self.executor,
                self._skew_ms,
                self._max_skew_ms,
            )


def is_executor_ended(error: BaseException) -> bool:
    """Return whether a job has failed since an executor ended: what that one sent is decided."""
    return ENDED_EXECUTOR.search(str(error).partition(PLAN)[0]) is not None


def task_jvms(spark: SparkSession, settings: Settings) -> TaskJvms:
    """Return the JVMs that run tasks, once there are any. Raises SetupError."""
    if is_local(str(spark.sparkContext.master)):
        return DriverJvm(spark)
    executors = ExecutorJvms(spark, settings.max_clock_skew_ms)
    try:
        executors.start()
    except BaseException:
        executors.close()
        raise
    return executors


class ExecutorJvms:
    """The executors of a Spark cluster, as `TaskJvms`. Close it before Spark stops."""

    def __init__(self, spark: SparkSession, max_skew_ms: float) -> None:
        self._max_skew_ms = max_skew_ms
        self._exchange, self._published = Exchange(spark), Published()
        environment = java_class(jvm(spark), "org.apache.spark.SparkEnv").get()
        self._blocks = environment.blockManager()
        self._links: dict[str, ExecutorLink] = {}
        #: Of executors that are gone: when the last lease ends that they may still hold.
        self._gone_until_s = 0.0
        self._system = java_class(jvm(spark), "java.lang.System")
        self._producers = ExecutorProducers(lambda: self.links)
        self._watch = PeriodicThread("executors", WATCH_INTERVAL_S, self._look)

    def start(self) -> None:
        """Return once an executor can run tasks. Raises SetupError."""
        self._watch.start()
        if wait_until(lambda: any(each.is_ready for each in self.links), START_TIMEOUT_S):
            return
        raise SetupError(
            f"no executor was ready within {START_TIMEOUT_S:.0f} s: check that the Spark cluster "
            "has free workers, that they have the same Spark and can connect to this machine, and "
            "that their clocks are synchronised"
        )

    @property
    def producers(self) -> ProducerMetrics:
        """The metrics of their Kafka producers."""
        return self._producers

    @property
    def executors(self) -> Collection[str]:
        """The executors that are there."""
        return list(self._links)

    @property
    def links(self) -> list[ExecutorLink]:
        """The executors that are there."""
        return list(self._links.values())

    def publish(self, properties: Mapping[str, str]) -> None:
        """Have the properties set with the next exchange."""
        with self._published.lock:
            self._published.properties.update(properties)

    def extend_lease(self, name: str, until_s: float) -> None:
        """Have the lease extended with the next exchange; one that is new, at once."""
        # Raises if the driver's JVM is gone, without which no executor can be reached.
        self._system.nanoTime()
        with self._published.lock:
            is_new = name not in self._published.leases
            self._published.leases[name] = until_s
        if is_new:
            self._wake()

    def end_lease(self, name: str) -> None:
        """End the lease; return once each executor knows, or what it has of it is over."""
        self.extend_lease(name, 0)
        self._wake()

        def is_over() -> bool:
            now_s = time.monotonic()
            granted = [each.granted.get(name, 0.0) for each in self.links]
            return max(self._gone_until_s, *granted, 0.0) <= now_s

        wait_until(is_over, ANSWER_TIMEOUT_S)

    def take_requests(self, flag: str) -> list[str]:
        """Return what the executors have requested by the last exchanges."""
        with self._published.lock:
            self._published.flags.add(flag)
            return sorted(self._published.requests.pop(flag, ()))

    def settle(self) -> None:
        """Return once no producer holds a record, or those that do give it up."""
        wait_until(lambda: not self.producers.unacknowledged_bytes(), DELIVERY_TIMEOUT_S)

    def close(self) -> None:
        """Stop the exchanges."""
        self._watch.stop()
        for each in self.links:
            each.stop()

    def _wake(self) -> None:
        for each in self.links:
            each.wake()

    def _look(self) -> None:
        """Begin with executors that have come, and end with those that are gone."""
        found = self._blocks.master().getPeers(self._blocks.blockManagerId())
        peers = (found.apply(number) for number in range(found.size()))
        hosts = {each.executorId(): each.host() for each in peers}
        for executor in hosts.keys() - self._links.keys():
            # ExecutorCacheTaskLocation.
            location = f"executor_{hosts[executor]}_{executor}"
            exchange = partial(self._exchange, executor, location)
            self._producers.add(executor)
            noted = partial(self._producers.update, executor)
            link = ExecutorLink(executor, exchange, self._published, self._max_skew_ms, noted)
            self._links[executor] = link
            link.start()
            log.info("executor registered executor=%s", executor)
        for executor in self._links.keys() - hosts.keys():
            link = self._links[executor]
            link.stop()
            self._gone_until_s = max(self._gone_until_s, *link.granted.values(), 0.0)
            del self._links[executor]
            self._producers.remove(executor)
            with suppress(KeyError):
                metrics.EXECUTOR_SKEW.remove(executor)
            log.warning("executor is gone executor=%s", executor)
        metrics.EXECUTORS.set(len(hosts))


class ExecutorProducers(ProducerMetrics):
    """The producers in all executors, as of the last exchange with each.

    Counts go on where an executor or a producer is gone: they never become less.
    """

    def __init__(self, links: Callable[[], Iterable[ExecutorLink]]) -> None:
        self._links = links
        self._lock = threading.Lock()
        #: The last numbers of each executor, by its beans' keys; and the counts of all, ever.
        self._last: dict[str, dict[Keys, dict[str, float]]] = {}
        self._counts: dict[Keys, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def refresh(self) -> None:
        """Read them again. Raises SetupError where an executor does not answer."""
        links = list(self._links())
        for each in links:
            each.wake()
        for each in links:
            each.refresh()

    def add(self, executor: str) -> None:
        """Take numbers of an executor from now on."""
        with self._lock:
            self._last[executor] = {}

    def update(self, executor: str, report: ExecutorReport) -> None:
        """Note the numbers that an executor has answered, unless it is gone by now."""
        now = {tuple(sorted(keys.items())): values for keys, values in report.beans}
        with self._lock:
            if (last := self._last.get(executor)) is None:
                return
            for keys, values in now.items():
                for name in COUNTS:
                    count, before = values.get(name, 0.0), last.get(keys, {}).get(name, 0.0)
                    # A producer that was opened again counts from 0.
                    self._counts[keys][name] += count - before if count >= before else count
            self._last[executor] = now

    def remove(self, executor: str) -> None:
        """Forget the buffers of an executor that is gone."""
        with self._lock:
            self._last.pop(executor, None)

    def _read(self, pattern: str) -> Iterable[Bean]:
        wanted = dict(part.split("=", 1) for part in pattern.split(",") if part != "*").items()

        def matching(beans: Mapping[Keys, dict[str, float]]) -> Iterator[Bean]:
            return ((dict(keys), values) for keys, values in beans.items() if wanted <= set(keys))

        with self._lock:
            found = [(keys, dict(counts)) for keys, counts in matching(self._counts)]
            for last in self._last.values():
                # Their counts are among those of all.
                found += [
                    (keys, {name: values[name] for name in values if name not in COUNTS})
                    for keys, values in matching(last)
                ]
        return found
