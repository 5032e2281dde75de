"""How each query of a leader is begun: what it had in flight is finished first."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duetime.clock import Clock
from duetime.config import Settings
from duetime.metrics import RECOVERY_SECONDS
from duetime.pipeline import notices
from duetime.pipeline.checkpoint import Checkpoints
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.failures import failures
from duetime.pipeline.first_start import IntakeStart
from duetime.pipeline.intake import INTAKE, INTAKE_TX, Intake, intake_records, intake_topics
from duetime.pipeline.isolated import BATCH as ISOLATED_BATCH
from duetime.pipeline.isolated import ISOLATED, Isolated
from duetime.pipeline.kafka import ALL, read_stream, start_micro_batches, start_real_time
from duetime.pipeline.lanes import lanes
from duetime.pipeline.notices import NOTICES
from duetime.pipeline.outbox import outbox, query_name, recover_outbox
from duetime.pipeline.recover import recover_intake, recover_lanes
from duetime.pipeline.recurring import BATCH as RECURRING_BATCH
from duetime.pipeline.recurring import RECURRING, Recurring
from duetime.pipeline.saving import EVERY as SAVING_EVERY
from duetime.pipeline.saving import SAVING, on_their_way, saving
from duetime.pipeline.waking import Waking
from duetime.pipeline.written import Written
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: What the query of queues is called.
REDELIVERY = "redelivery"

#: What Spark's error is called when a query cannot read what it remembers.
NO_STATE = "CANNOT_LOAD_STATE_STORE"

#: How often a batch of markers is begun, where there are any: a redelivery waits for half of it.
REDELIVERY_EVERY = "500 milliseconds"


class Begin:
    """Begins queries, once or again. What is written is by cluster; None is this one."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        written: Mapping[str | None, Written],
        destinations: Mapping[str | None, Destinations],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._spark = spark
        self._settings = settings
        self._names = TopicNames(settings)
        self._written = written
        self._destinations = destinations
        self._offsets = Offsets(settings, self._names.intake_group)
        self._checkpoints = Checkpoints(spark, settings, self._offsets)
        self._start = IntakeStart(settings, self._checkpoints, self._offsets)
        #: The last run of the query that remembers something.
        self._tracking: StreamingQuery | None = None

    def all(
        self, notice: Callable[[DataFrame, int], None] | None, waking: Waking | None
    ) -> dict[str, Callable[[], StreamingQuery]]:
        """How each query is begun, by its name.

        `notice` is what to do with notices, where the store gives any; `waking` is for queues.
        Raises ConfigError where it would have to be guessed where intake begins.
        """
        self._start.require()
        own: dict[str, Callable[[], StreamingQuery]] = {
            "lanes": self._lanes,
            INTAKE: self._intake,
            INTAKE_TX: self._intake_tx,
            "failures": self._failures,
            ISOLATED: self._isolated,
            RECURRING: self._recurring,
        }
        if self._settings.store_kind != "kafka":
            own[SAVING] = self._saving
        if waking:
            own[REDELIVERY] = partial(self._redelivery, waking)
        if notice:
            own[NOTICES] = partial(self._notices, notice)
        return own | {
            query_name(cluster): partial(self._outbox, cluster)
            for cluster in self._settings.clusters
        }

    def moved(self) -> dict[str, str]:
        """Return the queries that read a topic which was created again since, and which it is.

        To be asked now and then: what Kafka would forget is kept with it.
        """
        self._start.keep()
        return self._checkpoints.moved()

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _lanes(self) -> StreamingQuery:
        recover = partial(recover_lanes, self._spark, self._settings, self._written[None])
        self._checkpoints.open("lanes", [self._names.lanes])
        self._recover("lanes", [self._names.lanes], recover)
        return start_real_time(lanes(self._spark, self._settings), self._settings, "lanes")

    def _intake(self) -> StreamingQuery:
        return self._take_in(INTAKE, self._start.begin())

    def _intake_tx(self) -> StreamingQuery:
        # It is of duetime's own contract: no other service has delivered what is there.
        self._checkpoints.open(INTAKE_TX, [self._names.transactional])
        return self._take_in(INTAKE_TX, None)

    def _take_in(self, name: str, starting: Mapping[Place, int] | None) -> StreamingQuery:
        """Begin an intake query; without a checkpoint, from where it is `starting`."""
        spark, settings, intake = self._spark, self._settings, Intake(self._settings)
        recover = partial(
            recover_intake, spark, settings, self._written[None], intake, name, starting=starting
        )
        self._recover(name, intake_topics(settings, name), recover)
        rows = intake.rows(intake_records(spark, settings, name, starting=starting))
        return start_real_time(rows, settings, name)

    def _outbox(self, cluster: str) -> StreamingQuery:
        spark, settings, name = self._spark, self._settings, query_name(cluster)
        self._destinations[cluster].refresh()
        recover = partial(recover_outbox, spark, settings, self._written[cluster], cluster)
        self._checkpoints.open(name, [self._names.outbox(cluster)])
        self._recover(name, [self._names.outbox(cluster)], recover)
        return start_real_time(outbox(spark, settings, cluster), settings.at(cluster), name)

    def _failures(self) -> StreamingQuery:
        failed = self._in_batches("failures", self._names.failed)
        written, begun_ms = self._written[None], self._clock.now_ms()
        handle = failures(self._settings, self._destinations, written, begun_ms)
        return start_micro_batches(failed, handle, self._settings, "failures")

    def _isolated(self) -> StreamingQuery:
        records = self._in_batches(ISOLATED, self._names.isolated, most=ISOLATED_BATCH)
        begun_ms = self._clock.now_ms()
        handle = Isolated(self._settings, self._destinations, self._written, begun_ms)
        return start_micro_batches(records, handle, self._settings, ISOLATED)

    def _recurring(self) -> StreamingQuery:
        said = self._in_batches(RECURRING, self._names.recurring, most=RECURRING_BATCH)
        written, begun_ms = self._written[None], self._clock.now_ms()
        handle = Recurring(self._spark, self._settings, self._destinations, written, begun_ms)
        return start_micro_batches(said, handle, self._settings, RECURRING)

    def _saving(self) -> StreamingQuery:
        self._checkpoints.open(SAVING, [self._names.store])
        waiting = on_their_way(self._spark, self._settings)
        written, begun_ms = self._written[None], self._clock.now_ms()
        handle = saving(self._spark, self._settings, written, begun_ms)
        return start_micro_batches(waiting, handle, self._settings, SAVING, SAVING_EVERY)

    def _notices(self, handle: Callable[[DataFrame, int], None]) -> StreamingQuery:
        told = self._in_batches(NOTICES, self._settings.aerospike_topic)
        return start_micro_batches(told, handle, self._settings, NOTICES, notices.EVERY)

    def _redelivery(self, waking: Waking) -> StreamingQuery:
        # Here, because they need pandas, which takes a second, and most pipelines have no queues.
        from duetime.pipeline.redelivery import Redelivery  # noqa: PLC0415
        from duetime.pipeline.tracker import tracked, tracked_topics  # noqa: PLC0415

        topics = tracked_topics(self._settings)
        self._checkpoints.open(REDELIVERY, topics, _torn_state(self._tracking))
        handle = Redelivery(self._spark, self._settings, self._written[None], waking)
        found = tracked(self._spark, self._settings)
        query = start_micro_batches(found, handle, self._settings, REDELIVERY, REDELIVERY_EVERY)
        self._tracking = query
        return query

    def _in_batches(self, name: str, topic: str, most: int = ALL) -> DataFrame:
        self._checkpoints.open(name, [topic])
        batch = min(self._settings.batch_records, most)
        # The transactional sink writes there, or did before it was switched off.
        committed_only = topic == self._names.isolated
        return read_stream(
            self._spark, self._settings, [topic], batch=batch, committed_only=committed_only
        )

    def _recover(self, name: str, topics: Sequence[str], recover: Callable[[], None]) -> None:
        """Finish what a query had in flight, where there can be anything: it takes seconds."""
        begun_s = time.monotonic()
        if self._written[None].has_records(topics):
            recover()
            taken_s = time.monotonic() - begun_s
            RECOVERY_SECONDS.labels(name).set(taken_s)
            log.info("recovered query=%s seconds=%.1f", name, taken_s)


def _torn_state(before: StreamingQuery | None) -> list[str]:
    """Return why a query cannot go on from what it remembers, if its last run says so."""
    if before is None or before.lastProgress is not None:
        return []
    is_torn = NO_STATE in str(before.exception())
    return ["what the query remembers cannot be read"] if is_torn else []
