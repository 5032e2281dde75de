"""Redeliveries as columns. Pure: nothing is read or sent here. The rows run in executors.

A redelivery is an ordinary message: due now, or after the queue's back-off through a lane or the
wheel. It goes to the partition it came from, with its key, value and headers and an increased
count. After the last one, the message goes to the queue's dead letters.

Its id is made of its partition, offset and time, so a batch that is repeated finds what it has
written.
"""

from collections.abc import Callable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.messages import LATEST_MS
from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings
from duetime.pipeline.delivery.delivery_errors import topic_metadata
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import (
    FailureColumns,
    MessageColumns,
    SinkColumns,
    SinkRow,
    choose,
    dead_letter_headers,
)
from duetime.pipeline.redelivery.tracker import TIMED_OUT
from duetime.queue.markers import INT_BYTES, REDELIVERY_COUNT, GivenBack
from duetime.spark.columns import (
    HEADERS_TYPE,
    backoff_ms,
    message_id,
    now_ms,
    scheduled_headers,
    state_text,
)

#: The columns that identify a record, and those that are fetched.
PLACE = ["topic", "partition", "offset"]
RECORD = ["key", "value", "headers", "timestamp"]

#: Headers that a redelivery sets: those of an earlier one are removed.
REPLACED_HEADERS = (H.DUE_AT_MS, H.DUE_ID, REDELIVERY_COUNT)

DETAILS = {
    Reason.TIMED_OUT: "no delivery was acknowledged within the visibility timeout",
    Reason.NACKED: "each delivery failed or timed out",
    Reason.RECORD_DELETED: "its record was removed from the queue before it could be delivered "
    "again",
}

#: A count below this is one byte, as kmq writes it.
ONE_BYTE = 2**7


class RedeliveryColumns:
    """The two steps of a redelivery. Build it once: making its many columns takes a second."""

    def __init__(self, settings: Settings) -> None:
        self._routes = Router(settings)
        self._judged = _judged(settings)
        due_ms = F.col("asked_ms") + F.when(F.col("is_backed_off"), _wait_ms(settings)).otherwise(0)
        self._due_ms = F.least(due_ms, F.lit(LATEST_MS)).alias("due_ms")
        unique = F.concat(F.lit("@queue:"), F.concat_ws(".", *PLACE))
        self._id = message_id(F.col("due_ms"), unique).alias("id")
        message, now, metadata = _message(), F.col("now"), F.col("metadata")
        is_sent = ~F.col("is_dead") & (F.col("due_ms") <= now)
        sent_to = F.when(is_sent, message.topic)
        self._metadata = topic_metadata(settings, sent_to, message.cluster).alias("metadata")
        error = self._routes.delivery_error(message, metadata, now)
        self._error = F.when(is_sent, error).alias("error")
        dead = F.col("is_dead"), _dead_letter(message, settings)
        due_now = self._routes.due_now(message, metadata, F.col("error"))
        row = self._routes.route(message, now, rejected=dead, due_now=due_now)
        self._row = SinkColumns.of(row)
        self._row_at_once = SinkColumns.of(choose(dead, otherwise=due_now))

    def judged(self, records: DataFrame) -> DataFrame:
        """Add `count` (of redeliveries), `is_dead`, `reason`; `due_ms`, `id` of the next one."""
        timed = records.select(*self._judged).select("*", self._due_ms)
        return timed.select("*", self._id, F.lit(False).alias("is_cancel"))

    def delivered(self, judged: DataFrame, *, at_once: bool) -> DataFrame:
        """Return rows for the sink: to the queue now or later, or to its dead letters.

        `at_once` asserts that no row is delivered later: planning it takes a quarter less.
        """
        known = judged.select("*", now_ms().alias("now")).select("*", self._metadata)
        checked = known.select("*", self._error)
        return self._routes.rows(checked, self._row_at_once if at_once else self._row)


