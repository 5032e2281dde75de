"""What is written already, read back: so each message goes on once, whatever was interrupted.

A message is in one place at a time: in an intake topic, a lane, a slot, the failed topic, or at its
destination. Whoever takes it out of one writes it to the next, and frees the first place later. So
after a crash a record may be left of which the message has gone on: that is so if its id was
appended anywhere else since the record itself was. Ids are deterministic, and so this needs no
transactions, only reading; and no more than what was appended since the oldest record in question.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import header_map, header_text, source
from duetime.config import Settings
from duetime.message import DUE_ERROR_SOURCE, DUE_ID, DUE_TOPIC
from duetime.pipeline.kafka import read_ranges
from duetime.pipeline.routing import waiting_record
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets, Unreadable
from duetime.stores.places import Place
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: The order of a message's records, from the first to where it is now.
PLACE = ("timestamp", "topic", "partition", "offset")

SIDES = ("written", "record")

#: How far the clocks of the machines may differ, in ms: so much earlier is read back.
CLOCKS_MS = 5_000

#: Timestamps that senders set may be so far from the brokers' clock, in ms.
SENDERS_CLOCK_MS = 600_000

#: Spark's number for a timestamp that the broker set.
LOG_APPEND_TIME = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What has to be read back for some records."""

    #: Since when they may have been handled, epoch ms.
    since_ms: int
    #: Where they were to go on this cluster.
    destinations: list[str]
    #: And where on others, by cluster.
    abroad: Mapping[str, list[str]]


