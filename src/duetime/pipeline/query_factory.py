"""Query factory: how each streaming query of a leader is started, and what comes before that.

Before a query starts, its checkpoint is made one that Spark can go on from. A real-time query
commits at the end of a batch, half an hour apart, so it goes on from its progress, after a crash
and after a plain stop. Some records since then have moved on. So it recovers first: these records
are handled in batches, without those delivered already. Each batch is committed, so that a
crash meanwhile repeats one.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duetime.core.clock import Clock
from duetime.core.metrics import RECOVERY_SECONDS
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import Offsets, Partition
from duetime.pipeline import (
    INTAKE,
    INTAKE_TX,
    ISOLATED,
    ISOLATED_AT,
    LANES,
    NOTICES,
    OUTBOX,
    REDELIVERY,
    RETRIES,
    SAVING,
    SCHEDULES,
    schedules,
    store_queries,
)
from duetime.pipeline.delivery import isolation
from duetime.pipeline.delivery.destinations import TopicMetadataCache
from duetime.pipeline.delivery.relays import lane_recovery, lane_rows, outbox_recovery, outbox_rows
from duetime.pipeline.intake.query import Intake, intake_recovery
from duetime.pipeline.intake.starting_point import IntakeStart
from duetime.pipeline.recovery.checkpoint import Checkpoints
from duetime.pipeline.recovery.progress import ProgressKeeper
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.retries import retry_handler
from duetime.pipeline.tracker import WakeUpTimer, tracked, tracked_topics
from duetime.spark.catalyst import as_single_read
from duetime.spark.kafka_io import (
    NO_LIMIT,
    BatchHandler,
    read_ranges,
    read_stream,
    start_micro_batches,
    start_real_time,
)

log = logging.getLogger(__name__)

#: Spark's error when a query cannot read its state.
NO_STATE = "CANNOT_LOAD_STATE_STORE"

#: Interval of batches of markers, where there are any: a redelivery waits for half of it.
REDELIVERY_INTERVAL = "500 milliseconds"

#: How much longer the batches of transactional intake are, in seconds. Both intake queries plan the
#: same steps between two batches, and would take the cores from each other.
APART_S = 7

#: Records in the first batch of a recovery. A JVM that has just been started takes twice as long
#: for a whole one. A process that is killed soon has committed something, and the next goes on.
FIRST_RECOVERY_BATCH = 5_000

#: The longest batch of a query whose progress is not kept, in seconds: recovery reads back all that
#: was taken in since it began.
LONGEST_UNKEPT_S = 180


class QueryFactory:
    """Starts queries, also again. Delivery logs and destinations are by cluster; None is this one.

    Holds a connection: close it.
    """

    def __init__(  # noqa: PLR0913 (the last by name)
        self,
        spark: SparkSession,
        settings: Settings,
        delivery_logs: Mapping[str | None, DeliveryLog],
        destinations: Mapping[str | None, TopicMetadataCache],
        *,
        progress: ProgressKeeper,
        sender: isolation.RecordSender,
        clock: Clock,
    ) -> None:
        self._spark, self._settings, self._clock = spark, settings, clock
        self._delivery_logs, self._destinations = delivery_logs, destinations
        self._progress, self._sender = progress, sender
        self._names = TopicNames(settings)
        self._offsets = Offsets(settings, self._names.intake_group)
        self._checkpoints = Checkpoints(spark, settings, self._offsets)
        self._start = IntakeStart(settings, self._checkpoints, self._offsets)
        #: The steps of both intake queries, once one has built them.
        self._intake: Intake | None = None
        self._intake_lock = threading.Lock()
        #: The last run of the query that has state.
        self._redelivery_run: StreamingQuery | None = None

    def all(
        self, on_expirations: BatchHandler | None, wake_up: WakeUpTimer | None
    ) -> dict[str, Callable[[], StreamingQuery]]:
        """Return how to start each query, by its name.

        `on_expirations` handles the store's notifications, if there are any; `wake_up` is there
        for queues. Raises ConfigError where intake would have to guess where it begins.
        """
        self._start.require()
        spark, settings, names = self._spark, self._settings, self._names
        logs, destinations, start = self._delivery_logs, self._destinations, self._start_batches
        retried = partial(retry_handler, spark, settings, destinations, logs[None])
        scheduled = partial(schedules.ScheduleHandler, spark, settings, destinations, logs[None])
        saving = partial(store_queries.store_handler, spark, settings, logs[None])
        queries: dict[str, Callable[[], StreamingQuery]] = {
            LANES: self._start_lanes,
            INTAKE: self._start_intake,
            INTAKE_TX: self._start_transactional_intake,
            RETRIES: partial(start, RETRIES, names.retry, retried),
            ISOLATED: partial(self._start_isolated, ISOLATED, None),
            SCHEDULES: partial(
                start,
                SCHEDULES,
                names.schedule_commands,
                scheduled,
                max_records=schedules.BATCH_SIZE,
            ),
        }
        if settings.store_kind != "kafka":
            queries[SAVING] = partial(
                start, SAVING, names.store_inbox, saving, interval=store_queries.SAVING_INTERVAL
            )
        if wake_up:
            queries[REDELIVERY] = partial(self._start_redelivery, wake_up)
        if on_expirations:
            topic, handle = settings.aerospike_expiry_topic, on_expirations
            queries[NOTICES] = partial(
                start, NOTICES, topic, lambda _: handle, interval=store_queries.NOTICES_INTERVAL
            )
        for cluster in settings.clusters:
            queries[f"{OUTBOX}{cluster}"] = partial(self._start_outbox, cluster)
            name = f"{ISOLATED_AT}{cluster}"
            queries[name] = partial(self._start_isolated, name, cluster)
        return queries

    def recreated_topics(self) -> dict[str, str]:
        """Return, by query, a topic that it reads and that was created again since it started.

        Call it now and then: it commits again where intake began, which Kafka would forget.
        """
        self._start.keep()
        return self._checkpoints.recreated_topics()

    def close(self) -> None:
        """Close the connection. A query that is just being started is not started."""
        self._checkpoints.close()
        self._offsets.close()

    def _start_lanes(self) -> StreamingQuery:
        settings, topics = self._settings, [self._names.lanes]
        self._checkpoints.open(LANES, topics)
        recovery = lane_recovery(settings, self._delivery_logs[None])
        rows = partial(lane_rows, settings=settings)
        reached = self._progress.resume_offsets(LANES, topics)
        return self._start_real_time(LANES, topics, rows, recovery, reached=reached)

    def _start_intake(self) -> StreamingQuery:
        topics = self._names.plain_intake
        reached = self._progress.resume_offsets(INTAKE, topics)
        starting = self._start.begin(reached)
        return self._take_in(INTAKE, topics, reached, starting=starting)

    def _start_transactional_intake(self) -> StreamingQuery:
        topics = [self._names.transactional]
        # Only duetime reads this topic: no other service has delivered its records.
        self._checkpoints.open(INTAKE_TX, topics)
        reached = self._progress.resume_offsets(INTAKE_TX, topics)
        return self._take_in(INTAKE_TX, topics, reached, committed_only=True)

    def _take_in(
        self,
        name: str,
        topics: Sequence[str],
        reached: Mapping[Partition, int],
        *,
        committed_only: bool = False,
        starting: Mapping[Partition, int] | None = None,
    ) -> StreamingQuery:
        with self._intake_lock:
            intake = self._intake = self._intake or Intake(self._settings)
        recovery = intake_recovery(self._spark, self._settings, self._delivery_logs[None], intake)
        return self._start_real_time(
            name,
            topics,
            intake.rows,
            recovery,
            committed_only=committed_only,
            starting=starting,
            reached=reached,
        )

    def _start_outbox(self, cluster: str) -> StreamingQuery:
        settings, name, topics = self._settings, f"{OUTBOX}{cluster}", [self._names.outbox(cluster)]
        destinations = self._destinations[cluster]
        destinations.refresh()
        self._checkpoints.open(name, topics)
        rows = partial(outbox_rows, settings=settings, cluster=cluster)
        recovery = outbox_recovery(settings, self._delivery_logs[cluster], destinations)
        return self._start_real_time(name, topics, rows, recovery, sink=settings.at(cluster))

    def _start_isolated(self, name: str, cluster: str | None) -> StreamingQuery:
        sender = partial(
            isolation.IsolatedSender,
            self._spark,
            self._settings,
            self._destinations[cluster],
            self._delivery_logs[cluster],
            name=name,
            sender=self._sender,
        )
        return self._start_batches(
            name,
            self._names.isolated(cluster),
            sender,
            max_records=isolation.BATCH,
            # The transactional sink writes there, or did before it was switched off.
            committed_only=True,
        )

    def _start_real_time(  # noqa: PLR0913 (each by its name)
        self,
        name: str,
        topics: Sequence[str],
        rows: Callable[[DataFrame], DataFrame],
        recovery: BatchHandler,
        *,
        sink: Settings | None = None,
        committed_only: bool = False,
        starting: Mapping[Partition, int] | None = None,
        reached: Mapping[Partition, int] | None = None,
    ) -> StreamingQuery:
        """Start a query once `recovery` has handled what it had in flight.

        Without a checkpoint it begins at the `starting` offsets. `reached` is its progress; None
        where none is kept, because another cluster's sink has another producer.
        """
        settings = self._settings
        places = [at for topic in topics for at in self._offsets.readable_partitions(topic)]
        starts = self._offsets.starts(places)
        # Lanes are deleted up to their progress.
        begin = self._checkpoints.advance(name, starts, starting=starting, reached=reached)
        self._recover(name, begin, recovery, committed_only=committed_only)
        read = partial(read_stream, self._spark, settings, topics, committed_only=committed_only)
        run = None
        if reached is not None:
            run = self._progress.begin_run(name, self._checkpoints.topic_ids(name))
        interval_s = settings.checkpoint_interval_seconds
        if run is None:
            records, interval_s = read(), min(interval_s, LONGEST_UNKEPT_S)
        else:
            records = self._progress.with_notes(run, read(group_prefix=run.group_prefix))
        apart_s = APART_S if name == INTAKE_TX else 0
        # Spark would end the run of the next term in favour of this one.
        self._checkpoints.require_open()
        return start_real_time(rows(records), sink or settings, name, interval_s + apart_s)

    def _recover(
        self,
        name: str,
        begin: Mapping[Partition, int],
        handle: BatchHandler,
        *,
        committed_only: bool,
    ) -> None:
        """Handle the records from `begin` to the present end, and commit batch by batch."""
        settings, started_s, number = self._settings, time.monotonic(), 0
        ends = self._offsets.ends(begin, committed_only=committed_only)
        sizes = FIRST_RECOVERY_BATCH, settings.recovery_batch_records
        for number, ranges in enumerate(self._checkpoints.batches(name, begin, ends, sizes), 1):
            records = read_ranges(
                self._spark,
                settings,
                ranges,
                fail_on_missing=False,
                committed_only=committed_only,
            )
            handle(as_single_read(self._spark, records), number)
        if number:
            taken_s = time.monotonic() - started_s
            RECOVERY_SECONDS.labels(name).set(taken_s)
            log.info("recovered query=%s batches=%d seconds=%.1f", name, number, taken_s)

    def _start_redelivery(self, wake_up: WakeUpTimer) -> StreamingQuery:
        # It imports Arrow, and most pipelines have no queues.
        from duetime.pipeline.redelivery import Redelivery  # noqa: PLC0415 (as it says)

        spark, settings = self._spark, self._settings
        problems = state_problems(self._redelivery_run)
        self._checkpoints.open(REDELIVERY, tracked_topics(settings), problems)
        handle = Redelivery(spark, settings, self._delivery_logs[None], wake_up)
        self._redelivery_run = start_micro_batches(
            tracked(spark, settings), handle, settings, REDELIVERY, REDELIVERY_INTERVAL
        )
        return self._redelivery_run

    def _start_batches(  # noqa: PLR0913 (each by its name)
        self,
        name: str,
        topic: str,
        handler: Callable[[int], BatchHandler],
        *,
        interval: str = "1 second",
        max_records: int = NO_LIMIT,
        committed_only: bool = False,
    ) -> StreamingQuery:
        """Start a micro-batch query; `handler` takes the instant of its start, epoch ms."""
        self._checkpoints.open(name, [topic])
        batch = min(self._settings.recovery_batch_records, max_records)
        records = read_stream(
            self._spark, self._settings, [topic], batch=batch, committed_only=committed_only
        )
        handle = handler(self._clock.now_ms())
        return start_micro_batches(records, handle, self._settings, name, interval)


def state_problems(last_run: StreamingQuery | None) -> list[str]:
    """Return why a query cannot go on from its state, if its last run failed for that."""
    if last_run is None or last_run.lastProgress is not None:
        return []
    is_torn = NO_STATE in str(last_run.exception())
    return ["its state cannot be read"] if is_torn else []
