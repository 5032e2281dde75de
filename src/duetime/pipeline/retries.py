"""The retry query: messages that could not be delivered are retried, or become dead letters.

A micro-batch query over `duetime.retry`. A retry is a scheduled message again: in a lane or in the
wheel, with the instant of the retry in its state. Times are taken from the record and not from a
clock, so a batch that is repeated makes the same retries, and slots drop one of two.
"""

from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline import RETRIES
from duetime.pipeline.delivery.destinations import TopicMetadataCache, look_up
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import (
    FailureColumns,
    MessageColumns,
    choose,
    dead_letter_headers,
    error_detail,
    error_reason,
    message_columns,
    parsed,
    without_error,
)
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.intake.canonical_request import is_cancel_in_time, with_headers
from duetime.pipeline.intake.envelopes import control
from duetime.pipeline.recovery.deduplicator import ReplayDetector, ReplayedBatch, planned_scan_range
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.catalyst import PlanCache
from duetime.spark.columns import (
    backoff_ms,
    header,
    now_ms,
    scheduled_text,
    state_fields,
    state_number,
    state_text,
)
from duetime.spark.kafka_io import BatchHandler, write_batch

#: Reasons that no retry will change.
FINAL = (Reason.EXPIRED,)


def retry_handler(
    spark: SparkSession,
    settings: Settings,
    destinations: Mapping[str | None, TopicMetadataCache],
    delivery_log: DeliveryLog,
    started_ms: int,
) -> BatchHandler:
    """Return the handler of the query's batches. It runs on the driver; its rows in executors.

    `destinations` are by cluster (None: this one); the query began at `started_ms`, epoch ms.
    """
    detector, scan_range = ReplayDetector(delivery_log, started_ms), planned_scan_range(spark)
    # While destinations are stuck there is a batch each second, and planning one takes longer.
    plan = PlanCache(spark, lambda batch: retried(parsed(batch), settings))

    def without_handled(failed: DataFrame, replay: ReplayedBatch) -> DataFrame:
        deduplicator = replay.deduplicator
        left = deduplicator.drop_moved_on(failed, replay.scan_range)
        timed = _with_retry(left, settings)
        # A retry that met its cancel in a slot: no record of it is left anywhere.
        same = F.col("record.id") == F.col("cancel.id")
        at_its_time = F.col("record.retry_ms") == F.col("cancel.due_ms")
        cancels = _cancels(replay, settings)
        kept = deduplicator.drop_cancelled(timed, cancels, same & at_its_time)
        return kept.select(*left.columns)

    def handle(batch: DataFrame, number: int) -> None:
        found = scan_range(batch)
        if found is None:
            return
        look_up(found.destinations, destinations)
        if replay := detector.check(number, lambda: found):
            rows = retried(without_handled(parsed(batch), replay), settings)
        else:
            rows = plan(batch)
        write_batch(rows, settings, RETRIES)
        reach(Point.RETRIES_SENT)

    return handle


def _cancels(replay: ReplayedBatch, settings: Settings) -> DataFrame | None:
    """Return `id` and `due_ms` of the cancels in time since the batch's first failure, or None."""
    topic, since_ms = TopicNames(settings).control, replay.scan_range.since_ms
    sent = replay.deduplicator.new_records(topic, since_ms)
    if sent is None:
        return None
    asked = with_headers(sent).select("*", control().struct().alias("request"))
    due_ms = F.col("request.due_ms")
    valid = asked.where(is_cancel_in_time(settings) & F.col("request.error").isNull())
    return valid.select(F.col("key").cast("string").alias("id"), due_ms.alias("due_ms")).distinct()


