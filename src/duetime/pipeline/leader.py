"""Leader: everything that runs while this process leads, for one term.

    watchdog -> stores -> transactional delivery -> overdue messages released -> queries built
             -> background services -> schedulers -> queries -> probes

That is the order of a start; a stop is its reverse. Overdue messages go first, because a JVM that
has just been started does one thing well.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, cast

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from duetime.client.status import MAX_OVERDUE_RELEASES
from duetime.core.clock import Clock
from duetime.core.metrics import RECOVERY_SECONDS
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames, visible_topics
from duetime.kafka.leadership import Generations
from duetime.kafka.offsets import Partition
from duetime.pipeline import (
    INTAKE,
    INTAKE_TX,
    ISOLATED,
    ISOLATED_AT,
    LANES,
    OUTBOX,
    RETRIES,
    SAVING,
    SCHEDULES,
)
from duetime.pipeline.delivery.destinations import TopicMetadataCache
from duetime.pipeline.delivery.isolation import FailedDestinations, RecordSender
from duetime.pipeline.delivery.transactional import TransactionalDelivery
from duetime.pipeline.leadership.lease import Watchdog
from duetime.pipeline.monitoring.exporter import MetricsExporter, TransactionWatch, note_batch
from duetime.pipeline.monitoring.prober import ProberSet
from duetime.pipeline.query_factory import QueryFactory
from duetime.pipeline.query_supervisor import QuerySupervisor
from duetime.pipeline.recovery.progress import ProgressKeeper
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.job import ReleaseJob
from duetime.pipeline.release.scheduler import ReleaseScheduler
from duetime.pipeline.release.slot_indexer import SlotIndexing
from duetime.pipeline.store_queries import SAVED_KEPT_MS, expiration_handler
from duetime.pipeline.tracker import WakeUpTimer
from duetime.pipeline.webhooks import WebhookWorker
from duetime.spark.kafka_io import RETRY_PAUSE_S, BatchHandler, client_id
from duetime.spark.task_jvms import DriverJvm, ProducerMetrics
from duetime.stores import Store
from duetime.stores.factory import open_store
from duetime.stores.wheel_store import DeletionGuard, KafkaStore

if TYPE_CHECKING:
    from duetime.stores.aerospike import AerospikeStore

log = logging.getLogger(__name__)

#: Retention of records after they were read, in ms, in topics that release jobs deliver to:
#: recovery finds there that a message was sent.
DELIVERED_RETENTION_MS = 3_600_000

#: Retention of records of the lanes, in ms: the rest is found where they went.
LANES_KEPT_MS = 180_000

#: The interval in which records that a query has read are deleted, in seconds.
DELETION_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """The parts that a process has, leading or standing by."""

    spark: SparkSession
    #: This process's JVM, if it runs all tasks.
    jvm: DriverJvm | None
    settings: Settings
    clock: Clock
    #: By cluster; None is this one.
    delivery_logs: Mapping[str | None, DeliveryLog]
    destinations: Mapping[str | None, TopicMetadataCache]
    release_job: ReleaseJob
    producer_metrics: ProducerMetrics
    isolation: FailedDestinations
    #: Sends retries, and records for isolated destinations.
    sender: RecordSender
    #: Set once the process has warmed up.
    warm: Event
    #: Defers the deletion of records while `delivery_logs` read them.
    deletion_guard: DeletionGuard
    #: None where a leader that is paused keeps its JVM.
    watchdog: Watchdog | None
    #: Whether this process may send at this instant, for code that sends from Python.
    holds_lease: Callable[[], bool]
    #: Returns the generations of the present term.
    generations: Callable[[], Generations]


class BackgroundService(Protocol):
    """A service that runs in threads of its own while this process leads."""

    def start(self) -> None:
        """Start the threads."""

    def close(self) -> None:
        """Stop them."""


class Leader:
    """Delivers from `start` to `stop`, for one term. Not thread-safe."""

    def __init__(self, context: PipelineContext) -> None:
        self._context, self._settings = context, context.settings
        self._to_stop = ExitStack()
        self._schedulers: list[ReleaseScheduler[Any]] = []
        self._probers: ProberSet | None = None
        #: By query, when its records were deleted last, in seconds of the monotonic clock.
        self._deleted_s = defaultdict[str, float](lambda: float("-inf"))

    @property
    def stuck_path(self) -> str | None:
        """The path on which messages have ceased to be delivered, as far as is known."""
        return self._probers.stuck_path if self._probers else None

    @property
    def has_jobs(self) -> bool:
        """True once it has begun to release messages: some jobs go on after `stop`."""
        return bool(self._schedulers)

    def start(self, is_wanted: Callable[[], bool], overdue_first_s: float = 0.0) -> None:
        """Start everything; overdue messages have Spark to themselves for `overdue_first_s`.

        Starting may take minutes: `is_wanted` returns whether this process still leads. After a
        failure everything is stopped again.
        """
        context = self._context
        with ExitStack() as unless_started:
            unless_started.callback(self._to_stop.close)
            if context.watchdog:
                context.watchdog.start()
                self._to_stop.callback(context.watchdog.stop)
            self._to_stop.callback(self._await_quiet_unless_leading)
            stores = self._open_stores()
            self._start([self._transactional_delivery()])
            self._schedulers = [self._scheduler(each) for each in stores]
            for scheduler in self._schedulers:
                self._to_stop.callback(scheduler.stop)
            from_ms = context.clock.now_ms()
            jobs = [self._release_overdue(each) for each in self._schedulers]
            self._queries = self._build_queries(self._on_expirations(stores[-1]))
            # Queries that start while all are stopped set it, too.
            self._to_stop.callback(RECOVERY_SECONDS.clear)
            self._to_stop.callback(self._queries.stop)
            self._start(self._background_services())
            wait([job for of_store in jobs for job in of_store[:1]], timeout=overdue_first_s)
            for scheduler in self._schedulers:
                scheduler.start(from_ms)
            self._queries.start(self._on_healthy, is_wanted)
            if self._settings.metrics_port and self._settings.probes:
                self._probers = ProberSet(self._settings, context.clock, self._is_obstructed)
                self._start([self._probers])
            unless_started.pop_all()

    def supervise(self) -> None:
        """Restart failed queries, and let the wheel store check its topics and commits."""
        self._queries.supervise(self._on_healthy)
        self._wheel.refresh_commits(self._context.clock.now_ms())

    def status(self) -> dict[str, Any]:
        """Return what `duetime status` reports of a leader. From any thread.

        The most dispensable is last: it is left out first where all would be too long for a note.
        """
        releases = (each for one in self._schedulers for each in one.overdue_releases)
        latest = sorted(releases, key=lambda each: each.at_ms)[-MAX_OVERDUE_RELEASES:]
        return {
            "overdue_released": sum(each.overdue_messages for each in self._schedulers),
            "queries": self._queries.status(),
            "overdue_releases": [list(each.model_dump().values()) for each in latest],
        }

    def stop(self) -> None:
        """Stop everything, once open windows have ended. Safe to repeat."""
        self._to_stop.close()

    def join(self) -> None:
        """Wait until no job is running, after `stop`."""
        for scheduler in self._schedulers:
            scheduler.join()

    def _start(self, services: Iterable[BackgroundService]) -> None:
        for each in services:
            self._to_stop.callback(each.close)
            each.start()

    def _open_stores(self) -> list[Store[Any]]:
        """Return the wheel, and the store next to it if there is one."""
        context = self._context
        self._wheel = KafkaStore(
            self._settings, context.deletion_guard, context.holds_lease, context.generations()
        )
        self._to_stop.callback(self._wheel.close)
        store = open_store(self._settings)
        if store is None:
            return [self._wheel]
        self._to_stop.callback(store.close)
        return [self._wheel, store]

    def _transactional_delivery(self) -> TransactionalDelivery:
        context = self._context
        isolate = context.destinations[None].isolate
        return TransactionalDelivery(
            self._settings, context.clock, context.holds_lease, isolate, self._free_sending
        )

    def _free_sending(self, end: int) -> None:
        """Delete records of the sending topic before `end`."""
        kept_since_ms = None
        if self._settings.transactional_delivery:
            kept_since_ms = self._context.clock.now_ms() - DELIVERED_RETENTION_MS
        # Once the setting is off, the group's offset expires: records left would be sent again.
        self._wheel.delete_before({(TopicNames(self._settings).sending, 0): end}, kept_since_ms)

    def _scheduler(self, store: Store[Any]) -> ReleaseScheduler[Any]:
        context = self._context
        return ReleaseScheduler(
            settings=self._settings,
            store=store,
            job=context.release_job,
            clock=context.clock,
            is_warm=context.warm.is_set,
        )

    def _on_expirations(self, store: Store[Any]) -> BatchHandler | None:
        """Return the handler of the store's notifications; None if it sends none."""
        settings = self._settings
        if settings.store_kind != "aerospike" or not settings.aerospike_expiry_notifications:
            return None
        release = self._schedulers[-1].release_soon
        expiring = cast("AerospikeStore", store)
        return expiration_handler(settings, expiring, release, self._context.clock)

    def _build_queries(self, on_expirations: BatchHandler | None) -> QuerySupervisor:
        context, settings, wake_up = self._context, self._settings, None
        if settings.queues:
            wake_up = WakeUpTimer(settings, context.clock)
            self._start([wake_up])
        self._progress = ProgressKeeper(settings, context.jvm)
        self._start([self._progress])
        factory = QueryFactory(
            context.spark,
            settings,
            context.delivery_logs,
            context.destinations,
            progress=self._progress,
            sender=context.sender,
            clock=context.clock,
        )
        self._to_stop.callback(factory.close)
        return QuerySupervisor(
            factory.all(on_expirations, wake_up),
            refresh=context.destinations[None].refresh,
            given_up=self._given_up,
            blame=lambda query, error: context.isolation.blame(error, self._client_id(query)),
            # Most messages take these ways, and queries that start at once share the cores.
            first=(LANES, INTAKE, SAVING),
            remote=[f"{of}{each}" for of in (OUTBOX, ISOLATED_AT) for each in settings.clusters],
            partitions=self._partitions,
            drain=self._drain,
            recreated_topics=factory.recreated_topics,
        )

    def _background_services(self) -> Iterator[BackgroundService]:
        settings, context = self._settings, self._context
        yield TransactionWatch(settings, context.clock)
        yield SlotIndexing(context.spark, settings, context.clock)
        if settings.webhook_hosts:
            yield WebhookWorker(settings)
        for topic in visible_topics(settings):
            # It imports NumPy and Arrow, which nothing else needs.
            from duetime.delayed.forwarder import DelayedForwarder  # noqa: PLC0415 (as it says)

            yield DelayedForwarder(settings, topic, context.holds_lease)
        if settings.metrics_port:
            yield MetricsExporter(settings, context.clock, context.producer_metrics)

    @staticmethod
    def _release_overdue(scheduler: ReleaseScheduler[Any]) -> list[Future[None]]:
        """Release overdue messages. A store that cannot be read now stops nothing else."""
        try:
            return scheduler.release_overdue()
        except Exception:
            log.exception("could not release overdue messages at start, the overdue scan will")
            return []

    def _on_healthy(self, name: str, query: StreamingQuery) -> None:
        """Publish a running query's last batch; now and then, delete what it has committed."""
        if self._settings.metrics_port:
            note_batch(name, query)
        now_s = time.monotonic()
        if now_s - self._deleted_s[name] >= DELETION_INTERVAL_S:
            self._deleted_s[name] = now_s
            self._delete_read(name, query)

    def _delete_read(self, name: str, query: StreamingQuery) -> None:
        """Delete the records of internal topics that a query has committed, once they are old."""
        now_ms = self._context.clock.now_ms()
        kept_since_ms = now_ms - DELIVERED_RETENTION_MS
        reached: Mapping[Partition, int] = {}
        if name == LANES:
            # Its topic is internal: a record that has moved on is soon of no use.
            kept_since_ms, reached = now_ms - LANES_KEPT_MS, self._progress.committed(name)
        elif name == RETRIES:
            # A cancel of a message finds there when it is retried.
            kept_since_ms = now_ms - self._settings.retry_backoff_max_ms
        elif name == SAVING:
            kept_since_ms = now_ms - SAVED_KEPT_MS
        elif not name.startswith((OUTBOX, ISOLATED)) and name != SCHEDULES:
            return
        read = _read_before(query)
        read |= {at: max(offset, read.get(at, 0)) for at, offset in reached.items()}
        if read:
            self._wheel.delete_before(read, kept_since_ms)

    def _partitions(self, name: str) -> Mapping[str, int]:
        """Return the number of partitions of the query's topics that may get more."""
        known = self._context.destinations[None].partitions
        names = TopicNames(self._settings)
        intake = {INTAKE: names.plain_intake, INTAKE_TX: [names.transactional]}
        topics = intake.get(name, [])
        return {topic: known[topic] for topic in topics if topic in known}

    def _drain(self, name: str) -> None:
        """Wait until the records of a stopped query are acknowledged, or too old to be."""
        self._context.producer_metrics.await_quiet(self._client_id(name), RETRY_PAUSE_S)

    def _is_obstructed(self) -> bool:
        """Return whether Kafka takes no records for some topic that probes pass, from anybody.

        Or does not take our heartbeats either: then our lease has ended.
        """
        if not self._context.holds_lease():
            return True
        names, wheel = TopicNames(self._settings), self._settings.wheel
        passed = (names.native, names.lanes, *map(names.wheel, range(wheel.levels)), names.warmup)
        return any(map(self._context.destinations[None].is_obstructed, passed))

    def _await_quiet_unless_leading(self) -> None:
        """Wait until nothing that rows have handed over is sent any more: others may lead."""
        if not self._context.holds_lease():
            self._context.producer_metrics.await_quiet(None, RETRY_PAUSE_S)

    def _given_up(self, name: str) -> int:
        """Return how many records the producer of a query could not deliver."""
        return self._context.producer_metrics.given_up(self._client_id(name))

    def _client_id(self, query: str) -> str:
        cluster = query.removeprefix(OUTBOX) if query.startswith(OUTBOX) else None
        return client_id(self._settings.at(cluster), query)


def _read_before(query: StreamingQuery) -> dict[Partition, int]:
    """Return the offsets at which the last committed batch of a query began; {} before one."""
    progress = query.lastProgress
    if not progress or not progress["sources"]:
        return {}
    start = progress["sources"][0]["startOffset"]
    # The first batch starts from nothing: None, or "null".
    offsets = json.loads(start) if isinstance(start, str) else start
    return {
        (topic, int(partition)): offset
        for topic, partitions in (offsets or {}).items()
        for partition, offset in partitions.items()
    }
