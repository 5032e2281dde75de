"""The whole pipeline of one process: start, warm up, lead or stand by, stop."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from pyspark.sql.streaming import StreamingQuery

from duetime.admin import check_topics
from duetime.callbacks import Callbacks
from duetime.clock import Clock, SystemClock
from duetime.config import Settings
from duetime.errors import ConfigError, SetupError
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.election import Election
from duetime.pipeline.failures import failures
from duetime.pipeline.fence import Fence
from duetime.pipeline.housekeeping import Tally, free_read
from duetime.pipeline.intake import Intake, intake_records
from duetime.pipeline.jvm import FailedSends, jvm
from duetime.pipeline.kafka import (
    client_id,
    read_stream,
    start_micro_batches,
    start_real_time,
)
from duetime.pipeline.lanes import lanes
from duetime.pipeline.outbox import OUTBOX, outbox, query_name, recover_outbox
from duetime.pipeline.queries import Queries
from duetime.pipeline.recover import recover_intake, recover_lanes
from duetime.pipeline.release import Release
from duetime.pipeline.session import spark_session
from duetime.pipeline.turn import Turn
from duetime.pipeline.warmup import WarmUp
from duetime.pipeline.written import Written
from duetime.stores.kafka import KafkaStore
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How often is looked whether we lead, in seconds.
WATCH_S = 0.2

#: How often the queries are looked at, in seconds.
LOOK_S = 1.0

#: How often it is told what was rejected or is dead, in seconds.
TELL_S = 10.0

#: How long the first messages that are overdue at start have Spark for themselves, in seconds: a
#: JVM that has just been started does one thing well.
FIRST_S = 20.0

#: The queries whose topics are ours alone: what is read and committed is of no more use.
FREED = ("lanes", "failures")

#: How long what was forwarded stays in an outbox, in ms: who recovers finds there that it is sent.
OUTBOX_KEPT_MS = 3_600_000


class Pipeline:
    """Everything that moves messages, in one process. A context manager, or start and stop it.

    Of several on one cluster and namespace one leads, and the others stand by. If it is `fenced`, a
    leader that is paused for long enough that another leads loses its JVM: `was_paused` then.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        jars: Sequence[Path] = (),
        clock: Clock | None = None,
        fenced: bool = False,
    ) -> None:
        if not settings.checkpoint:
            raise ConfigError(
                "setting checkpoint: say where the queries keep their offsets (a directory)"
            )
        self._settings = settings
        self._jars = jars
        self._is_fenced = fenced
        self._fence: Fence | None = None
        self._clock = clock or SystemClock()
        self._stopping = threading.Event()
        self._started_so_far = ExitStack()
        #: What a leader has started; none while we stand by.
        self._leading: ExitStack | None = None
        self._term = 0
        self._look_s = self._tell_s = 0.0

    @property
    def is_leading(self) -> bool:
        """Whether it delivers, and does not only stand by."""
        return self._leading is not None

    @property
    def was_paused(self) -> bool:
        """Whether it cannot go on because it stood still: a new process can."""
        return self._fence is not None and self._fence.has_fired

    def start(self) -> None:
        """Start everything; returns when it is warm, so that the first window is punctual.

        Raises ConfigError where topics are missing or would lose messages.
        """
        check_topics(self._settings)
        to_stop = self._started_so_far
        self._election = Election(self._settings, self._clock)
        with ExitStack() as unless_started:
            unless_started.callback(self._election.close)
            # The group takes a moment to answer, and Spark to start.
            self._election.start()
            self.spark = spark_session(self._settings, self._jars)
            to_stop.callback(self.spark.stop)
            to_stop.push(unless_started.pop_all())
        self._election.guard(jvm(self.spark))
        self._failed_sends = FailedSends(self.spark)
        self._fence = Fence(self.spark) if self._is_fenced else None
        self._written: dict[str | None, Written] = {}
        self._destinations: dict[str | None, Destinations] = {}
        for cluster in (None, *self._settings.clusters):
            self._reach(cluster)
        self._tally = Tally(self._settings)
        to_stop.callback(self._tally.close)
        to_stop.callback(self._step_down)
        self._turn = Turn(self.spark, self._settings, self._written[None])
        if self._election.wait():
            self._lead(first_s=FIRST_S)
        self._warm_up()

    def watch(self) -> None:
        """Lead when it is our turn, and keep the queries running, until `stop` is called.

        Raises SetupError where the JVM has ended.
        """
        while not self._stopping.wait(WATCH_S):
            if self._election.broken:
                raise SetupError(
                    f"Spark's JVM has ended ({self._election.broken}): look for its last words, or "
                    "for the kernel's about memory, and start it again"
                )
            try:
                self._look_around()
            except Exception:
                # What delivers messages goes on without being looked at.
                log.exception("could not look at the pipeline; looking again")

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

    def _reach(self, cluster: str | None) -> None:
        """Keep in touch with a cluster; others than this one need not answer yet."""
        settings, to_stop = self._settings, self._started_so_far
        at = settings.at(cluster) if cluster else settings
        self._destinations[cluster] = destinations = Destinations(self.spark, at)
        destinations.start(wait=cluster is None)
        to_stop.callback(destinations.close)
        self._written[cluster] = written = Written(self.spark, settings, cluster=cluster)
        to_stop.callback(written.close)

    def _warm_up(self) -> None:
        if not self._settings.warm_up_seconds:
            return
        warm_up = WarmUp(self._settings, self._clock, self._stopping)
        if self.is_leading:
            warm_up.drill(self._turn)
            warm_up.until_punctual()
        else:
            # Others lead: nothing may be sent but to ourselves, and our turn may come any time.
            warm_up.drill(self._turn, until=self._election.is_leading)
            log.info("standing by")

    def _lead(self, first_s: float = 0.0) -> None:
        """Start what delivers; what is late already has Spark for itself for so long."""
        settings, self._term = self._settings, self._election.term
        with ExitStack() as started:
            if self._fence:
                self._fence.start()
                started.callback(self._fence.stop)
            # What was left in the middle by whoever led before is read from Kafka now.
            self._store = KafkaStore(settings)
            started.callback(self._store.close)
            self._queries = Queries(self._begin(), self._destinations[None].refresh, self._given_up)
            started.callback(self._queries.stop)
            self._release = release = Release(
                settings=settings, store=self._store, turn=self._turn, clock=self._clock
            )
            started.callback(release.stop)
            if settings.callback_hosts:
                callbacks = Callbacks(settings)
                started.callback(callbacks.close)
                callbacks.start()
            # What is late already goes first.
            wait(release.rescue_once()[:1], timeout=first_s)
            release.start()
            self._queries.start()
            self._leading = started.pop_all()
        log.info("leading")

    def _step_down(self) -> None:
        """Stop what delivers. Safe to repeat."""
        if self._leading is not None:
            # What is stopped on purpose tells of it as of a failure.
            self.spark.sparkContext.setLogLevel("OFF")
            self._leading.close()
            self._leading = None

    def _look_around(self) -> None:
        if self.is_leading and not self._is_our_term():
            self._stand_by()
        elif not self.is_leading and self._election.is_leading.is_set():
            self._lead()
        if self.is_leading and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + LOOK_S
            self._queries.look_around(self._visit)
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + TELL_S
            self._tally.tell()

    def _is_our_term(self) -> bool:
        """Whether we lead still, and not once more: what others did meanwhile is unknown then."""
        return self._election.is_leading.is_set() and self._election.term == self._term

    def _stand_by(self) -> None:
        log.warning("another pipeline leads: stopping what delivers")
        # What is under way waits for a lease, and must be gone before there is one again.
        self.spark.sparkContext.cancelAllJobs()
        self._step_down()
        self.spark.sparkContext.cancelAllJobs()
        self._release.join()
        self.spark.sparkContext.setLogLevel("ERROR")
        log.info("standing by")

    def _visit(self, name: str, query: StreamingQuery) -> None:
        if name in FREED:
            free_read(self._store, query)
        elif name.startswith(OUTBOX):
            free_read(self._store, query, self._clock.now_ms() - OUTBOX_KEPT_MS)

    def _given_up(self, name: str) -> int:
        """How many records the producer of a query could not deliver."""
        cluster = name.removeprefix(OUTBOX) if name.startswith(OUTBOX) else None
        at = self._settings.at(cluster) if cluster else self._settings
        return self._failed_sends.of(client_id(at, name))

    def _begin(self) -> dict[str, Callable[[], StreamingQuery]]:
        """How each query is started, by its name."""
        return {
            "lanes": self._begin_lanes,
            "intake": self._begin_intake,
            "failures": self._begin_failures,
        } | {
            query_name(cluster): partial(self._begin_outbox, cluster)
            for cluster in self._settings.clusters
        }

    def _begin_lanes(self) -> StreamingQuery:
        recover = partial(recover_lanes, self.spark, self._settings, self._written[None])
        self._recover("lanes", [TopicNames(self._settings).lanes], recover)
        return start_real_time(lanes(self.spark, self._settings), self._settings, "lanes")

    def _begin_intake(self) -> StreamingQuery:
        intake = Intake(self._settings)
        recover = partial(recover_intake, self.spark, self._settings, self._written[None], intake)
        self._recover("intake", TopicNames(self._settings).intake, recover)
        records = intake_records(self.spark, self._settings)
        return start_real_time(intake.rows(records), self._settings, "intake")

    def _begin_outbox(self, cluster: str) -> StreamingQuery:
        spark, settings, name = self.spark, self._settings, query_name(cluster)
        self._destinations[cluster].refresh()
        recover = partial(recover_outbox, spark, settings, self._written[cluster], cluster)
        self._recover(name, [TopicNames(settings).outbox(cluster)], recover)
        return start_real_time(outbox(spark, settings, cluster), settings.at(cluster), name)

    def _recover(self, name: str, topics: Sequence[str], recover: Callable[[], None]) -> None:
        """Finish what a query had in flight, where there can be anything: it takes seconds."""
        begun_s = time.monotonic()
        if self._written[None].has_records(topics):
            recover()
            log.info("recovered query=%s seconds=%.1f", name, time.monotonic() - begun_s)

    def _begin_failures(self) -> StreamingQuery:
        failed = read_stream(self.spark, self._settings, [TopicNames(self._settings).failed])
        handle = failures(self._settings, self._destinations, self._written[None])
        return start_micro_batches(failed, handle, self._settings, "failures")
