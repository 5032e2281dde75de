"""The ids of messages that were appended since an instant, read back from the topics themselves."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import header_map, header_text
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.message import DUE_ERROR_SOURCE, DUE_ID, DUE_TOPIC
from duetime.metrics import READ_BACK_RECORDS, READ_BACK_SECONDS
from duetime.pipeline.kafka import read_ranges
from duetime.pipeline.log_ends import log_ends
from duetime.pipeline.progress import progress
from duetime.pipeline.seen import Seen
from duetime.stores import OffsetRange
from duetime.stores.keeping import Keeping
from duetime.stores.offsets import Offsets, Unreadable
from duetime.stores.places import Place
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How long records are waited for that a replica has not yet, in seconds. By default it leaves the
#: in-sync ones after at most 1.5 times 30 s (replica.lag.time.max.ms), and they are shown.
VISIBLE_S = 60.0

#: How often is looked whether it has, in seconds.
LOOK_S = 0.5

#: Where a record is.
PLACE = ("timestamp", "topic", "partition", "offset")


class Look(Protocol):
    """A look at the topics: the columns id, is_delivered, progress and PLACE; None of nothing."""

    def own(self, since_ms: int) -> DataFrame | None:
        """Of what was appended to duetime's own topics, where messages wait or end."""
        ...

    def destinations(self, topics: Sequence[str], since_ms: int) -> DataFrame | None:
        """Of what was appended to these destinations, and may be of others."""
        ...

    def taken_in(self, topic: str, since_ms: int) -> DataFrame | None:
        """What was sent to an intake topic, or one of our own, as Kafka's columns; or None."""
        ...


