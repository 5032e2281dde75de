"""Recover: what a query had in flight when it ended is finished before it goes on in real time.

A real-time query commits at the end of a batch, some minutes apart, so what it did since is done
again after a crash, and after a plain stop too. Here that is done once, in batches, without what is
written already. Each batch is committed, so that a crash meanwhile costs no more than one.
"""

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from duetime.columns import message_id, now_ms
from duetime.config import Settings
from duetime.message import DUE_REPLACES
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.intake import INTAKE, Intake, destination, intake_records, of_message
from duetime.pipeline.kafka import handle_what_is_there, write_batch
from duetime.pipeline.lanes import lane_records, looked_at_again
from duetime.pipeline.refusals import asks_to_cancel
from duetime.pipeline.written import Sieve, Written, identified, scope, scope_of_waiting
from duetime.stores.places import Place
from duetime.topics import TopicNames


def recover_intake(  # noqa: PLR0913 (what the query itself takes, and what is written)
    spark: SparkSession,
    settings: Settings,
    written: Written,
    intake: Intake,
    name: str = INTAKE,
    *,
    starting: Mapping[Place, int] | None = None,
) -> None:
    """Take in what is there for the query of this name, without what was taken in before.

    Without a checkpoint, from where it is `starting`.
    """
    following = written.following()
    cancels: DataFrame | None = None

    def handle(batch: DataFrame, _number: int) -> None:
        # Read and understood once; what follows is several jobs over it.
        asked = (
            batch.transform(intake.understood)
            .transform(intake.judged)
            .transform(intake.identified)
            .localCheckpoint()
        )
        found = scope(asked, destination(settings), of_message("cluster"))
        if found is None:
            return
        nonlocal cancels
        # All that are there by now: a message may be in an earlier batch than its cancel.
        if new := _cancelled(following, settings, intake, found.since_ms):
            cancels = (cancels.union(new) if cancels else new).localCheckpoint()
        left = following.without_taken_in(asked.transform(_first_of_its_id), found)
        # Reading back takes a while.
        left = left.withColumn("now", now_ms())
        heard = _without(left, cancels, settings) if cancels else left
        write_batch(intake.routed(heard), settings, "recover")
        reach(Point.RECOVER_SENT)

    batch = settings.batch_records
    records = intake_records(spark, settings, name, batch=batch, starting=starting)
    handle_what_is_there(records, handle, settings, name)


def recover_lanes(spark: SparkSession, settings: Settings, written: Written) -> None:
    """Look again at what is in lanes, without what has left them."""
    following = written.following()

    def handle(batch: DataFrame, _number: int) -> None:
        if found := scope_of_waiting(batch):
            left = following.without(identified(batch), found)
            write_batch(looked_at_again(left, settings), settings, "recover")

    records = lane_records(spark, settings, batch=settings.batch_records)
    handle_what_is_there(records, handle, settings, "lanes")


def _first_of_its_id(asked: DataFrame) -> DataFrame:
    """Of the messages with one id the first that came, as if they had met in a slot; and cancels.

    Some were far from due when they came, and are sent now without being in a slot. Cancels of a
    message and of its retries have one id, and go to a slot each.
    """
    id_and_time = "id", "is_cancel", "due_ms"
    same = W.partitionBy(*id_and_time).orderBy("timestamp", "topic", "partition", "offset")
    return asked.select("*", F.row_number().over(same).alias("nth")).where("nth = 1").drop("nth")


def _cancelled(sieve: Sieve, settings: Settings, intake: Intake, since_ms: int) -> DataFrame | None:
    """The ids that were cancelled or replaced in time: by now, cancels are refused as too late."""
    names = TopicNames(settings)
    found = [_cancelled_by_control(sieve.taken_in(names.control, since_ms), settings, intake)]
    found += [
        _replaced(sieve.taken_in(topic, since_ms), intake)
        for topic in (names.native, names.transactional)
    ]
    there = [each for each in found if each is not None]
    return reduce(DataFrame.union, there).distinct() if there else None


def _cancelled_by_control(
    sent: DataFrame | None, settings: Settings, intake: Intake
) -> DataFrame | None:
    if sent is None:
        return None
    in_time = F.unix_millis("timestamp") + settings.horizon_ms <= F.col("asked.due_ms")
    identity = F.col("asked.key").cast("string")
    # The cancel of a retry, which has another instant than the id, is of none that is taken in.
    is_first = identity == message_id(F.col("asked.due_ms"), F.col("asked.unique"))
    asked = intake.understood(sent).where(asks_to_cancel() & in_time & is_first)
    return asked.select(identity.alias("id"))


def _replaced(sent: DataFrame | None, intake: Intake) -> DataFrame | None:
    """Whether a record replaces a message is decided by the time of the record alone."""
    if sent is None:
        return None
    # Most replace nothing, and are not worth to be understood.
    replacing = sent.where(F.array_contains("headers.key", DUE_REPLACES))
    rows = replacing.transform(intake.understood).transform(intake.judged)
    return rows.where("cancels_replaced").select(F.col("asked.replaces").alias("id"))


def _without(left: DataFrame, cancels: DataFrame, settings: Settings) -> DataFrame:
    """Without messages that meet their cancel in no slot, because they are due."""
    due = F.col("left.asked.due_ms") <= F.col("left.now") + settings.horizon_ms
    is_gone = (F.col("left.id") == F.col("cancel.id")) & ~F.col("left.is_cancel") & due
    return left.alias("left").join(cancels.alias("cancel"), is_gone, "left_anti")