def retried(failed: DataFrame, settings: Settings) -> DataFrame:
    """Return rows for the sink: retries, dead letters, and deliveries to topics found since.

    `failed` are `parsed` records of `duetime.retry`.
    """
    routes, now, attempt = Router(settings), F.col("now"), F.col("attempt")
    message, retry_ms = message_columns(), F.col("retry_ms")
    was_unknown = F.col("reason") == str(Reason.UNKNOWN_TOPIC)
    timed = _with_retry(failed, settings).select("*", now_ms().alias("now"))
    is_found = was_unknown & F.col("error").isNull()
    expires = F.coalesce(message.expires_ms < retry_ms, F.lit(False))
    is_final = F.col("reason").isin([str(each) for each in FINAL])
    is_over = is_final | expires | (attempt >= F.col("max_attempts"))
    retry = replace(_with_attempt(message, retry_ms), due_ms=retry_ms)
    is_soon = retry_ms - now < settings.short_delay_threshold_ms
    row = choose(
        (~F.col("is_whole"), routes.foreign()),
        # With this attempt in its state, so that in an outbox it is further than before.
        (
            is_found,
            routes.delivered(_with_attempt(message, F.col("last_retry_ms")), F.col("metadata")),
        ),
        (is_over, routes.dead_letter(without_error(message), _dead_letter_headers(message))),
        (is_soon, routes.lane(retry, now)),
        otherwise=routes.store(retry, now),
    )
    return routes.rows(routes.examined(timed, message, was_unknown), row)


def _with_retry(failed: DataFrame, settings: Settings) -> DataFrame:
    """Add the columns of `_failure` and `_retry`."""
    return failed.select("*", *_failure()).select("*", *_retry(settings))


def _failure() -> list[Column]:
    """Return reason, attempt (its number), and in epoch ms first_ms, last_ms, last_retry_ms.

    The last is null after the first attempt.
    """
    state, last_ms = state_fields(F.col("headers")), F.unix_millis("timestamp")
    return [
        error_reason().alias("reason"),
        (F.coalesce(F.col("attempts"), F.lit(0)) + 1).alias("attempt"),
        F.coalesce(state_number(state, "failed"), last_ms).alias("first_ms"),
        last_ms.alias("last_ms"),
        state_number(state, "retry").alias("last_retry_ms"),
    ]


def _retry(settings: Settings) -> list[Column]:
    """Return max_attempts, and retry_ms: exponential back-off, half of it spread by the id."""
    message = message_columns()

    def policy(name: str, default: int) -> Column:
        """Return the value in `retry_topics` for the destination, or the default."""
        chosen = F.lit(default)
        for topic, each in settings.retry_topics.items():
            value = getattr(each, name)
            if value is not None:
                chosen = F.when(message.topic == topic, F.lit(value)).otherwise(chosen)
        return chosen

    attempt, max_ms = F.col("attempt"), F.lit(settings.retry_backoff_max_ms)
    first_ms = policy("backoff_ms", settings.retry_backoff_ms)
    wait_ms = backoff_ms(attempt, first_ms, max_ms, spread=[message.id, attempt])
    return [
        policy("attempts", settings.max_delivery_attempts).alias("max_attempts"),
        (F.col("last_ms") + wait_ms).alias("retry_ms"),
    ]


def _with_attempt(message: MessageColumns, retry_ms: Column) -> MessageColumns:
    """Return the message with this attempt, and the instant of its retry, in its state."""
    state = state_text(
        taken=message.taken_ms,
        expires=message.expires_ms,
        retry=retry_ms,
        attempts=F.col("attempt"),
        failed=F.col("first_ms"),
        cluster=message.cluster,
    )
    at = H.SCHEDULED.index(H.DUE_STATE)
    headers = without_error(message).headers
    before, after = F.slice(headers, 1, at), F.slice(headers, at + 2, F.size(headers))
    return replace(message, headers=F.concat(before, F.array(header(H.DUE_STATE, state)), after))


def _dead_letter_headers(message: MessageColumns) -> Column:
    failure = FailureColumns(
        reason=F.col("reason"),
        detail=error_detail(),
        attempts=F.col("attempt"),
        first_ms=F.col("first_ms"),
        last_ms=F.col("last_ms"),
    )
    return dead_letter_headers(message, scheduled_text(message.headers, H.DUE_AT_MS), failure)