class ReadBack:
    """Looks at all that there is since then. With `cluster`, the destinations are on that one."""

    def __init__(
        self, spark: SparkSession, settings: Settings, cluster: str | None, keeping: Keeping
    ) -> None:
        self._spark = spark
        self._keeping = keeping
        self._names = TopicNames(settings)
        self._has_transactions = settings.transactional_delivery
        self._progress = progress(settings).alias("progress")
        self._own_topics = _own_topics(settings)
        self._here = Reach(settings)
        self._there = Reach(settings.at(cluster)) if cluster else self._here
        self._told: set[str] = set()

    def own(self, since_ms: int, seen: Seen | None = None) -> DataFrame | None:
        """Of what was appended to duetime's own topics, where messages wait or end.

        With `seen`, only what is new is read, and added there.
        """
        seen = seen or Seen()
        with self._keeping.reading():
            ends = self._ends(self._here, self._own_topics)
            if behind := self._awaited(self._here, ends, seen):
                (topic, partition), *_ = behind
                raise KafkaError(
                    f"topic {topic}, partition {partition} has records that its replicas do not "
                    "have yet: see that its brokers are up and replicate"
                )
            ranges = self._appended(self._here, ends, since_ms, seen.ends)
            return self._looked(self._here, ranges, (), seen, ends)

    def destinations(
        self, topics: Sequence[str], since_ms: int, seen: Seen | None = None
    ) -> DataFrame | None:
        """Of what was appended to these destinations. Warns of those that cannot be read."""
        seen = seen or Seen()
        ends = self._ends(self._there, topics)
        for topic, _ in self._awaited(self._there, ends, seen):
            self._tell(topic, "it has records that its replicas do not have yet")
        if self._is_transactional(self._there):
            # What was sent in a transaction that was aborted is not delivered.
            ends |= self._there.offsets.ends(ends, committed_only=True)
        ranges = self._appended(self._there, ends, since_ms, seen.ends)
        new = {place: end for place, end in ends.items() if place not in seen.ends}
        self._tell_removed(new, ranges)
        return self._looked(self._there, ranges, topics, seen, ends)

    def taken_in(self, topic: str, since_ms: int, seen: Seen | None = None) -> DataFrame | None:
        """What was sent to an intake topic, or one of our own, as Kafka's columns; or None.

        With `seen`, what is new.
        """
        seen = seen or Seen()
        offsets = self._here.offsets
        # Spark keeps one consumer of a partition, and so reads it in one way: the query's.
        committed_only = topic == self._names.transactional
        # Up to a transaction that is open, because a read of committed records ends there.
        ends = offsets.ends(offsets.readable_places(topic), committed_only=committed_only)
        ranges = self._appended(self._here, ends, since_ms, seen.ends)
        if not ranges:
            return None
        seen.ends |= {_place(each): each.end for each in ranges}
        settings = self._here.settings
        return read_ranges(
            self._spark, settings, ranges, all_there=False, committed_only=committed_only
        )

    def has_records(self, topics: Sequence[str]) -> bool:
        """Whether there is anything in these topics of ours."""
        offsets = self._here.offsets
        places = [place for topic in topics for place in offsets.readable_places(topic)]
        return offsets.starts(places) != offsets.ends(places)

    def close(self) -> None:
        """Close the connections."""
        for each in {self._here, self._there}:
            each.offsets.close()

    def _looked(
        self,
        at: "Reach",
        ranges: Sequence[OffsetRange],
        destinations: Sequence[str],
        seen: Seen,
        ends: Mapping[Place, int],
    ) -> DataFrame | None:
        if ranges:
            begun_s = time.monotonic()
            records = sum(each.count for each in ranges)
            seen.add(self._ids(at, ranges, destinations), records)
            _tell_read(ranges, "destinations" if destinations else "own", begun_s)
        seen.ends |= ends
        return seen.ids

    def _ids(
        self, at: "Reach", ranges: Sequence[OffsetRange], destinations: Sequence[str]
    ) -> DataFrame:
        committed_only = bool(destinations) and self._is_transactional(at)
        records = read_ranges(
            self._spark, at.settings, ranges, all_there=False, committed_only=committed_only
        )
        return records.select(*self._columns(destinations)).where("id is not null")

    def _columns(self, destinations: Sequence[str]) -> list[Column]:
        by_name = header_map(F.col("headers"))
        rejected = F.col("topic") == self._names.rejected
        delivered = F.col("topic").isin(list(destinations))
        # A cancel has the id of its message, and no destination.
        message = delivered | header_text(by_name, DUE_TOPIC).isNotNull()
        name = F.when(rejected, header_text(by_name, DUE_ERROR_SOURCE)).when(
            message, header_text(by_name, DUE_ID)
        )
        place = self._progress, *map(F.col, PLACE)
        return [name.alias("id"), delivered.alias("is_delivered"), *place]

    def _is_transactional(self, at: "Reach") -> bool:
        """Whether messages are, or ever were, delivered there in transactions."""
        if at is self._here and not self._has_transactions:
            place = self._names.sending, 0
            self._has_transactions = at.offsets.ends([place])[place] > 0
        return at is self._here and self._has_transactions

    def _ends(self, at: "Reach", topics: Sequence[str]) -> dict[Place, int]:
        """Where the partitions end of those topics that we may read."""
        return at.offsets.ends(place for topic in topics for place in self._readable(at, topic))

    def _awaited(self, at: "Reach", ends: dict[Place, int], seen: Seen) -> list[Place]:
        """Wait until readers are shown all that leaders have by now, and move `ends` there.

        Returns the partitions where that takes too long. What was read before is not waited for:
        what is behind that was sent by who reads back, and is acknowledged.
        """
        new = [place for place in ends if place not in seen.ends]
        if not new or not at.offsets.is_replicated():
            return []
        logs = log_ends(self._spark, at.settings, at.offsets.leader_epochs(new))
        until_s = time.monotonic() + VISIBLE_S
        while behind := [place for place in logs if ends[place] < logs[place]]:
            if time.monotonic() > until_s:
                break
            log.info("waiting for replicas partitions=%d", len(behind))
            time.sleep(LOOK_S)
            ends |= at.offsets.ends(behind)
        return behind

    def _appended(
        self, at: "Reach", ends: Mapping[Place, int], since_ms: int, seen: Mapping[Place, int]
    ) -> list[OffsetRange]:
        """The ranges of these partitions that were appended since, and are new."""
        firsts: dict[Place, int | None] = dict(seen)
        firsts |= at.offsets.first_since({each: since_ms for each in ends if each not in seen})
        return _between(firsts, ends)

    def _readable(self, at: "Reach", topic: str) -> list[Place]:
        try:
            # Without a leader of one of its own topics a query waits; a destination holds up none.
            is_own = topic in self._own_topics
            return at.offsets.readable_places(topic, all_led=not is_own)
        except Unreadable as error:
            self._tell(topic, str(error))
            return []

    def _tell_removed(self, ends: Mapping[Place, int], ranges: Sequence[OffsetRange]) -> None:
        """Of destinations: whose first record is the first there is may have had others before.

        And so may those that have none at all any more.
        """
        starts = self._there.offsets.starts(ends)
        firsts = {**ends, **{_place(each): each.start for each in ranges}}
        for place, start in starts.items():
            if 0 < start == firsts[place]:
                self._tell(place[0], "its retention is shorter than the interruption was")

    def _tell(self, topic: str, why: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            log.warning("what was interrupted may come twice topic=%s: %s", topic, why)


class Following:
    """Looks at what is new since its last look: for records that come in batches, oldest first."""

    def __init__(self, read_back: ReadBack) -> None:
        self._read_back = read_back
        self._own = Seen()
        self._theirs = Seen()
        self._taken_in = Seen()
        self._since_ms: int | None = None

    def own(self, since_ms: int) -> DataFrame | None:
        """Since the instant of the first call."""
        return self._read_back.own(self._first(since_ms), self._own)

    def destinations(self, topics: Sequence[str], since_ms: int) -> DataFrame | None:
        """The same; of the destinations of former calls, too."""
        return self._read_back.destinations(topics, self._first(since_ms), self._theirs)

    def taken_in(self, topic: str, since_ms: int) -> DataFrame | None:
        """What is new since the last call."""
        return self._read_back.taken_in(topic, self._first(since_ms), self._taken_in)

    def _first(self, since_ms: int) -> int:
        self._since_ms = since_ms if self._since_ms is None else self._since_ms
        return self._since_ms


class Reach:
    """A cluster that is read back."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.offsets = Offsets(settings, f"{settings.namespace}.recover")


def _tell_read(ranges: Sequence[OffsetRange], topics: str, begun_s: float) -> None:
    records, taken_s = sum(each.count for each in ranges), time.monotonic() - begun_s
    READ_BACK_RECORDS.labels(topics).inc(records)
    READ_BACK_SECONDS.labels(topics).inc(taken_s)
    told = topics, records, len(ranges), taken_s
    log.info("read back topics=%s records=%d partitions=%d seconds=%.1f", *told)


def _between(firsts: Mapping[Place, int | None], ends: Mapping[Place, int]) -> list[OffsetRange]:
    return [
        OffsetRange(*place, first, end)
        for place, end in ends.items()
        if (first := firsts[place]) is not None and first < end
    ]


def _place(each: OffsetRange) -> Place:
    return each.topic, each.partition


def _own_topics(settings: Settings) -> list[str]:
    names = TopicNames(settings)
    wheel = [names.wheel(level) for level in range(settings.wheel_levels)]
    outboxes = [names.outbox(each) for each in settings.clusters]
    ends = [names.isolated, names.sending, names.failed, names.dead, names.rejected]
    return [*wheel, *outboxes, names.store, names.lanes, *ends]
