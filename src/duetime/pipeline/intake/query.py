"""The intake queries: they parse, validate, identify and route the records of every intake topic.

    intake      every intake topic but one, up to its end: read_uncommitted
    intake-tx   duetime.in.tx, for senders with transactions: read_committed

A reader of committed records stops at the first open transaction of a partition, of any sender.
So only records of that topic wait for the transactions of others.

Both are real-time queries of stateless columns. Uncommitted work of a crash is finished by
`recovery`. Each step of `Intake` adds columns to those of Kafka's source:

    parse       request           struct, `CanonicalRequest`
                now               bigint, the clock as the row is read, epoch ms
    validate    error             struct<reason,detail>, null for a valid record
    identify    cancels_replaced  boolean, see below
                due_ms            bigint, epoch ms
                destination       string, null for a cancel and for an invalid record
                cluster           string, null for this one
                is_cancel         boolean
                id                string, of an invalid record its position
    route       metadata          array<string>, the topic metadata of the destination
                level             int, the level of the timer wheel
                delivery_error    struct<reason,detail>, null unless it is due and cannot be sent

A record that replaces a message becomes two rows: its message, and the cancel of the old one, which
has `cancels_replaced`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline import RECOVER
from duetime.pipeline.delivery.delivery_errors import request_metadata, topic_metadata
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import MessageColumns, SinkColumns, first_error, pending_headers
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.intake.canonical_request import (
    CanonicalRequest,
    is_cancel,
    is_cancel_in_time,
    parsed_columns,
    record_timestamp_ms,
    replaced_due_ms,
    replacement_errors,
    request_struct,
    validation_errors,
    value_text,
    with_headers,
)
from duetime.pipeline.intake.envelopes import (
    airtel,
    control,
    countdown,
    has_cron,
    native,
    scheduler,
)
from duetime.pipeline.recovery.deduplicator import SENDERS_CLOCK_MS, Deduplicator, scan_range
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.catalyst import PlanCache, as_single_read
from duetime.spark.columns import HEADERS_TYPE, message_id, now_ms, source, state_text
from duetime.spark.kafka_io import BatchHandler, write_batch


class Intake:
    """The steps of the queries, from records of intake topics to rows for the Kafka sink.

    The columns are built once, which takes seconds: there are many.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._router = Router(settings)
        names, of_headers = TopicNames(settings), native()
        # By intake topic: its short name in generated ids, and its envelope.
        envelopes = {
            names.native: ("in", of_headers),
            names.transactional: ("in.tx", of_headers),
            names.control: ("control", control()),
            names.airtel: ("airtel", airtel()),
            names.countdown: ("countdown", countdown()),
            names.scheduler: ("scheduler", scheduler()),
        }
        self._unique = _unique({topic: short for topic, (short, _) in envelopes.items()})
        self._parse_columns({topic: envelope for topic, (_, envelope) in envelopes.items()})
        self._validate_columns()
        self._identify_columns()
        self._route_columns()

    def rows(self, records: DataFrame) -> DataFrame:
        """Return rows for the Kafka sink: topic, partition, key, value, headers."""
        return self.route(self.requests(records))

    def requests(self, records: DataFrame) -> DataFrame:
        """Return the requests of the records, with an error or an id."""
        return reduce(DataFrame.transform, (self.parse, self.validate, self.identify), records)

    def parse(self, records: DataFrame) -> DataFrame:
        """Add `request`, by the envelope of the record's topic, and `now`."""
        read = with_headers(records).select("*", self._text).select("*", *self._fields)
        return read.select(*records.columns, *self._request)

    def _parse_columns(self, envelopes: Mapping[str, CanonicalRequest]) -> None:
        self._text = value_text(envelopes).alias("text")
        self._fields = *parsed_columns(envelopes), has_cron().alias("is_schedule")
        self._request = request_struct(envelopes).alias("request"), now_ms().alias("now")

    def validate(self, parsed: DataFrame) -> DataFrame:
        """Add `error`."""
        return parsed.select("*", self._error)

    def _validate_columns(self) -> None:
        own_id = message_id(F.col("request.due_ms"), self._unique)
        replacement = replacement_errors(self._settings, own_id)
        error = first_error([*validation_errors(self._settings), *replacement])
        self._error = F.coalesce(F.col("request.error"), error).alias("error")

    def identify(self, validated: DataFrame) -> DataFrame:
        """Add `cancels_replaced`, with a row for each of its values, and the message's address."""
        rows = validated.select("*", self._cancels_replaced)
        return rows.select("*", *self._address).select("*", *self._identity)

    def _identify_columns(self) -> None:
        request, cancels_replaced = F.col("request"), F.col("cancels_replaced")
        is_valid, message = F.col("error").isNull(), F.array(F.lit(False))
        both = F.array(F.lit(False), F.lit(True))
        rows = F.when(is_valid & request["replaces"].isNotNull(), both).otherwise(message)
        self._cancels_replaced = F.explode(rows).alias("cancels_replaced")
        # A request about a schedule is a message to the schedules query, due at once.
        due_ms = F.when(_is_of_schedule(), record_timestamp_ms()).otherwise(request["due_ms"])
        topic = F.when(_is_of_schedule(), TopicNames(self._settings).schedule_commands).otherwise(
            F.when(~cancels_replaced, request["topic"])
        )
        self._address = (
            F.when(cancels_replaced, replaced_due_ms()).otherwise(due_ms).alias("due_ms"),
            F.when(is_valid, topic).alias("destination"),
            _of_message("cluster").alias("cluster"),
        )
        # A cancel may be of a retry, whose time is another than its id's.
        identity = (
            F.when(~is_valid, source())
            .when(cancels_replaced, request["replaces"])
            .when(is_cancel(), request["key"].cast("string"))
            .otherwise(message_id(F.col("due_ms"), self._unique))
        )
        is_cancelling = is_valid & F.col("destination").isNull()
        self._identity = is_cancelling.alias("is_cancel"), identity.alias("id")

    def route(self, identified: DataFrame) -> DataFrame:
        """Return a row for the sink for each place that a message goes to."""
        known = identified.select("*", self._metadata).where(self._request_metadata)
        placed = known.select("*", self._lowest_level).select("*", self._level, *self._written)
        return self._router.rows(placed.select("*", self._delivery_error), self._sink_columns)

    def _route_columns(self) -> None:
        settings, router, now = self._settings, self._router, F.col("now")
        # Each is evaluated once, and not in every row that it may become.
        fields = {name: f"written_{name}" for name in ("partition", "key", "value", "headers")}
        written = _message()
        self._written = [getattr(written, field).alias(name) for field, name in fields.items()]
        message = replace(written, **{field: F.col(name) for field, name in fields.items()})
        error, delivery_error = F.col("error"), F.col("delivery_error")
        self._metadata = topic_metadata(settings, message.topic, message.cluster).alias("metadata")
        self._request_metadata = request_metadata(
            settings, F.col("metadata"), message.topic, message.cluster
        )
        self._lowest_level = router.level(message.due_ms, now).alias("lowest_level")
        levels = router.levels(F.col("is_cancel"), message.due_ms, now, F.col("lowest_level"))
        self._level = F.explode(levels).alias("level")
        is_due = error.isNull() & ~message.is_cancel & (message.due_ms <= now)
        found = router.delivery_error(message, F.col("metadata"), now)
        self._delivery_error = F.when(is_due, found).alias("delivery_error")
        route = router.route(
            message,
            now,
            level=F.col("level"),
            rejected=(error.isNotNull(), router.rejected(error["reason"], error["detail"])),
            due_now=router.due_now(message, F.col("metadata"), delivery_error),
        )
        self._sink_columns = SinkColumns.of(route)


