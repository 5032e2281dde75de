"""Log scan: the ids of messages that were appended since an instant, read from the topics.

A scan covers exact ranges of offsets, from the first record since the instant up to the ends that
it asks for first. `IdCache` holds the ids of earlier scans, so that each scan reads only new
records. A scan first waits until readers are shown all records that the partitions' leaders have.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import KafkaError
from duetime.core.metrics import READ_BACK_RECORDS, READ_BACK_SECONDS
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames, isolated_topics, message_topics
from duetime.kafka.offsets import TIMEOUT_S, OffsetRange, Offsets, Partition, Unreadable
from duetime.spark.columns import header_map, header_text, state_fields, state_number
from duetime.spark.kafka_io import log_ends, read_ranges
from duetime.stores.wheel_store import DeletionGuard

log = logging.getLogger(__name__)

#: Partitions of the ids found: they are few bytes each, and each partition is a task.
ID_PARTITIONS = 8

#: Time limit for records that a replica lacks, in seconds. By default it leaves the
#: in-sync ones after at most 1.5 times 30 s (replica.lag.time.max.ms), and they are shown.
VISIBLE_TIMEOUT_S = 60.0

#: Interval between checks whether it has them, in seconds; and whether leaders still have them.
VISIBLE_INTERVAL_S, RENEW_INTERVAL_S = 0.5, 5.0

#: Time limit for a destination that is known to have no leader, in seconds: one may be elected.
STUCK_TIMEOUT_S = 2.0

#: Topics that are described at a time.
MAX_REQUESTS = 32

#: Where a record is.
PLACE = ("timestamp", "topic", "partition", "offset")


#: Added to the hop rank for each attempt: more than an attempt has hops.
ATTEMPT_RANK = 1_000

#: The hop rank of a message that goes no further.
FINAL_RANK = 2**62


class IdPart(NamedTuple):
    """Ids that are held, and the number of records they come from."""

    ids: DataFrame
    records: int


@dataclass(slots=True)
class IdCache:
    """The results of earlier scans: where each partition ended, and the ids up to there."""

    ends: dict[Partition, int] = field(default_factory=dict)
    parts: list[IdPart] = field(default_factory=list)

    @property
    def ids(self) -> DataFrame | None:
        """All ids; None if there are none."""
        if not self.parts:
            return None
        return reduce(DataFrame.unionAll, (each.ids for each in self.parts)).coalesce(ID_PARTITIONS)

    def add(self, ids: DataFrame, records: int) -> None:
        """Hold more ids, as they are now: no job over them reads them again.

        Parts that are no larger are merged with them. So there are few, the largest first, and each
        id is copied a few times, and not by each scan.
        """
        kept = list(self.parts)
        while kept and kept[-1].records <= records:
            last = kept.pop()
            ids, records = ids.unionAll(last.ids), records + last.records
        held = ids.coalesce(ID_PARTITIONS).localCheckpoint()
        self.parts = [*kept, IdPart(held, records)]


class ScannedCluster:
    """A cluster whose topics are scanned, and the connection to it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.offsets = Offsets(settings, f"{settings.namespace}.recover")


