"""The whole pipeline of one process: start, warm up, watch, stop."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pyspark.errors import PySparkException
from pyspark.sql.streaming import StreamingQuery

from duetime.admin import check_topics
from duetime.clock import Clock, SystemClock
from duetime.config import Settings
from duetime.errors import ConfigError, KafkaError
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.failures import failures
from duetime.pipeline.housekeeping import Tally, free_read
from duetime.pipeline.intake import Intake, intake_records
from duetime.pipeline.kafka import (
    DELIVERY_TIMEOUT_S,
    read_stream,
    start_micro_batches,
    start_real_time,
)
from duetime.pipeline.lanes import lanes
from duetime.pipeline.recover import recover_intake, recover_lanes
from duetime.pipeline.release import Release
from duetime.pipeline.session import spark_session
from duetime.pipeline.turn import Turn
from duetime.pipeline.warmup import WarmUp
from duetime.pipeline.written import Written
from duetime.stores.kafka import KafkaStore
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How often the queries are looked at, in seconds.
WATCH_S = 1.0

#: How often it is told what was rejected or is dead, in seconds.
TELL_S = 10.0

#: How long the first messages that are overdue at start have Spark for themselves, in seconds.
FIRST_S = 20.0

#: A query that fails is started again after this long, in seconds: what it has handed to its
#: producer may still arrive for `delivery.timeout.ms`, and must be there to be read back.
RESTART_S = DELIVERY_TIMEOUT_S + 1.0

#: Doubled for each further failure, up to this, in seconds.
MOST_RESTART_S = 120.0

#: A query that ran so long has recovered from what ailed it, in seconds.
WELL_S = 60.0

#: The queries whose topics are ours alone: what is read and committed is of no more use.
FREED = ("lanes", "failures")


@dataclass(slots=True)
class Running:
    """A streaming query, and how to start it again."""

    name: str
    begin: Callable[[], StreamingQuery]
    #: None where it could not be started yet.
    query: StreamingQuery | None = None
    begun_s: float = 0.0
    failures: int = 0
    #: When it is started again, by the monotonic clock; None while it runs.
    restart_s: float | None = None


class Pipeline:
    """Everything that moves messages, in one process. A context manager, or start and stop it."""

    def __init__(
        self, settings: Settings, *, jars: Sequence[Path] = (), clock: Clock | None = None
    ) -> None:
        if not settings.checkpoint:
            raise ConfigError(
                "setting checkpoint: say where the queries keep their offsets (a directory)"
            )
        self._settings = settings
        self._jars = jars
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._queries: list[Running] = []
        self._started_so_far = ExitStack()
        self._tell_s = 0.0

    def start(self) -> None:
        """Start everything; returns when it is warm, so that the first window is punctual.

        Raises ConfigError where topics are missing or would lose messages.
        """
        check_topics(self._settings)
        to_stop = self._started_so_far
        self.spark = spark_session(self._settings, self._jars)
        to_stop.callback(self.spark.stop)
        self._store = KafkaStore(self._settings)
        to_stop.callback(self._store.close)
        to_stop.callback(self._stop_queries)
        self._destinations = Destinations(self.spark, self._settings)
        self._destinations.start()
        to_stop.callback(self._destinations.close)
        self._tally = Tally(self._settings)
        to_stop.callback(self._tally.close)
        self._written = Written(self.spark, self._settings)
        to_stop.callback(self._written.close)
        turn = Turn(self.spark, self._settings, self._written)
        release = Release(settings=self._settings, store=self._store, turn=turn, clock=self._clock)
        to_stop.callback(release.stop)
        # What is late already goes first: a JVM that has just been started does one thing well.
        wait(release.rescue_once()[:1], timeout=FIRST_S)
        release.start()
        self._queries = [Running(name, begin) for name, begin in self._begin().items()]
        with ThreadPoolExecutor() as pool:
            # At once, because each takes seconds in a JVM that has just been started.
            list(pool.map(self._restart, self._queries))
        if self._settings.warm_up_seconds:
            warm_up = WarmUp(self._settings, self._clock, self._stopping)
            warm_up.drill(turn)
            warm_up.until_punctual()

    def watch(self) -> None:
        """Keep the queries running until `stop` is called from elsewhere."""
        while not self._stopping.wait(WATCH_S):
            try:
                self._look_around()
            except Exception:
                # What delivers messages goes on without being looked at.
                log.exception("could not look at the queries; looking again")

    def ask_to_stop(self) -> None:
        """Make `watch` return. May be called from a signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop planning, let open windows end, stop the queries and Spark: a few seconds.

        Stops what was started, where `start` did not get through. Safe to repeat.
        """
        self.ask_to_stop()
        self._started_so_far.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin(self) -> dict[str, Callable[[], StreamingQuery]]:
        """How each query is started, by its name."""
        return {
            "lanes": self._begin_lanes,
            "intake": self._begin_intake,
            "failures": self._begin_failures,
        }

    def _begin_lanes(self) -> StreamingQuery:
        with self._told("lanes"):
            recover_lanes(self.spark, self._settings, self._written)
        return start_real_time(lanes(self.spark, self._settings), self._settings, "lanes")

    def _begin_intake(self) -> StreamingQuery:
        intake = Intake(self._settings)
        with self._told("intake"):
            recover_intake(self.spark, self._settings, self._written, intake)
        records = intake_records(self.spark, self._settings)
        return start_real_time(intake.rows(records), self._settings, "intake")

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        log.info("recovered query=%s seconds=%.1f", name, time.monotonic() - begun_s)

    def _begin_failures(self) -> StreamingQuery:
        failed = read_stream(self.spark, self._settings, [TopicNames(self._settings).failed])
        handle = failures(self._settings, self._destinations, self._written)
        return start_micro_batches(failed, handle, self._settings, "failures")

    def _stop_queries(self) -> None:
        # What is stopped on purpose tells of it as of a failure.
        self.spark.sparkContext.setLogLevel("OFF")
        queries = [running.query for running in self._queries if running.query]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_stopped, queries))

    def _look_around(self) -> None:
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + TELL_S
            self._tally.tell()
        for running in self._queries:
            self._look_at(running)

    def _look_at(self, running: Running) -> None:
        """Start a failed query again from its last commit, after a pause that the others do not."""
        if running.restart_s is not None:
            if running.restart_s <= time.monotonic():
                self._restart(running)
        elif running.query and (failed := running.query.exception()):
            self._put_off(running, failed)
        elif running.query and running.name in FREED:
            free_read(self._store, running.query)

    def _put_off(self, running: Running, failed: Exception) -> None:
        if time.monotonic() - running.begun_s > WELL_S:
            running.failures = 0
        pause_s = min(RESTART_S * 2**running.failures, MOST_RESTART_S)
        running.restart_s = time.monotonic() + pause_s
        running.failures += 1
        log.error(
            "query failed query=%s restart_s=%.0f error=%s",
            running.name,
            pause_s,
            _first_line(failed),
        )

    def _restart(self, running: Running) -> None:
        running.restart_s, running.begun_s = None, time.monotonic()
        try:
            # What failed may be a topic that is not what it was.
            self._destinations.refresh()
            running.query = running.begin()
        except (PySparkException, KafkaError) as error:
            self._put_off(running, error)


def _stopped(query: StreamingQuery) -> None:
    try:
        query.stop()
    except PySparkException as error:
        log.warning("query did not stop in time query=%s error=%s", query.name, _first_line(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