def _is_of_schedule() -> Column:
    """boolean: the request defines a schedule, or pauses, resumes or stops one."""
    return F.coalesce(F.col("request.operation") != H.CANCEL, F.lit(False))


def _of_message(name: str) -> Column:
    """Return a field of the request; null for a schedule, whose headers hold it, and a cancel."""
    return F.when(~_is_of_schedule() & ~F.col("cancels_replaced"), F.col("request")[name])


def _message() -> MessageColumns:
    """Return the message of an identified row."""
    request, cancels_replaced = F.col("request"), F.col("cancels_replaced")
    cluster = F.col("cluster")
    state = {"taken": record_timestamp_ms(), "expires": _of_message("expires_ms")}
    # Most are for this cluster, and their state stays short.
    with_cluster = F.when(cluster.isNull(), state_text(**state)).otherwise(
        state_text(**state, cluster=cluster)
    )
    none = F.array().cast(HEADERS_TYPE)
    sender = F.when(cancels_replaced, none).otherwise(request["headers"])
    key = F.when(cancels_replaced, request["replaces"].cast("binary")).otherwise(request["key"])
    message = MessageColumns(
        topic=F.col("destination"),
        partition=_of_message("partition"),
        cluster=cluster,
        due_ms=F.col("due_ms"),
        taken_ms=record_timestamp_ms(),
        expires_ms=request["expires_ms"],
        id=F.col("id"),
        key=key,
        value=F.when(~cancels_replaced, request["value"]),
        headers=sender,
    )
    return pending_headers(message, with_cluster)


