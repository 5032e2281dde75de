"""Pipeline service: one process that starts, warms up, leads or stands by, and stops."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from duetime.core.clock import Clock, SystemClock
from duetime.core.errors import ConfigError, LeaderStuck, SetupError
from duetime.core.metrics import IS_LEADER
from duetime.core.settings import Settings, is_submitted
from duetime.core.topics import TopicNames
from duetime.kafka.admin import check_topics
from duetime.kafka.leadership import IS_WARM
from duetime.kafka.offsets import Offsets
from duetime.pipeline.delivery.destinations import TopicMetadataCache
from duetime.pipeline.delivery.isolation import FailedDestinations, RecordSender
from duetime.pipeline.leader import Leader, PipelineContext
from duetime.pipeline.leadership.election import Election
from duetime.pipeline.leadership.lease import Watchdog
from duetime.pipeline.monitoring.synthetic_messages import WarmUp
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.job import ReleaseJob
from duetime.spark.executors import task_jvms
from duetime.spark.kafka_io import RETRY_PAUSE_S
from duetime.spark.producer_pool import drop_broken_producers
from duetime.spark.session import is_alive, require_slots, spark_session
from duetime.spark.task_jvms import DriverJvm
from duetime.stores.factory import check_store
from duetime.stores.wheel_store import DeletionGuard

log = logging.getLogger(__name__)

#: Interval of checks whether this process leads, in seconds: a part of each takeover.
ELECTION_INTERVAL_S = 0.05

#: Interval of checks of the JVM and the queries, in seconds.
CHECK_INTERVAL_S = 1.0

#: Rest before leading is tried again when it has failed, in seconds.
LEAD_RETRY_S = 5.0

#: Interval of log lines about rejected messages and dead letters, in seconds.
REJECTIONS_INTERVAL_S = 10.0

#: Tasks besides those of real-time queries: of windows and cascades, retries and recovery. And how
#: many more for each further shard of a slot: windows overlap, for some 3 s.
OTHER_TASKS, SHARD_TASKS = 14, 4

#: How long overdue messages have Spark to themselves, in seconds. At a start, a JVM that was just
#: started does one thing well; at a takeover, the recovery of lanes and intake takes all cores (two
#: of them: the first message came half a second later).
OVERDUE_FIRST_S, TAKEOVER_FIRST_S = 20.0, 1.0


class Pipeline:
    """Everything that moves messages, in one process. A context manager, or start and stop it.

    Of several on one cluster and namespace one leads, and the others stand by. If it is `fenced`, a
    leader that is silent for so long that another leads loses its JVM: `has_watchdog_fired` then.
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
        self._settings, self._jars, self._is_fenced = settings, jars, fenced
        self._clock = clock or SystemClock()
        self._watchdog: Watchdog | None = None
        self._stopping, self._warm = threading.Event(), threading.Event()
        self._to_stop = ExitStack()
        #: None while we stand by.
        self._leader: Leader | None = None
        self._term = 0
        self._check_s = self._log_rejections_s = self._lead_s = 0.0

    @property
    def is_leading(self) -> bool:
        """True if it delivers, and does not only stand by."""
        return self._leader is not None

    @property
    def has_watchdog_fired(self) -> bool:
        """True if it cannot go on because another may lead: a new process can."""
        return self._watchdog is not None and self._watchdog.has_fired

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; return when it is warm, so that the first window is punctual.

        Raises ConfigError where topics are missing, or they or the store would lose messages.
        """
        check_topics(self._settings)
        check_store(self._settings)
        self._election = Election(self._settings, self._clock)
        self._sender = RecordSender(self._settings, self._election.holds_lease_of)
        self._election.status = self._standby_status
        with ExitStack() as unless_started:
            unless_started.callback(self._election.close)
            has_own_jvm = not (self._settings.spark_master or is_submitted())
            if has_own_jvm:
                # The group takes a moment to answer, and Spark to start.
                self._election.start()
            self.spark = spark_session(self._settings, self._jars, delivers=True)
            self._to_stop.callback(self.spark.stop)
            self._jvms = task_jvms(self.spark, self._settings)
            self._to_stop.callback(self._jvms.close)
            if not has_own_jvm:
                # Executors take minutes to come, and another may be ready to lead.
                self._election.start()
            unless_started.pop_all()
            # The next leader reads back at once: nothing of ours may arrive after that.
            self._to_stop.callback(self._election.close, settle=self._settle)
        self._election.attach(self._jvms)
        self._context = self._prepare_context(self._settings.in_term(self._next_term()))
        self._rejections = RejectionLogger(self._settings)
        self._to_stop.callback(self._rejections.close)
        self._to_stop.callback(self._step_down)
        if self._election.wait():
            self._lead(OVERDUE_FIRST_S)
        if self._settings.warm_up_seconds:
            self._warm_up()
        self._warm.set()

    def _prepare_context(self, settings: Settings) -> PipelineContext:
        """Prepare what is needed to lead or stand by; `settings` are those of the next term."""
        if self._is_fenced:
            self._watchdog = Watchdog(self.spark, self._election.jvm_end_s, self._is_quiet)
        destinations: dict[str | None, TopicMetadataCache] = {}
        delivery_logs: dict[str | None, DeliveryLog] = {}
        guard = DeletionGuard()
        for cluster in (None, *self._settings.clusters):
            cache = TopicMetadataCache(self._jvms, self._settings, cluster)
            # Only this cluster has to answer now.
            cache.start(wait=cluster is None)
            self._to_stop.callback(cache.close)
            written = DeliveryLog(
                self.spark,
                self._settings,
                cluster=cluster,
                deletion_guard=guard,
                stuck_partitions=cache.stuck_partitions,
            )
            self._to_stop.callback(written.close)
            destinations[cluster], delivery_logs[cluster] = cache, written
        require_slots(self.spark, self._needed_slots(destinations[None].partitions))
        metrics = self._jvms.producers
        isolation = FailedDestinations(self._settings, destinations, metrics)
        return PipelineContext(
            spark=self.spark,
            jvm=self._jvms if isinstance(self._jvms, DriverJvm) else None,
            settings=settings,
            clock=self._clock,
            delivery_logs=delivery_logs,
            destinations=destinations,
            release_job=ReleaseJob(self.spark, settings, delivery_logs[None], isolation),
            producer_metrics=metrics,
            isolation=isolation,
            sender=self._sender,
            warm=self._warm,
            deletion_guard=guard,
            watchdog=self._watchdog,
            holds_lease=partial(self._election.holds_lease_of, settings.term),
            generations=lambda: self._election.generations,
        )

    def _needed_slots(self, partitions: Mapping[str, int]) -> int:
        """Return the number of tasks that may run at once, given the partitions of each topic."""
        names, clusters = TopicNames(self._settings), self._settings.clusters
        there = (*map(names.outbox, clusters), *map(names.isolated, clusters))
        topics = (*names.intake, names.lanes, *there)
        exchanges = len(self._jvms.executors)
        wheel = self._settings.wheel
        others = OTHER_TASKS + SHARD_TASKS * (wheel.partitions // wheel.ring - 1) + exchanges
        return others + sum(partitions.get(topic, 0) for topic in topics)

    def _warm_up(self) -> None:
        warm_up = WarmUp(self._settings, self._clock, self._stopping)
        if self.is_leading:
            warm_up.drill(self._context.release_job)
            warm_up.until_punctual()
        else:
            # Another leads: nothing may be sent but to ourselves, and we may have to lead any time.
            warm_up.drill(self._context.release_job, until=self._election.is_leading)
            log.info("standing by")

    def watch(self) -> None:
        """Lead when elected, and keep the queries running, until `stop` is called.

        Raises SetupError where the JVM has ended, or the wheel has more partitions than a standby
        knows; LeaderStuck where a standby may deliver, and this leader does not.
        """
        while not self._stopping.wait(ELECTION_INTERVAL_S):
            if not self._leader:
                self._require_known_shards()
            self._require_jvm()
            self._require_delivery()
            try:
                self._supervise()
            except Exception:
                # Delivery goes on without supervision.
                log.exception("pipeline supervision failed, will be repeated")

    def _require_known_shards(self) -> None:
        """Raise SetupError where a standby would not read all of the wheel, if it led."""
        topic, wheel = TopicNames(self._settings).wheel(0), self._settings.wheel
        if self._context.destinations[None].partitions.get(topic, 0) > wheel.partitions:
            raise SetupError(
                f"topic {topic} has got partitions that these settings do not know: set "
                "slot_partitions_since as other processes have it, and start again"
            )

    def _supervise(self) -> None:
        if self._leader and not self._is_our_term():
            self._stand_by(self._leader)
        elif not self._leader and self._election.is_leading.is_set():
            self._try_to_lead()
        if time.monotonic() >= self._check_s:
            self._check_s = time.monotonic() + CHECK_INTERVAL_S
            if self._leader:
                self._leader.supervise()
        if time.monotonic() >= self._log_rejections_s:
            try:
                if broken := drop_broken_producers(self.spark):
                    log.error("replaced producers that could not send count=%d", broken)
                self._rejections.log_new()
            finally:
                # Counted from its end: while Kafka does not answer, each takes 10 s.
                self._log_rejections_s = time.monotonic() + REJECTIONS_INTERVAL_S

    def _try_to_lead(self) -> None:
        if time.monotonic() < self._lead_s:
            return
        try:
            self._lead(TAKEOVER_FIRST_S)
        except Exception:
            # A start asks much of the brokers, and a missing one is not back at once.
            self._lead_s = max(self._lead_s, time.monotonic() + LEAD_RETRY_S)
            raise

    def _lead(self, overdue_first_s: float) -> None:
        self._term = self._election.term
        self._plan_for(self._term)
        leader = Leader(self._context)
        try:
            leader.start(
                lambda: self._is_our_term() and not self._stopping.is_set(), overdue_first_s
            )
        except Exception:
            # What overdue jobs still send would be sent by the next start as well.
            if leader.has_jobs:
                self._end_jobs(leader)
            raise
        self._leader = leader
        self._election.status = leader.status
        IS_LEADER.set(1)
        log.info("leading")

    def _standby_status(self) -> dict[str, Any]:
        return {IS_WARM: self._warm.is_set() and time.monotonic() >= self._lead_s}

    def _settle(self) -> None:
        """Wait until nothing is sent from here any more."""
        self._sender.settle()
        self._jvms.settle()

    def _is_quiet(self) -> bool:
        """Return whether nothing can be sent from here. Raises JVM_ERRORS."""
        return not (self._election.holds_lease() or self._jvms.producers.unacknowledged_bytes())

    def _require_jvm(self) -> None:
        """Raise SetupError where the JVM has ended, which a standby would notice when it leads."""
        # The call costs more than the rest of the loop: only when the queries are checked as well.
        answers = time.monotonic() < self._check_s or is_alive(self.spark)
        if self._election.broken or self.has_watchdog_fired or not answers:
            raise SetupError(
                f"Spark's JVM has ended ({self._election.broken}): read its last log lines and "
                "the kernel's about memory, and start again"
            )

    def _require_delivery(self) -> None:
        """Raise LeaderStuck where messages are no longer delivered, and a standby is ready."""
        if self._leader and self._election.has_standby and (path := self._leader.stuck_path):
            raise LeaderStuck(
                f"messages through the {path} are not delivered for "
                f"{self._settings.probe_timeout_seconds:.0f} s, so the standby leads: see the log "
                "for what failed, the local disk, and the connections to each broker"
            )

    def _plan_for(self, term: int) -> None:
        """Build the release job of this term, if it is another: its rows check the term's lease."""
        context = self._context
        if context.settings.term != term:
            settings = self._settings.in_term(term)
            log_here = context.delivery_logs[None]
            job = ReleaseJob(context.spark, settings, log_here, context.isolation)
            self._context = replace(
                context,
                settings=settings,
                release_job=job,
                holds_lease=partial(self._election.holds_lease_of, term),
            )

    def _next_term(self) -> int:
        """Return the present term if we lead already, else the one in which we would lead."""
        return self._election.term + (not self._election.is_leading.is_set())

    def _is_our_term(self) -> bool:
        """Return whether we still lead, without another leader in between."""
        return self._election.is_leading.is_set() and self._election.term == self._term

    def _stand_by(self, leader: Leader) -> None:
        log.warning("the lead is lost, stopping delivery")
        spark_context = self._context.spark.sparkContext
        # Rows under way wait for a lease, and must be gone before there is one again.
        spark_context.cancelAllJobs()
        self._step_down()
        self._end_jobs(leader)
        spark_context.setLogLevel("ERROR")
        # While there is time: planning takes seconds.
        self._plan_for(self._next_term())
        log.info("standing by")

    def _end_jobs(self, leader: Leader) -> None:
        """End the jobs of a leader that is stopped. None leads until their records have arrived."""
        self._context.spark.sparkContext.cancelAllJobs()
        leader.join()
        self._lead_s = time.monotonic() + RETRY_PAUSE_S

    def _step_down(self) -> None:
        """Stop delivery. Safe to repeat."""
        if self._leader is not None:
            # Spark logs a query that is stopped on purpose as a failure.
            self._context.spark.sparkContext.setLogLevel("OFF")
            IS_LEADER.set(0)
            self._election.status = self._standby_status
            self._leader.stop()
            self._leader = None

    def ask_to_stop(self) -> None:
        """Make `watch` return. May be called from a signal handler."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop planning, let open windows end, stop the queries and Spark: a few seconds.

        Also after a `start` that failed half-way. Safe to repeat.
        """
        self.ask_to_stop()
        self._to_stop.close()


class RejectionLogger:
    """Logs how many messages were rejected or became dead letters since the last call."""

    def __init__(self, settings: Settings) -> None:
        names = TopicNames(settings)
        self._kinds = {names.rejected: "rejected", names.dead_letter: "dead letters"}
        self._offsets = Offsets(settings, f"{settings.namespace}.tally")
        self._totals = self._count()

    def log_new(self) -> None:
        """Log what was added since the last call. Raises KafkaError."""
        totals = self._count()
        for topic, total in totals.items():
            if more := total - self._totals[topic]:
                kind = self._kinds[topic]
                log.warning("%s messages=%d total=%d topic=%s", kind, more, total, topic)
        self._totals = totals

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _count(self) -> dict[str, int]:
        # Each topic has one partition.
        ends = self._offsets.ends([(topic, 0) for topic in self._kinds])
        return {topic: end for (topic, _), end in ends.items()}
