"""A turn: one job that empties a stretch of the wheel, whatever level it is of.

What is due soon is sent, each message at its time; what is due later is routed to a nearer slot. So
the release of a second, the cascade of a far slot and a rescue are the same job over other offsets,
and a record that a slot should not have (the ring came round, clocks moved) is routed again, never
dropped.

A turn reads its partitions in one task. That makes duplicates, cancels and order a matter of
sorting rows side by side: no shuffle, which would cost more than everything else.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from duetime.columns import now_ms, slept_until
from duetime.config import Settings
from duetime.errors import Reason
from duetime.pipeline.kafka import read_ranges, write_batch
from duetime.pipeline.routing import Routes, waiting_record
from duetime.stores import OffsetRange


class Turn:
    """Sends or routes on what some ranges of the wheel hold.

    The columns are built once: a turn is planned every second, and planning is most of what it
    costs.
    """

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        self._settings = settings
        self._readable = _readable()
        self._nth = _nth_of_its_id()
        self._now = now_ms().alias("now")
        self._paced = _paced(settings.horizon_ms)
        self._next = _next_place(settings).alias("to")

    def __call__(self, ranges: Sequence[OffsetRange]) -> None:
        """Empty these ranges; returns when everything is acknowledged.

        Safe to repeat: what was routed on before is dropped as a duplicate where it arrives. What
        was sent before is sent again.
        """
        records = read_ranges(self._spark, self._settings, ranges)
        write_batch(self.rows(records), self._settings)

    def rows(self, records: DataFrame) -> DataFrame:
        """Rows for the Kafka sink, in due order, each given out when it is due."""
        return (
            records.select("*", *self._readable)
            .coalesce(1)
            .transform(self._without_duplicates_and_cancelled)
            .sortWithinPartitions("due_ms", "offset")
            .select("*", self._now)
            .where(self._paced)
            .select(self._next)
            .select("to.*")
        )

    def _without_duplicates_and_cancelled(self, records: DataFrame) -> DataFrame:
        """Of the records with one id, a cancel if there is one, else the first."""
        return records.select("*", self._nth).where("nth = 1")


def _readable() -> list[Column]:
    """due_ms, id and is_cancel; a record that is none of duetime's is due at 0 and not `known`."""
    message = waiting_record()
    place = F.concat_ws("/", "topic", "partition", "offset")
    known = message.due_ms.isNotNull() & message.id.isNotNull()
    return [
        F.when(known, message.due_ms).otherwise(0).alias("due_ms"),
        F.when(known, message.id).otherwise(place).alias("id"),
        (known & message.is_cancel).alias("is_cancel"),
        known.alias("known"),
    ]


def _nth_of_its_id() -> Column:
    # All records with one id are in one task. By (due, id) and not id alone, because Spark sorts a
    # number by radix and a text by comparing.
    same = W.partitionBy("due_ms", "id").orderBy(F.col("is_cancel").desc(), F.col("offset"))
    return F.row_number().over(same).alias("nth")


def _is_soon(horizon_ms: int) -> Column:
    return F.col("due_ms") - F.col("now") <= horizon_ms


def _paced(horizon_ms: int) -> Column:
    """True when a row that is due soon is due; false for a cancel whose time has come.

    Runs in an executor, after the sort: the task sleeps from row to row.
    """
    soon, is_cancel = _is_soon(horizon_ms), F.col("is_cancel")
    due = slept_until(F.col("due_ms"), F.col("now"))
    return F.when(soon & is_cancel, False).when(soon, due).otherwise(True)


def _next_place(settings: Settings) -> Column:
    """To the destination what is due, to its slot what is due later."""
    message, routes = waiting_record(), Routes(settings)
    why = routes.rejected(
        F.lit(str(Reason.UNREADABLE)), F.lit("no record of the wheel: who wrote it?")
    )
    return (
        F.when(~F.col("known"), why)
        .when(_is_soon(settings.horizon_ms), routes.destination(message))
        .otherwise(routes.wheel(message, F.col("now")))
    )