def _unique(short_names: Mapping[str, str]) -> Column:
    """string: the unique part of an id: the sender's, else made of the record's position."""
    short = F.lit(None).cast("string")
    for topic, name in short_names.items():
        short = F.when(F.col("topic") == topic, F.lit(name)).otherwise(short)
    made = F.concat(F.lit("@"), F.concat_ws(".", short, "partition", "offset"))
    return F.coalesce(F.col("request.unique"), made)


def intake_recovery(
    spark: SparkSession, settings: Settings, delivery_log: DeliveryLog, intake: Intake
) -> BatchHandler:
    """Return a handler that ingests records, without those that were ingested before."""
    deduplicator = Deduplicator(delivery_log)
    requests, routed = PlanCache(spark, intake.requests), PlanCache(spark, intake.route)

    def handle(batch: DataFrame, _number: int) -> None:
        # Read and parsed once; several jobs over it follow.
        asked = requests(batch).localCheckpoint()
        found = scan_range(asked, F.col("destination"), F.col("cluster"))
        if found is None:
            return
        # All cancels so far: a message may be in an earlier batch than its cancel.
        cancels = cancelled_ids(deduplicator, settings, requests, found.since_ms)
        left = deduplicator.drop_ingested(asked.transform(first_of_each_id), found)
        # Reading back takes a while.
        left = left.withColumn("now", now_ms())
        # Those meet their cancel in no slot, because they are due.
        near_ms = F.col("record.now") + settings.short_delay_threshold_ms
        is_near = ~F.col("record.is_cancel") & (F.col("record.request.due_ms") <= near_ms)
        is_cancelled = (F.col("record.id") == F.col("cancel.id")) & is_near
        left = deduplicator.drop_cancelled(left, cancels, is_cancelled)
        write_batch(routed(as_single_read(spark, left)), settings, RECOVER)
        reach(Point.RECOVER_SENT)

    return handle


def cancelled_ids(
    deduplicator: Deduplicator,
    settings: Settings,
    requests: Callable[[DataFrame], DataFrame],
    since_ms: int,
) -> DataFrame | None:
    """Return the new `id` of each message that was cancelled or replaced in time, or None.

    By now, these cancels are refused as too late. `requests` is that of `Intake`, planned before.
    """
    names = TopicNames(settings)
    # A cancel may have come before its message, and be handled: its partition is further.
    earlier_ms = {names.control: SENDERS_CLOCK_MS, names.native: 0, names.transactional: 0}
    found = [deduplicator.new_records(topic, since_ms, ms) for topic, ms in earlier_ms.items()]
    sent = [records for records in found if records is not None]
    if not sent:
        return None
    # Most messages replace none, and are not worth parsing.
    replacing = F.array_contains("headers.key", H.DUE_REPLACES)
    cancelling = reduce(DataFrame.union, sent).where((F.col("topic") == names.control) | replacing)
    asked = requests(as_single_read(cancelling.sparkSession, cancelling))
    return asked.select(_cancelled_id(settings).alias("id")).where("id is not null").distinct()


def _cancelled_id(settings: Settings) -> Column:
    """string: the id that a row of `Intake.requests` cancels or replaces, if it came in time."""
    due_ms, identity = F.col("request.due_ms"), F.col("request.key").cast("string")
    # The cancel of a retry, which has another instant than the id, is of none that is ingested.
    is_first = identity == message_id(due_ms, F.col("request.unique"))
    # The time of the record alone decides whether it replaces a message.
    replaced = F.when(F.col("cancels_replaced"), F.col("request.replaces"))
    return replaced.when(is_cancel_in_time(settings) & is_first, identity)


def first_of_each_id(asked: DataFrame) -> DataFrame:
    """Keep the first message of each id, as if they had met in a slot, and all its cancels.

    Some were far from due when they came, and are sent now without being in a slot. Cancels of a
    message and of its retries have one id, and go to a slot each.
    """
    id_and_time = "id", "is_cancel", "due_ms"
    same = W.partitionBy(*id_and_time).orderBy("timestamp", "topic", "partition", "offset")
    return asked.select("*", F.row_number().over(same).alias("nth")).where("nth = 1").drop("nth")
