"""The streaming queries of a pipeline: started together, looked at, and started again."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from pyspark.errors import PySparkException
from pyspark.sql.streaming import StreamingQuery

from duetime.errors import DuetimeError, words
from duetime.metrics import QUERY_FAILURES
from duetime.pipeline.kafka import REST_S
from duetime.standing import RUNS

log = logging.getLogger(__name__)

#: The rest of a query that fails is doubled for each further failure, up to this, in seconds.
MOST_RESTART_S = 30.0

#: How often those that run are looked at, while others are being started, in seconds.
LOOK_S = 1.0

#: How long those that are just being started are waited for when all are stopped, in seconds.
STOP_S = 5.0

#: A query that ran so long has recovered from what ailed it, in seconds.
WELL_S = 60.0

#: What is done with each query that is well.
Visit = Callable[[str, StreamingQuery], None]


@dataclass(slots=True)
class Running:
    """A streaming query, and how to start it again."""

    name: str
    begin: Callable[[], StreamingQuery]
    #: None where it could not be started yet.
    query: StreamingQuery | None = None
    begun_s: float = 0.0
    failures: int = 0
    #: How many records its producer had given up when it was started.
    given_up: int = 0
    #: How many partitions each topic had when the query was begun, of those that may get more.
    partitions: dict[str, int] = field(default_factory=dict)
    #: When it is started again, by the monotonic clock; None while it runs.
    restart_s: float | None = None
    #: What starts it: that takes for as long as there is something to recover.
    beginning: Future[None] | None = None

    @property
    def is_beginning(self) -> bool:
        """Whether it is just being started."""
        return self.beginning is not None and not self.beginning.done()

    def words(self) -> str:
        """How it fares: `runs`, or what keeps it from that."""
        restart_s = self.restart_s
        if restart_s is not None:
            left_s = max(0.0, restart_s - time.monotonic())
            return f"failed {self.failures} times, begins again in {left_s:.0f} s"
        return RUNS if self.query and not self.is_beginning else "begins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What is known of topics that get more partitions, by the name of the query that reads them.

    A real-time query reads those that it began its batch with.
    """

    #: How many each of these topics has.
    partitions: Callable[[str], Mapping[str, int]]
    #: Waits until what a query has sent is acknowledged, so that it is found when it is read back.
    drain: Callable[[str], object]


