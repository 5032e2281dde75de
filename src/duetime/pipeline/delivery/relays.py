"""Relays: the queries that route each record of a log again, of the lanes and of the outboxes.

Lanes: each record waits its lane's time, then is routed again. Records leave a lane in the order in
which they came, so nothing is sorted or held in memory.

Outboxes: each query forwards the messages for one other cluster. A message that is due goes to
`duetime.outbox.<cluster>`, as it was scheduled, and from there to its destination at once. While
that cluster does not answer its query fails and is started again; other queries are not affected.
Then `outbox_recovery` forwards the backlog in order, without the messages that were forwarded
before.

Delivery errors are found before a message gets to an outbox, by the other cluster's topic metadata.
An error that occurs later (the topic was deleted, the message expired while the cluster was away)
makes the real-time query fail, because its sink writes to one cluster only; `outbox_recovery` sends
that message to the retry topic of this one.

Uncommitted work of a crash is finished by `recovery`.
"""

import time
from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core.settings import Settings
from duetime.pipeline import RECOVER
from duetime.pipeline.delivery.delivery_errors import is_isolated, is_reached
from duetime.pipeline.delivery.destinations import TopicMetadataCache
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


def outbox_rows(records: DataFrame, settings: Settings, cluster: str) -> DataFrame:
    """Return rows for the other cluster's sink, of records of its outbox. Runs in executors.

    A row with a delivery error raises, before anything behind it is sent.
    """
    # A message that was in time when it was sent here is in time a moment later.
    message = replace(message_columns(), expires_ms=F.lit(None).cast("bigint"))
    router = Router(settings)
    checked = router.checked(parsed(records), message)
    reason = F.coalesce(F.col("error.reason"), F.lit("its topic has refused a record"))
    raised = F.raise_error(F.concat(F.lit("cannot be forwarded: "), reason)).cast("boolean")
    passed = checked.where(F.when(~_passes(), raised).otherwise(True))
    # The producer sends or gives up in the end what it holds when an outage begins. The records
    # behind must not overtake that: they are held up here.
    return _forwarded(router, passed.where(is_reached(settings.at(cluster))))


def outbox_recovery(
    settings: Settings, delivery_log: DeliveryLog, destinations: TopicMetadataCache
) -> BatchHandler:
    """Return a handler that forwards a cluster's backlog without repeats.

    `delivery_log` and `destinations` are the cluster's. Messages with an error go to the retry
    topic. While the cluster does not answer, it raises KafkaError: a topic that cannot be read back
    may take records a moment later.
    """
    deduplicator, router = Deduplicator(delivery_log), Router(settings)
    there = settings.at(delivery_log.cluster)

    def handle(batch: DataFrame, _number: int) -> None:
        records, started_s = parsed(batch), time.monotonic()
        if found := scan_range_of_messages(records):
            destinations.require_reached(started_s)
            left = deduplicator.drop_moved_on(records, found)
            # Checked once: each message goes to one of the two sinks.
            checked = router.checked(left, message_columns())
            ordered = checked.coalesce(1).sortWithinPartitions("offset").localCheckpoint()
            destinations.require_reached(started_s)
            write_batch(router.returned(ordered.where(~_passes())), settings, RECOVER)
            passed = ordered.where(_passes())
            write_batch(_forwarded(router, passed), there, RECOVER)

    return handle


def _passes() -> Column:
    return F.col("error").isNull() & ~is_isolated(F.col("metadata"))


def _forwarded(router: Router, passed: DataFrame) -> DataFrame:
    """Return rows for the other cluster."""
    return router.rows(passed, router.destination(message_columns(), F.col("metadata")))
