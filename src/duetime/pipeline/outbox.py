"""The outbox queries: what is for another cluster is forwarded there, by one query a cluster.

A message that is due goes to `duetime.outbox.<cluster>`, as it waited, and from there on at once.
While that cluster does not answer its query fails, is started again, and all else goes on. Then
`recover` forwards what has gathered: in order, without what was forwarded before.

Whether a message can be delivered is known before it gets here, from the other cluster's topics.
What cannot be any more by now (the topic is gone, it has expired while the cluster was away) makes
the real-time query fail, because its sink knows one cluster only; `recover` sends it to the failed
ones here.
"""

from dataclasses import replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import now_ms
from duetime.config import Settings
from duetime.errors import Reason
from duetime.pipeline.kafka import handle_what_is_there, read_stream, write_batch
from duetime.pipeline.obstacles import is_isolated, is_reached
from duetime.pipeline.routing import KNOWN, Routes
from duetime.pipeline.rows import SinkRow, Waiting, choose, waiting_record
from duetime.pipeline.written import Written, identified, scope_of_waiting
from duetime.topics import TopicNames

#: How the names of the queries begin.
OUTBOX = "outbox-"


def outbox(spark: SparkSession, settings: Settings, cluster: str) -> DataFrame:
    """Rows for the other cluster's sink, without end. Runs in executors.

    A row that meets an obstacle raises, before anything behind it is sent.
    """
    # What was in time when it was sent here is in time a moment later.
    message = replace(waiting_record(), expires_ms=F.lit(None).cast("bigint"))
    known = _looked_up(outbox_records(spark, settings, cluster), settings, message)
    reason = F.coalesce(F.col("why.reason"), F.lit("its topic has refused a record"))
    raised = F.raise_error(F.concat(F.lit("cannot be forwarded: "), reason))
    passed = known.where(F.when(~_passes(), raised.cast("boolean")).otherwise(True))
    # What the producer holds when an outage begins is sent or given up in the end, and what comes
    # behind must not overtake it: it is held up here.
    return _forwarded(passed.where(is_reached(settings.at(cluster))), settings)


def outbox_records(
    spark: SparkSession, settings: Settings, cluster: str, *, batch: int | None = None
) -> DataFrame:
    """What is on its way to the cluster, as an endless read."""
    return read_stream(spark, settings, [TopicNames(settings).outbox(cluster)], batch=batch)


def recover_outbox(spark: SparkSession, settings: Settings, written: Written, cluster: str) -> None:
    """Forward what is there, without what was forwarded before; what cannot be, to the failed."""
    following = written.following()

    def handle(batch: DataFrame, _number: int) -> None:
        if found := scope_of_waiting(batch):
            left = following.without(identified(batch), found)
            # One look decides where each of them goes.
            known = _looked_up(left, settings, waiting_record())
            decided = known.coalesce(1).sortWithinPartitions("offset").localCheckpoint()
            write_batch(_returned(decided, settings), settings, "recover")
            passed = decided.where(_passes())
            write_batch(_forwarded(passed, settings), settings.at(cluster), "recover")

    records = outbox_records(spark, settings, cluster, batch=settings.batch_records)
    handle_what_is_there(records, handle, settings, query_name(cluster))


def query_name(cluster: str) -> str:
    """What its query, and the directory of its offsets, are called."""
    return f"{OUTBOX}{cluster}"


def _looked_up(records: DataFrame, settings: Settings, message: Waiting) -> DataFrame:
    """Add `why` it cannot be forwarded, null where it can, and whether it is sent by itself."""
    routes = Routes(settings)
    known = records.select("*", routes.known(message.topic, message.cluster))
    by_itself = is_isolated(F.col(KNOWN)).alias("by_itself")
    return known.select("*", _obstacle(routes, message).alias("why"), by_itself)


def _passes() -> Column:
    return F.col("why").isNull() & ~F.col("by_itself")


def _obstacle(routes: Routes, message: Waiting) -> Column:
    foreign = F.struct(
        F.lit(str(Reason.UNREADABLE)).alias("reason"),
        F.lit("no record of an outbox: who wrote it?").alias("detail"),
    )
    unreadable = ~message.is_whole | message.is_cancel
    return F.when(unreadable, foreign).otherwise(routes.obstacle(message, now_ms()))


def _forwarded(records: DataFrame, settings: Settings) -> DataFrame:
    """Rows for the other cluster."""
    routes = Routes(settings)
    return routes.rows(records.drop("why"), F.lit(None), routes.destination(waiting_record()))


def _returned(records: DataFrame, settings: Settings) -> DataFrame:
    """Rows for this one: what cannot be forwarded, or not with others."""
    routes, message, why = Routes(settings), waiting_record(), F.col("why")
    to: SinkRow = choose(
        (why["reason"] == str(Reason.UNREADABLE), routes.rejected(why["reason"], why["detail"])),
        (why.isNotNull(), routes.failed(message, why)),
        otherwise=routes.isolated(message),
    )
    returned = records.where(~_passes()).withColumnRenamed("why", "returned")
    return routes.rows(returned, F.col("returned"), to)