class DeliveryLog:
    """The topics, as the record of where messages are.

    Those are the internal topics here, and the destinations on `cluster`; None is this one.

    Scans return the columns id, is_delivered, progress and PLACE; None if nothing is found. Each
    reads what its cache does not have, and adds that. Holds connections: close it.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        *,
        cluster: str | None = None,
        deletion_guard: DeletionGuard | None = None,
        stuck_partitions: Callable[[str], Collection[int]] = lambda _: (),
    ) -> None:
        """The store that deletes records of these topics shares the `deletion_guard`.

        `stuck_partitions` returns which of a topic have no leader, or too few replicas in sync.
        """
        self.settings, self.cluster = settings, cluster
        self._spark, self._deletion_guard = spark, deletion_guard or DeletionGuard()
        self._stuck_partitions = stuck_partitions
        self._names = TopicNames(settings)
        self._has_transactions = settings.transactional_delivery
        self._progress = hop_rank(settings).alias("progress")
        self._internal_topics = message_topics(settings)
        self._here = ScannedCluster(settings)
        self._there = ScannedCluster(settings.at(cluster)) if cluster else self._here
        self._warned: set[str] = set()
        #: Destinations that the last scan could not read.
        self._unreadable: set[str] = set()

    def internal(self, since_ms: int, cache: IdCache) -> DataFrame | None:
        """Scan the internal topics, where messages wait or end.

        Raises KafkaError if their replicas lag, or they have no leader.
        """
        with self._deletion_guard.hold():
            ends = self._ends(self._here, self._internal_topics)
            if behind := self._await_replicas(self._here, ends, cache):
                (topic, partition), *_ = behind
                raise KafkaError(
                    f"topic {topic}, partition {partition} has records that its replicas lack: "
                    "check that its brokers are up and replicate"
                )
            ranges = self._appended(self._here, ends, since_ms, cache)
            return self._scan(self._here, ranges, (), cache, ends)

    def destinations(
        self, topics: Sequence[str], since_ms: int, cache: IdCache
    ) -> DataFrame | None:
        """Scan these destinations, and those of earlier scans. Warns of those it cannot read."""
        at = self._there
        ends = self._ends(at, topics)
        for topic, _ in self._await_replicas(at, ends, cache, self._is_stuck):
            self._warn(topic, "it has records that its replicas lack")
        if self._is_transactional(at):
            # Records of an aborted transaction are not delivered.
            ends |= at.offsets.ends(ends, committed_only=True)
        ranges = self._appended(at, ends, since_ms, cache)
        self._warn_of_removed(
            {place: end for place, end in ends.items() if place not in cache.ends}, ranges
        )
        return self._scan(at, ranges, topics, cache, ends)

    def new_records(self, topic: str, since_ms: int, cache: IdCache) -> DataFrame | None:
        """Return new records of an intake or internal topic in Kafka's columns; None if none."""
        at = self._here
        # Spark keeps one consumer of a partition, and so reads it in one way: the query's.
        committed_only = topic == self._names.transactional
        # Up to a transaction that is open, because a read of committed records ends there.
        ends = at.offsets.ends(at.offsets.readable_partitions(topic), committed_only=committed_only)
        ranges = self._appended(at, ends, since_ms, cache)
        if not ranges:
            return None
        cache.ends |= {each.place: each.end for each in ranges}
        return read_ranges(
            self._spark, at.settings, ranges, fail_on_missing=False, committed_only=committed_only
        )

    def close(self) -> None:
        """Close the connections."""
        for offsets in {self._here.offsets, self._there.offsets}:
            offsets.close()

    def _is_stuck(self, place: Partition) -> bool:
        topic, partition = place
        return partition in self._stuck_partitions(topic)

    def _ends(self, at: ScannedCluster, topics: Sequence[str]) -> dict[Partition, int]:
        """Return where the partitions end of those topics that duetime may read."""
        # All at once: each may wait for a leader.
        with ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="read-back") as pool:
            found = list(pool.map(partial(self._readable, at), topics))
        return at.offsets.ends(place for places in found for place in places)

    def _readable(self, at: ScannedCluster, topic: str) -> list[Partition]:
        # Without a leader of an internal topic a query waits; a destination holds up none.
        all_led = topic not in self._internal_topics
        timeout_s = STUCK_TIMEOUT_S if self._stuck_partitions(topic) else TIMEOUT_S
        # One that could not be read the last time is not waited for again.
        timeout_s = 0.0 if topic in self._unreadable else timeout_s
        try:
            found = at.offsets.readable_partitions(topic, all_led=all_led, timeout_s=timeout_s)
        except Unreadable as error:
            self._unreadable.add(topic)
            self._warn(topic, str(error))
            return []
        self._unreadable.discard(topic)
        return found

    def _await_replicas(
        self,
        at: ScannedCluster,
        ends: dict[Partition, int],
        cache: IdCache,
        is_hopeless: Callable[[Partition], bool] = lambda _: False,
    ) -> list[Partition]:
        """Wait until readers are shown all that leaders have by now, and move `ends` there.

        Returns the partitions where that takes too long, or `is_hopeless`: a leader shows nothing
        new while it has too few replicas in sync (KIP-966). Partitions that were scanned before are
        not waited for: this process has sent the records since then, and they are acknowledged.
        """
        new = [place for place in ends if place not in cache.ends]
        if not new or not at.offsets.is_replicated():
            return []
        logs = log_ends(self._spark, at.settings, at.offsets.leader_epochs(new))
        until_s = time.monotonic() + VISIBLE_TIMEOUT_S
        renew_s = time.monotonic() + RENEW_INTERVAL_S
        while behind := [place for place in logs if ends[place] < logs[place]]:
            if time.monotonic() > until_s:
                break
            if all(map(is_hopeless, behind)):
                # One more look: it may just have got its replicas back.
                until_s = 0.0
            log.info("waiting for replicas partitions=%d", len(behind))
            time.sleep(VISIBLE_INTERVAL_S)
            ends |= at.offsets.ends(behind)
            if time.monotonic() > renew_s:
                renew_s = time.monotonic() + RENEW_INTERVAL_S
                # A new leader may lack what the last one had: readers are never shown that.
                now = log_ends(self._spark, at.settings, at.offsets.leader_epochs(behind))
                logs |= {place: min(logs[place], end) for place, end in now.items()}
        return behind

    def _is_transactional(self, at: ScannedCluster) -> bool:
        """Return whether destinations there receive transactions, or have received any."""
        if at is self._here and not self._has_transactions:
            place = self._names.sending, 0
            self._has_transactions = at.offsets.ends([place])[place] > 0
        return at is self._here and self._has_transactions

    def _appended(
        self, at: ScannedCluster, ends: Mapping[Partition, int], since_ms: int, cache: IdCache
    ) -> list[OffsetRange]:
        """Return the ranges of these partitions that were appended since, and are new."""
        firsts: dict[Partition, int | None] = dict(cache.ends)
        firsts |= at.offsets.first_since({each: since_ms for each in ends if each not in firsts})
        return [
            OffsetRange(*place, first, end)
            for place, end in ends.items()
            if (first := firsts[place]) is not None and first < end
        ]

    def _scan(
        self,
        at: ScannedCluster,
        ranges: Sequence[OffsetRange],
        destinations: Sequence[str],
        cache: IdCache,
        ends: Mapping[Partition, int],
    ) -> DataFrame | None:
        """Read the ids of the ranges into the cache; return all that it has."""
        if ranges:
            started_s = time.monotonic()
            records = sum(each.count for each in ranges)
            committed_only = bool(destinations) and self._is_transactional(at)
            found = read_ranges(
                self._spark,
                at.settings,
                ranges,
                fail_on_missing=False,
                committed_only=committed_only,
            )
            ids = found.select(*self._columns(destinations)).where("id is not null")
            cache.add(ids, records)
            kind, taken_s = "destinations" if destinations else "own", time.monotonic() - started_s
            READ_BACK_RECORDS.labels(kind).inc(records)
            READ_BACK_SECONDS.labels(kind).inc(taken_s)
            log.info(
                "read back topics=%s records=%d partitions=%d seconds=%.1f",
                kind,
                records,
                len(ranges),
                taken_s,
            )
        cache.ends |= ends
        return cache.ids

    def _columns(self, destinations: Sequence[str]) -> list[Column]:
        by_name = header_map(F.col("headers"))
        rejected = F.col("topic") == self._names.rejected
        delivered = F.col("topic").isin(list(destinations))
        # A cancel has the id of its message, and no destination.
        message = delivered | header_text(by_name, H.DUE_TOPIC).isNotNull()
        name = F.when(rejected, header_text(by_name, H.DUE_ERROR_SOURCE)).when(
            message, header_text(by_name, H.DUE_ID)
        )
        place = self._progress, *map(F.col, PLACE)
        return [name.alias("id"), delivered.alias("is_delivered"), *place]

    def _warn_of_removed(
        self, ends: Mapping[Partition, int], ranges: Sequence[OffsetRange]
    ) -> None:
        """Warn of partitions that may have had records before the first one read.

        So may those that have no record at all any more.
        """
        starts = self._there.offsets.starts(ends)
        firsts = {**ends, **{each.place: each.start for each in ranges}}
        for place, start in starts.items():
            if 0 < start == firsts[place]:
                self._warn(place[0], "its retention is shorter than the interruption was")

    def _warn(self, topic: str, why: str) -> None:
        """Log once a topic that it cannot be scanned."""
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("messages in flight may be delivered twice topic=%s reason=%s", topic, why)


