"""Recover: what a query had in flight when it ended is finished before it goes on in real time.

A real-time query commits at the end of a batch, some minutes apart, so what it did since is done
again after a crash, and after a plain stop too. Here that is done once, as a batch, without what is
written already.
"""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import message_id, now_ms
from duetime.config import Settings
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.intake import Intake, asks_to_cancel, intake_records
from duetime.pipeline.kafka import handle_what_is_there, write_batch
from duetime.pipeline.lanes import lane_records, looked_at_again
from duetime.pipeline.written import Written, identified, scope, scope_of_waiting


def recover_intake(
    spark: SparkSession, settings: Settings, written: Written, intake: Intake
) -> None:
    """Take in what is there, without what was taken in before."""

    def handle(batch: DataFrame, _number: int) -> None:
        # Read and understood once; what follows is several jobs over it.
        asked = (
            batch.transform(intake.understood)
            .transform(intake.judged)
            .transform(intake.identified)
            .localCheckpoint()
        )
        if found := scope(
            asked, F.when(F.col("refused").isNull(), F.col("asked.topic")), F.col("asked.cluster")
        ):
            left = written.without_taken_in(asked, found)
            # Reading back takes a while.
            heard = _without_cancelled(left, asked, settings).withColumn("now", now_ms())
            write_batch(intake.routed(heard), settings, "recover")
            reach(Point.RECOVER_SENT)

    handle_what_is_there(intake_records(spark, settings), handle, settings, "intake")


def recover_lanes(spark: SparkSession, settings: Settings, written: Written) -> None:
    """Look again at what is in lanes, without what has left them."""

    def handle(batch: DataFrame, _number: int) -> None:
        if found := scope_of_waiting(batch):
            left = written.without(identified(batch), found)
            write_batch(looked_at_again(left, settings), settings, "recover")

    handle_what_is_there(lane_records(spark, settings), handle, settings, "lanes")


def _without_cancelled(left: DataFrame, asked: DataFrame, settings: Settings) -> DataFrame:
    """Without messages that nobody finds because their cancel was heard: both are freed then."""
    # By its time a cancel was taken, though it would be refused as too late by now.
    in_time = F.unix_millis("timestamp") + settings.horizon_ms <= F.col("asked.due_ms")
    cancels = asked.where(asks_to_cancel() & in_time).select(
        message_id(F.col("asked.due_ms"), F.col("asked.unique")).alias("id")
    )
    past = F.col("left.asked.due_ms") <= F.col("left.now") + settings.horizon_ms
    is_gone = (F.col("left.id") == F.col("cancel.id")) & ~F.col("left.is_cancel") & past
    return left.alias("left").join(cancels.alias("cancel"), is_gone, "left_anti")
