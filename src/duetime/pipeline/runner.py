"""The whole pipeline of one process: start, warm up, lead or stand by, stop."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from duetime.admin import check_topics
from duetime.clock import Clock, SystemClock
from duetime.config import Settings
from duetime.errors import ConfigError, SetupError
from duetime.metrics import LEADING
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.election import Election
from duetime.pipeline.fence import Fence
from duetime.pipeline.housekeeping import Tally
from duetime.pipeline.isolation import Isolation
from duetime.pipeline.jvm import ProducerMetrics, close_producers, drop_broken_producers, jvm
from duetime.pipeline.kafka import REST_S
from duetime.pipeline.leader import Leader, Means
from duetime.pipeline.session import spark_session
from duetime.pipeline.turn import Turn
from duetime.pipeline.warmup import WarmUp
from duetime.pipeline.written import Written
from duetime.stores.keeping import Keeping
from duetime.stores.opening import check_store

log = logging.getLogger(__name__)

#: How often is looked whether we lead, in seconds.
WATCH_S = 0.2

#: How often the queries are looked at, in seconds.
LOOK_S = 1.0

#: How long before leading is tried again when it has failed, in seconds.
AGAIN_S = 5.0

#: How often it is told what was rejected or is dead, in seconds.
TELL_S = 10.0

#: How long the first messages that are overdue at start have Spark for themselves, in seconds: a
#: JVM that has just been started does one thing well.
FIRST_S = 20.0


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
        self._stopping, self._warm = threading.Event(), threading.Event()
        self._started_so_far = ExitStack()
        #: None while we stand by.
        self._leader: Leader | None = None
        self._term = 0
        self._look_s = self._tell_s = self._lead_s = 0.0

    @property
    def is_leading(self) -> bool:
        """Whether it delivers, and does not only stand by."""
        return self._leader is not None

    @property
    def was_paused(self) -> bool:
        """Whether it cannot go on because it stood still: a new process can."""
        return self._fence is not None and self._fence.has_fired

    def start(self) -> None:
        """Start everything; returns when it is warm, so that the first window is punctual.

        Raises ConfigError where topics are missing, or they or the store would lose messages.
        """
        check_topics(self._settings)
        check_store(self._settings)
        to_stop = self._started_so_far
        self._election = Election(self._settings, self._clock)
        with ExitStack() as unless_started:
            unless_started.callback(self._election.close)
            # The group takes a moment to answer, and Spark to start.
            self._election.start()
            self.spark = spark_session(self._settings, self._jars)
            unless_started.pop_all()
            to_stop.callback(self.spark.stop)
            # Whoever leads next reads back at once: nothing of ours may arrive after that.
            to_stop.callback(self._election.close, settle=partial(close_producers, self.spark))
        self._election.guard(jvm(self.spark))
        self._means = self._meant_for_both(self._settings.in_term(self._next_term()))
        self._tally = Tally(self._settings)
        to_stop.callback(self._tally.close)
        to_stop.callback(self._step_down)
        if self._election.wait():
            self._lead(first_s=FIRST_S)
        self._warm_up()
        self._warm.set()

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

    def _meant_for_both(self, settings: Settings) -> Means:
        """What is needed to lead, kept ready by those who stand by.

        `settings` are those of the term that comes next.
        """
        self._fence = Fence(self.spark) if self._is_fenced else None
        clusters = (None, *self._settings.clusters)
        # Others than this one need not answer yet.
        destinations = {each: self._destinations_of(each) for each in clusters}
        keeping = Keeping()
        written = {each: self._written_at(each, keeping) for each in clusters}
        sends = ProducerMetrics(self.spark)
        isolation = Isolation(self._settings, destinations, sends)
        return Means(
            spark=self.spark,
            settings=settings,
            clock=self._clock,
            written=written,
            destinations=destinations,
            turn=Turn(self.spark, settings, written[None], isolation),
            sends=sends,
            isolation=isolation,
            warm=self._warm,
            keeping=keeping,
            fence=self._fence,
            holds_lease=self._election.holds_lease,
        )

    def _destinations_of(self, cluster: str | None) -> Destinations:
        at = self._settings.at(cluster) if cluster else self._settings
        destinations = Destinations(self.spark, at)
        destinations.start(wait=cluster is None)
        self._started_so_far.callback(destinations.close)
        return destinations

    def _written_at(self, cluster: str | None, keeping: Keeping) -> Written:
        written = Written(self.spark, self._settings, cluster=cluster, keeping=keeping)
        self._started_so_far.callback(written.close)
        return written

    def _warm_up(self) -> None:
        if not self._settings.warm_up_seconds:
            return
        warm_up = WarmUp(self._settings, self._clock, self._stopping)
        if self.is_leading:
            warm_up.drill(self._means.turn)
            warm_up.until_punctual()
        else:
            # Others lead: nothing may be sent but to ourselves, and our turn may come any time.
            warm_up.drill(self._means.turn, until=self._election.is_leading)
            log.info("standing by")

    def _next_term(self) -> int:
        """Return the present term if we lead already, else the one in which we would lead."""
        return self._election.term + (not self._election.is_leading.is_set())

    def _prepare(self, term: int) -> None:
        """Make the plans of this term, unless they are there: their rows look at its lease."""
        means = self._means
        if means.settings.term != term:
            settings = self._settings.in_term(term)
            turn = Turn(means.spark, settings, means.written[None], means.isolation)
            self._means = replace(means, settings=settings, turn=turn)

    def _lead(self, first_s: float = 0.0) -> None:
        self._term = self._election.term
        self._prepare(self._term)
        leader = Leader(self._means)
        leader.start(self._is_wanted, first_s)
        self._leader = leader
        self._election.tell = leader.told
        LEADING.set(1)
        log.info("leading")

    def _step_down(self) -> None:
        """Stop what delivers. Safe to repeat."""
        if self._leader is not None:
            # What is stopped on purpose tells of it as of a failure.
            self._means.spark.sparkContext.setLogLevel("OFF")
            LEADING.set(0)
            self._election.tell = dict
            self._leader.stop()
            self._leader = None

    def _look_around(self) -> None:
        if self._leader and not self._is_our_term():
            self._stand_by(self._leader)
        elif not self._leader and self._election.is_leading.is_set():
            self._lead_again()
        if self._leader and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + LOOK_S
            self._leader.look_around()
        if time.monotonic() >= self._tell_s:
            try:
                if broken := drop_broken_producers(self.spark):
                    log.error(
                        "producers replaced that could send nothing any more count=%d", broken
                    )
                self._tally.tell()
            finally:
                # Counted from its end: while Kafka does not answer, each takes 10 s.
                self._tell_s = time.monotonic() + TELL_S

    def _lead_again(self) -> None:
        if time.monotonic() < self._lead_s:
            return
        try:
            self._lead()
        except Exception:
            # It asks much of the brokers, and what is missing is not back at once.
            self._lead_s = time.monotonic() + AGAIN_S
            raise

    def _is_wanted(self) -> bool:
        return self._is_our_term() and not self._stopping.is_set()

    def _is_our_term(self) -> bool:
        """Whether we lead still, and not once more: what others did meanwhile is unknown then."""
        return self._election.is_leading.is_set() and self._election.term == self._term

    def _stand_by(self, leader: Leader) -> None:
        log.warning("the lead is lost: stopping what delivers")
        context = self._means.spark.sparkContext
        # What is under way waits for a lease, and must be gone before there is one again.
        context.cancelAllJobs()
        self._step_down()
        context.cancelAllJobs()
        leader.join()
        context.setLogLevel("ERROR")
        self._lead_s = time.monotonic() + REST_S
        # While there is time: planning takes seconds.
        self._prepare(self._next_term())
        log.info("standing by")
