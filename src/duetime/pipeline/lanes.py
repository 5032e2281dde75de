"""The lanes query: each record waits its lane's time, then is routed again.

Records leave a lane in the order in which they came, so nothing is sorted or held in memory.
Uncommitted work of a crash is finished by `recovery`.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from duetime.core.settings import Settings
from duetime.pipeline import RECOVER
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import choose, is_foreign, message_columns, parsed
from duetime.pipeline.recovery.deduplicator import Deduplicator, scan_range_of_messages
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.columns import lane_wait_ms, now_ms, slept
from duetime.spark.kafka_io import BatchHandler, write_batch


def lane_rows(records: DataFrame, settings: Settings) -> DataFrame:
    """Return rows for the Kafka sink, of records of the lanes topic. Runs in executors."""
    return route_lane_records(wait_in_lane(parsed(records), settings), settings)


def wait_in_lane(records: DataFrame, settings: Settings) -> DataFrame:
    """Hold each `parsed` record until its lane's wait is over, or its message is due.

    A remainder shorter than the shortest lane is waited out here.
    """
    delay_lanes, due_ms = settings.delay_lanes, F.col("due_ms")
    wait_ms, step_ms = lane_wait_ms(delay_lanes, F.col("partition")), delay_lanes.step_ms(0)
    over_ms = F.unix_millis("timestamp") + wait_ms
    until_ms = F.when(due_ms < over_ms + step_ms, due_ms).otherwise(over_ms)
    # At most a lane's wait: a clock that was set back does not stall the records behind this one.
    pause_ms = F.coalesce(F.least(until_ms - now_ms(), wait_ms + step_ms), F.lit(0))
    return records.select("*", pause_ms.alias("pause_ms")).filter(slept(F.col("pause_ms")))


def route_lane_records(records: DataFrame, settings: Settings) -> DataFrame:
    """Return rows for the sink: to the destination if the message is due, else down a lane.

    The records are `parsed`.
    """
    message, router = message_columns(), Router(settings)
    is_due = message.due_ms <= F.col("now")
    timed = records.select("*", now_ms().alias("now"))
    to = choose(
        (is_foreign(), router.foreign()),
        (is_due, router.due_now(message, F.col("metadata"), F.col("error"))),
        otherwise=router.lane(message, F.col("now"), F.col("partition")),
    )
    return router.rows(router.examined(timed, message, ~is_foreign() & is_due), to)


def lane_recovery(settings: Settings, delivery_log: DeliveryLog) -> BatchHandler:
    """Return a handler that routes records again, without those whose message has left them."""
    deduplicator = Deduplicator(delivery_log)

    def handle(batch: DataFrame, _number: int) -> None:
        records = parsed(batch)
        if found := scan_range_of_messages(records):
            left = deduplicator.drop_moved_on(records, found)
            write_batch(route_lane_records(left, settings), settings, RECOVER)

    return handle