class Queries:
    """Keeps some queries running, each from its last commit. Not thread-safe."""

    def __init__(  # noqa: PLR0913 (what each query needs to begin, and to begin again)
        self,
        begin: Mapping[str, Callable[[], StreamingQuery]],
        *,
        refresh: Callable[[], None],
        given_up: Callable[[str], int],
        blame: Callable[[Exception], object],
        elsewhere: Collection[str] = (),
        growth: Growth | None = None,
        moved: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`begin` has how each is started, by its name; `refresh` is called before that.

        `blame` hears why one has failed, before it is started again.

        `given_up` says how many records a query's producer could not deliver: Spark asks for that
        with the next record, and an idle query would not fail for minutes. Those that deliver
        `elsewhere` are named: nothing here waits for them. Without `growth`, no topic gets more
        partitions. `moved` has the queries that read a topic which was created again since they
        were begun, and which: they would skip records.
        """
        self._running = [Running(name, each) for name, each in begin.items()]
        for name in begin:
            # Told from now on, as 0: Prometheus sees no increase in what begins with a failure.
            QUERY_FAILURES.labels(name)
        self._refresh = refresh
        self._given_up = given_up
        self._blame = blame
        self._elsewhere = elsewhere
        self._growth = growth or Growth(partitions=lambda _: {}, drain=lambda _: None)
        self._moved = moved
        self._stopping = threading.Event()
        # At once, because each takes seconds in a JVM that has just been started.
        self._pool = ThreadPoolExecutor(len(self._running), thread_name_prefix="begin")

    def start(self, visit: Visit, is_wanted: Callable[[], bool]) -> None:
        """Start them; returns when they run, or could not be started, but for those elsewhere.

        Recovering takes one of them minutes, perhaps: the others are looked after meanwhile, for as
        long as that `is_wanted`.
        """
        for running in self._running:
            self._begin_soon(running)
        here = (each for each in self._running if each.name not in self._elsewhere)
        first = [each.beginning for each in here if each.beginning]
        while wait(first, timeout=LOOK_S).not_done:
            try:
                if is_wanted():
                    self.look_around(visit)
            except Exception:
                log.exception("could not look at the queries; looking again")

    def told(self) -> dict[str, str]:
        """How each fares, in words. From any thread."""
        return {each.name: each.words() for each in self._running}

    def look_around(self, visit: Visit) -> None:
        """Start what has failed again, after a pause that the others do not make; visit others."""
        moved = self._moved()
        for running in self._running:
            if running.is_beginning:
                continue
            if running.restart_s is not None:
                if running.restart_s <= time.monotonic():
                    self._begin_soon(running)
            elif running.query and (failed := running.query.exception()):
                self._put_off(running, failed)
            elif running.query and self._given_up(running.name) > running.given_up:
                _stopped(running.query)
                self._put_off(running, DuetimeError("records could not be delivered in time"))
            elif running.query and running.name in moved:
                _stopped(running.query)
                topic = moved[running.name]
                error = DuetimeError(f"topic {topic} was created again while it was read")
                self._put_off(running, error)
            elif running.query and self._has_more_partitions(running):
                running.beginning = self._pool.submit(self._begin_again, running)
            elif running.query:
                visit(running.name, running.query)

    def stop(self) -> None:
        """Stop them, and wait until they are."""
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([each.beginning for each in self._running if each.beginning], timeout=STOP_S)
        queries = [running.query for running in self._running if running.query]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_stopped, queries))

    def _begin_soon(self, running: Running) -> None:
        running.restart_s, running.begun_s = None, time.monotonic()
        running.beginning = self._pool.submit(self._begin, running)

    def _has_more_partitions(self, running: Running) -> bool:
        now = self._growth.partitions(running.name)
        added = {
            topic: number - running.partitions.setdefault(topic, number)
            for topic, number in now.items()
        }
        for topic, number in added.items():
            if number > 0:
                log.info(
                    "partitions were added, query begins again query=%s topic=%s partitions=%d",
                    running.name,
                    topic,
                    number,
                )
        return any(number > 0 for number in added.values())

    def _begin_again(self, running: Running) -> None:
        """End the query's batch and go on: what was in flight is read back, and not sent twice."""
        if running.query:
            _stopped(running.query)
        self._growth.drain(running.name)
        self._begin(running)

    def _begin(self, running: Running) -> None:
        try:
            # What failed may be a topic that is not what it was.
            self._refresh()
            running.given_up = self._given_up(running.name)
            running.partitions = dict(self._growth.partitions(running.name))
            running.query = running.begin()
        except Exception as error:  # noqa: BLE001 (whatever it was, it is tried again)
            self._put_off(running, error)
        else:
            if self._stopping.is_set():
                # Whoever stops them may not have waited for so long.
                _stopped(running.query)

    def _put_off(self, running: Running, failed: Exception) -> None:
        self._blame(failed)
        if time.monotonic() - running.begun_s > WELL_S:
            running.failures = 0
        pause_s = min(REST_S * 2**running.failures, MOST_RESTART_S)
        running.restart_s = time.monotonic() + pause_s
        running.failures += 1
        QUERY_FAILURES.labels(running.name).inc()
        name, told = running.name, words(failed)
        log.error("query failed query=%s restart_s=%.0f error=%s", name, pause_s, told)


def _stopped(query: StreamingQuery) -> None:
    try:
        query.stop()
    except PySparkException as error:
        log.warning("query did not stop in time query=%s error=%s", query.name, words(error))