def _judged(settings: Settings) -> list[Column]:
    """Return the columns of a judged record, without the time of its redelivery."""
    cause, is_gone = F.col("cause"), F.col("timestamp").isNull()
    is_counted = cause != str(GivenBack.UNSEEN)
    count = _count(F.col("headers"))
    max_redeliveries = _by_queue(settings, lambda _, queue: queue.redeliveries)
    is_exhausted = is_counted & (count >= max_redeliveries)
    reason = (
        F.when(is_gone, str(Reason.RECORD_DELETED))
        .when(cause == TIMED_OUT, str(Reason.TIMED_OUT))
        .otherwise(str(Reason.NACKED))
    )
    return [
        *map(F.col, (*PLACE, *RECORD, "returned_ms")),
        (count + is_counted.cast("int")).alias("count"),
        (is_gone | is_exhausted).alias("is_dead"),
        reason.alias("reason"),
        # A worker that asks for a time gets it, without a back-off.
        F.col("due_ms").alias("asked_ms"),
        (~is_exhausted & cause.isin(TIMED_OUT, str(GivenBack.FAILED))).alias("is_backed_off"),
    ]


def _wait_ms(settings: Settings) -> Column:
    """Return the exponential back-off, half of which is spread by partition and offset."""
    first_ms = _by_queue(settings, lambda _, queue: queue.backoff_ms)
    max_ms = _by_queue(settings, lambda _, queue: queue.backoff_max_ms)
    return backoff_ms(F.col("count"), first_ms, max_ms, spread=[F.col(name) for name in PLACE])


def _by_queue(settings: Settings, chosen: Callable[[str, QueueSettings], str | int]) -> Column:
    """Return a setting of the row's queue."""
    found = F.lit(None)
    for name, queue in settings.queues.items():
        found = F.when(F.col("topic") == name, F.lit(chosen(name, queue))).otherwise(found)
    return found


def _message() -> MessageColumns:
    """Return the redelivery as a scheduled message."""
    due_ms = F.col("due_ms")
    values = {
        H.DUE_TOPIC: F.col("topic"),
        H.DUE_PARTITION: F.col("partition"),
        H.DUE_STATE: state_text(taken=F.col("returned_ms")),
        H.DUE_AT_MS: due_ms,
        H.DUE_ID: F.col("id"),
    }
    return MessageColumns(
        topic=F.col("topic"),
        partition=F.col("partition").cast("string"),
        cluster=F.lit(None).cast("string"),
        due_ms=due_ms,
        taken_ms=F.col("returned_ms"),
        expires_ms=F.lit(None).cast("bigint"),
        id=F.col("id"),
        key=F.col("key"),
        value=F.col("value"),
        headers=scheduled_headers(values, F.concat(_sender_headers(), F.array(_count_header()))),
    )


def _dead_letter(message: MessageColumns, settings: Settings) -> SinkRow:
    """Return the message with the headers of a dead letter on top."""
    detail = F.lit("")
    for reason, text in DETAILS.items():
        detail = F.when(F.col("reason") == str(reason), text).otherwise(detail)
    failure = FailureColumns(
        reason=F.col("reason"),
        detail=detail,
        # Equal to the count: the first delivery was no redelivery, and the next one does not come.
        attempts=F.col("count"),
        first_ms=F.col("returned_ms"),
        last_ms=F.col("returned_ms"),
    )
    headers = F.concat(_sender_headers(), dead_letter_headers(message, F.col("due_ms"), failure))
    topic = _by_queue(settings, lambda name, queue: queue.dead_topic(name))
    return SinkRow(topic, None, F.col("key"), F.col("value"), headers)


def _sender_headers() -> Column:
    headers = F.coalesce("headers", F.array().cast(HEADERS_TYPE))
    return F.filter(headers, lambda each: ~each["key"].isin(*REPLACED_HEADERS))


def _count(headers: Column) -> Column:
    """Return how often a record was delivered again: `markers.decoded_count` of its headers."""
    first = F.array_position(headers["key"], REDELIVERY_COUNT).cast("int") - 1
    value = F.get(headers["value"], first)
    number = F.conv(F.hex(F.substring(value, 1, INT_BYTES)), 16, 10).cast("bigint")
    length = F.octet_length(value)
    # As a signed number, what is not below the limit is negative, and so counts as 0.
    limit = F.when(length == 1, ONE_BYTE).when(length >= INT_BYTES, F.lit(2**31))
    return F.when(number < limit, number).otherwise(F.lit(0)).cast("bigint")


def _count_header() -> Column:
    """Return the header with the count in big-endian: `markers.decoded_count`."""
    count = F.col("count")
    digits = F.when(count < ONE_BYTE, 2).otherwise(2 * INT_BYTES)
    value = F.unhex(F.lpad(F.hex(count), digits, F.lit("0")))
    return F.struct(F.lit(REDELIVERY_COUNT).alias("key"), value.alias("value"))
