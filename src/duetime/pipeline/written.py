"""What is written already, read back: so each message goes on once, whatever was interrupted.

A message is in one place at a time: in an intake topic, a lane, a slot, the failed topic, or at its
destination. Whoever takes it out of one writes it to the next, and frees the first place later. So
after a crash a record may be left of which the message has gone on: that is so if its id was
appended anywhere else since the record itself was. Ids are deterministic, and so this needs no
transactions, only reading; and no more than what was appended since the oldest record in question.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import source
from duetime.config import Settings
from duetime.pipeline.progress import progress
from duetime.pipeline.readback import PLACE, Following, Look, ReadBack
from duetime.pipeline.rows import waiting_record
from duetime.stores.keeping import Keeping

SIDES = ("written", "record")

#: Records that agree in these columns are equally far, and in one partition.
SAME_LOG = ("progress", "topic", "partition")

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
    #: Where they were to go, by the name of the cluster; None is this one.
    destinations: Mapping[str | None, list[str]]


class Batches:
    """Tells which batches of a query may have been written already, in part or as a whole."""

    def __init__(self) -> None:
        self._last: int | None = None

    def is_again(self, number: int) -> bool:
        """Whether it may have been begun before: to be asked once a batch, in their order."""
        # The first one by who crashed, and one that failed is repeated.
        again, self._last = self._last in (None, number), number
        return again


class Sieve:
    """Holds back the records whose messages have gone on, by what a look finds.

    Its decisions are made on the driver, its reading in executors. With `cluster`, the destinations
    are those on that one.
    """

    def __init__(self, settings: Settings, look: Look, cluster: str | None) -> None:
        self._settings = settings
        self._look = look
        self._cluster = cluster

    def without(self, records: DataFrame, scope: Scope) -> DataFrame:
        """Those of the records whose messages have not gone on from there.

        `records` are of the wheel, of lanes or of the failed topic, with their `id` and whether
        they are an `is_cancel`: cancels stay.
        """
        placed = records.select("*", progress(self._settings).alias("progress"))
        return self._left(placed, scope, _is_behind()).drop("progress")

    def without_taken_in(self, records: DataFrame, scope: Scope) -> DataFrame:
        """The same of records of intake topics, which may be anywhere by now."""
        return self._left(records, scope, F.lit(True))

    def taken_in(self, topic: str, since_ms: int) -> DataFrame | None:
        """What was sent to an intake topic, or one of our own, as Kafka's columns; or None."""
        return self._look.taken_in(topic, since_ms - CLOCKS_MS)

    def _left(self, records: DataFrame, scope: Scope, is_behind: Column) -> DataFrame:
        destinations = scope.destinations.get(self._cluster, [])
        written = self._ids(scope.since_ms - CLOCKS_MS, sorted(set(destinations)))
        if written is None:
            return records
        same = (F.col("written.id") == F.col("record.id")) & ~F.col("record.is_cancel")
        delivered = F.col("written.is_delivered")
        gone_on = same & (delivered | is_behind)
        return records.alias("record").join(written.alias("written"), gone_on, "left_anti")

    def _ids(self, since_ms: int, destinations: Sequence[str]) -> DataFrame | None:
        """id, is_delivered, progress and place of all that was appended since; None of nothing."""
        # What messages leave is read before what they reach, and nothing is freed meanwhile: none
        # slips through between the two.
        own = self._look.own(since_ms)
        theirs = self._look.destinations(destinations, since_ms)
        return own.unionAll(theirs) if own and theirs else own or theirs


class Written(Sieve):
    """What is written as of each time that it is asked. Holds connections: close it."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        *,
        cluster: str | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        """`keeping` is of who frees what is read back here."""
        self._read_back = ReadBack(spark, settings, cluster, keeping or Keeping())
        super().__init__(settings, self._read_back, cluster)

    def following(self) -> Sieve:
        """The same for records that come in batches, oldest first: each time it reads what is new.

        What one batch wrote is found by the next.
        """
        return Sieve(self._settings, Following(self._read_back), self._cluster)

    def has_records(self, topics: Sequence[str]) -> bool:
        """Whether there is anything in these topics of ours."""
        return self._read_back.has_records(topics)

    def close(self) -> None:
        """Close the connections."""
        self._read_back.close()


class Repeat(NamedTuple):
    """A batch that may have been written."""

    sieve: Sieve
    scope: Scope


class Repeats:
    """Tells which batches of a query may have been written, and holds back what was.

    One that was begun before, by who crashed; and, where the checkpoint is lost, whatever there was
    when the query began: it hears all of that once more, in other batches.
    """

    def __init__(self, written: Written, begun_ms: int) -> None:
        """`begun_ms` is when the query began, epoch ms."""
        self._batches = Batches()
        self._until_ms = begun_ms + CLOCKS_MS
        self._sieve: Sieve | None = written.following()

    def of(self, number: int, look: Callable[[], Scope | None]) -> Repeat | None:
        """None of a batch that nobody has begun: to be asked once a batch, in their order.

        `look` says what has to be read back for it; that may take a job.
        """
        again = self._batches.is_again(number)
        if self._sieve is None or (found := look()) is None:
            return None
        if again or found.since_ms < self._until_ms:
            return Repeat(self._sieve, found)
        # Of each partition that is behind, a batch has the next: none that follows is older.
        self._sieve = None
        return None


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
    return Scope(since_ms=min(row.since_ms for row in found), destinations=named)


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
    order = ("progress", *PLACE)
    written, record = (F.struct(*(f"{side}.{name}" for name in order)) for side in SIDES)
    same = [F.col(f"written.{each}") == F.col(f"record.{each}") for each in SAME_LOG]
    # Within one partition the offset tells the order. Its timestamps may run backwards: a new
    # leader's clock is another one. They decide only between records that are in different
    # partitions and equally far.
    by_offset = F.col("written.offset") > F.col("record.offset")
    return F.when(reduce(and_, same), by_offset).otherwise(written > record)