def hop_rank(settings: Settings) -> Column:
    """bigint: the progress of a message, by one of its records; greater is further.

    Reads `topic`, `partition` and `headers`. A message goes down the levels of the wheel, then down
    the lanes, then to its destination, to an outbox or to the retry topic, and from there it begins
    again with one attempt more. Timestamps do not show that order: two records of one message may
    be milliseconds apart, on two brokers whose clocks differ by more.
    """
    names, levels, lanes = TopicNames(settings), settings.wheel_levels, settings.delay_lanes.lanes
    topic = F.col("topic")
    # 0 by default: a message in another store has been nowhere else.
    rank = F.lit(0)
    for level in range(levels):
        rank = F.when(topic == names.wheel(level), levels - level).otherwise(rank)
    rank = F.when(topic == names.lanes, levels + lanes - F.col("partition")).otherwise(rank)
    last = levels + lanes + 1
    outboxes = [names.outbox(each) for each in settings.clusters]
    rank = F.when(topic.isin(*outboxes, names.sending), last).otherwise(rank)
    rank = F.when(topic.isin(*isolated_topics(settings)), last + 1).otherwise(rank)
    rank = F.when(topic == names.retry, last + 2).otherwise(rank)
    attempts = state_number(state_fields(F.col("headers")), "attempts")
    within = F.coalesce(attempts, F.lit(0)) * ATTEMPT_RANK + rank
    final = topic.isin(names.dead_letter, names.rejected)
    return F.when(final, F.lit(FINAL_RANK)).otherwise(within)
