"""The whole pipeline of one process: start, warm up, watch, stop."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duetime.admin import check_topics
from duetime.clock import Clock, SystemClock
from duetime.config import Settings
from duetime.errors import ConfigError
from duetime.pipeline.housekeeping import free_lanes
from duetime.pipeline.intake import intake
from duetime.pipeline.kafka import start_real_time
from duetime.pipeline.lanes import lanes
from duetime.pipeline.release import Release
from duetime.pipeline.session import spark_session
from duetime.pipeline.turn import Turn
from duetime.pipeline.warmup import WarmUp
from duetime.stores.kafka import KafkaStore

log = logging.getLogger(__name__)

#: How often the queries are looked at, in seconds.
WATCH_S = 1.0

#: A query that fails is started again after this long, doubled each time up to the second, in
#: seconds.
RESTART_S = (1.0, 60.0)


@dataclass(slots=True)
class Running:
    """A streaming query, and how to start it again."""

    name: str
    rows: Callable[[SparkSession, Settings], DataFrame]
    query: StreamingQuery
    failures: int = 0


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
        turn = Turn(self.spark, self._settings)
        release = Release(settings=self._settings, store=self._store, turn=turn, clock=self._clock)
        to_stop.callback(release.stop)
        release.rescue_once()
        self._queries = [self._started("intake", intake), self._started("lanes", lanes)]
        release.start()
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

    def _started(self, name: str, rows: Callable[[SparkSession, Settings], DataFrame]) -> Running:
        query = start_real_time(rows(self.spark, self._settings), self._settings, name)
        return Running(name, rows, query)

    def _stop_queries(self) -> None:
        # What is stopped on purpose tells of it as of a failure.
        self.spark.sparkContext.setLogLevel("OFF")
        for running in self._queries:
            running.query.stop()

    def _look_around(self) -> None:
        for running in self._queries:
            self._look_at(running)

    def _look_at(self, running: Running) -> None:
        failed = running.query.exception()
        if failed is None:
            if running.name == "lanes":
                free_lanes(self._store, running.query)
            return
        self._restart(running, failed)

    def _restart(self, running: Running, failed: PySparkException) -> None:
        """Start a failed query again from its last commit; what it did since is done again."""
        least_s, most_s = RESTART_S
        pause_s = min(least_s * 2**running.failures, most_s)
        log.error(
            "query failed query=%s restart_s=%.0f error=%s",
            running.name,
            pause_s,
            _first_line(failed),
        )
        if self._stopping.wait(pause_s):
            return
        try:
            running.query = self._started(running.name, running.rows).query
        except PySparkException as error:
            log.error(  # noqa: TRY400 (the reason, without the stack)
                "query did not start query=%s error=%s", running.name, _first_line(error)
            )
        running.failures += 1


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