class Written:
    """Finds what was written. Its decisions are made on the driver, its reading in executors.

    With `cluster`, the destinations are those on that one.
    """

    def __init__(
        self, spark: SparkSession, settings: Settings, *, cluster: str | None = None
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._cluster = cluster
        self._names = TopicNames(settings)
        self._own = Reach(settings)
        self._theirs = Reach(settings.at(cluster)) if cluster else self._own
        self._told: set[str] = set()

    def without(self, records: DataFrame, scope: Scope) -> DataFrame:
        """Those of the records whose messages have not gone on from there.

        `records` are of the wheel, of lanes or of the failed topic, with their `id` and whether
        they are an `is_cancel`: cancels stay.
        """
        return self._left(records, scope, _is_behind())

    def without_taken_in(self, records: DataFrame, scope: Scope) -> DataFrame:
        """The same of records of intake topics, which may be anywhere by now."""
        return self._left(records, scope, F.lit(True))

    def has_records(self, topics: Sequence[str]) -> bool:
        """Whether there is anything in these topics of ours."""
        offsets = self._own.offsets
        places = [place for topic in topics for place in offsets.readable_places(topic)]
        return offsets.starts(places) != offsets.ends(places)

    def close(self) -> None:
        """Close the connections."""
        for each in {self._own, self._theirs}:
            each.offsets.close()

    def _left(self, records: DataFrame, scope: Scope, is_behind: Column) -> DataFrame:
        destinations = scope.abroad.get(self._cluster, []) if self._cluster else scope.destinations
        written = self._ids(scope.since_ms - CLOCKS_MS, sorted(set(destinations)))
        if written is None:
            return records
        same = (F.col("written.id") == F.col("record.id")) & ~F.col("record.is_cancel")
        delivered = F.col("written.is_delivered")
        gone_on = same & (delivered | is_behind)
        return records.alias("record").join(written.alias("written"), gone_on, "left_anti")

    def _ids(self, since_ms: int, destinations: Sequence[str]) -> DataFrame | None:
        """id, is_delivered and place of every message appended since; None of nothing."""
        # What messages leave is read before what they reach: none slips through between the two.
        own = self._appended(self._own, self._own_topics(), since_ms)
        own_ids = self._read(self._own, own, ()).localCheckpoint() if own else None
        theirs = self._appended(self._theirs, destinations, since_ms)
        self._tell_removed(theirs)
        log.info(
            "reading back records=%d partitions=%d since_ms=%d",
            sum(each.count for each in own + theirs),
            len(own + theirs),
            since_ms,
        )
        their_ids = self._read(self._theirs, theirs, destinations) if theirs else None
        return own_ids.unionAll(their_ids) if own_ids and their_ids else own_ids or their_ids

    def _read(
        self, at: "Reach", ranges: Sequence[OffsetRange], destinations: Sequence[str]
    ) -> DataFrame:
        records = read_ranges(self._spark, at.settings, ranges, all_there=False)
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
        return [name.alias("id"), delivered.alias("is_delivered"), *map(F.col, PLACE)]

    def _own_topics(self) -> list[str]:
        names, levels = self._names, range(self._settings.wheel_levels)
        wheel = [names.wheel(level) for level in levels]
        outboxes = [names.outbox(each) for each in self._settings.clusters]
        return [*wheel, *outboxes, names.lanes, names.failed, names.dead, names.rejected]

    def _appended(self, at: "Reach", topics: Sequence[str], since_ms: int) -> list[OffsetRange]:
        """The ranges of these topics that were appended since; of those that can be read."""
        places = [place for topic in topics for place in self._readable(at, topic)]
        ends = at.offsets.ends(places)
        firsts = at.offsets.first_since(dict.fromkeys(places, since_ms))
        return [
            OffsetRange(*place, first, ends[place])
            for place, first in firsts.items()
            if first is not None and first < ends[place]
        ]

    def _readable(self, at: "Reach", topic: str) -> list[Place]:
        try:
            return at.offsets.readable_places(topic)
        except Unreadable as error:
            self._tell(topic, str(error))
            return []

    def _tell_removed(self, ranges: Sequence[OffsetRange]) -> None:
        """Of destinations: whose first record is the first there is may have had others before."""
        starts = self._theirs.offsets.starts([(each.topic, each.partition) for each in ranges])
        for each in ranges:
            if 0 < starts[each.topic, each.partition] == each.start:
                self._tell(each.topic, "its retention is shorter than the interruption was")

    def _tell(self, topic: str, why: str) -> None:
        if topic not in self._told:
            self._told.add(topic)
            log.warning("what was interrupted may come twice topic=%s: %s", topic, why)


class Reach:
    """A cluster that is read back."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.offsets = Offsets(settings, f"{settings.namespace}.recover")


def scope(records: DataFrame, destination: Column, cluster: Column) -> Scope | None:
    """What has to be read back for these records; None where there are none."""
    at_ms = F.unix_millis("timestamp")
    stamped = F.col("timestampType") == LOG_APPEND_TIME
    earliest_ms = F.min(F.when(stamped, at_ms).otherwise(at_ms - SENDERS_CLOCK_MS))
    places = records.groupBy(destination.alias("to"), cluster.alias("cluster"))
    found = places.agg(earliest_ms.alias("since_ms")).collect()
    if not found:
        return None
    named: dict[str | None, list[str]] = {}
    for row in found:
        if row.to is not None:
            named.setdefault(row.cluster, []).append(row.to)
    here = named.pop(None, [])
    abroad = {cluster: topics for cluster, topics in named.items() if cluster is not None}
    return Scope(since_ms=min(row.since_ms for row in found), destinations=here, abroad=abroad)


def scope_of_waiting(records: DataFrame) -> Scope | None:
    """The same for records as they wait: of lanes, of an outbox, or of the failed topic."""
    message = waiting_record()
    return scope(records, F.when(message.is_whole, message.topic), message.cluster)


def identified(records: DataFrame) -> DataFrame:
    """Adds to such records `id`, for what is none of duetime's the place, and `is_cancel`: no."""
    name = F.coalesce(waiting_record().id, source())
    return records.select("*", name.alias("id"), F.lit(False).alias("is_cancel"))


def _is_behind() -> Column:
    """Whether the record is not the latest of its message: the latest is where the message is."""
    written, record = (F.struct(*(f"{side}.{name}" for name in PLACE)) for side in SIDES)
    return written > record
