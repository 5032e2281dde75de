"""Schedule the rows of a DataFrame, and read all pending messages as a DataFrame.

```
schedule   a DataFrame -> records of the native intake topic, written by executors
pending    the wheel's partitions, and another store's rows -> a DataFrame
session    a Spark session with Kafka's connector
```
No payload passes through the driver. The session may be the user's: nothing here depends on its
ANSI mode, its time zone, or its policy for duplicate keys of a map.
"""

import os
from contextlib import closing
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampType,
)

from duetime.core import headers as H
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import ID_PATTERN
from duetime.core.records import RESERVED_HEADERS
from duetime.core.settings import Settings, is_submitted, load_settings
from duetime.core.topics import TopicNames, internal_destinations
from duetime.kafka.connection import ensure_intake_topics
from duetime.local.jars import pipeline_jars
from duetime.pipeline.delivery.rows import ErrorCase, SinkRow, first_error
from duetime.pipeline.intake.canonical_request import CanonicalRequest, validation_errors
from duetime.pipeline.intake.envelopes import bad_expiry
from duetime.pipeline.release.job import RECORD_TYPE, RowReader
from duetime.spark.columns import HEADERS_TYPE, header, record_bytes, scheduled_text
from duetime.spark.kafka_io import read_ranges, sink_options
from duetime.spark.secrets import TaskSettings
from duetime.spark.session import spark_session
from duetime.stores.wheel_reader import WheelReader

__all__ = ["pending", "schedule", "session"]

#: Spark properties of a session that does not deliver: all cores, and adaptive shuffles.
QUERY_PROPERTIES = {
    "spark.master": "local[*]",
    "spark.default.parallelism": str(os.cpu_count() or 1),
    "spark.sql.adaptive.enabled": "true",
}

#: Kafka properties of a bulk write. It trades latency for throughput, and waits longer for the
#: cluster than the pipeline's sink: a job that fails is repeated as a whole.
BULK_OPTIONS = {
    "kafka.linger.ms": "20",
    "kafka.batch.size": str(256 * 1024),
    "kafka.delivery.timeout.ms": "120000",
    "kafka.request.timeout.ms": "30000",
    "kafka.max.block.ms": "60000",
}

#: Columns of a record in Kafka that are read.
RECORD_COLUMNS = ("key", "value", "headers", "topic", "partition", "offset")

#: Number of tasks that read another store than Kafka.
STORE_TASKS = 16

#: The columns of `pending`.
PENDING = (
    "id string, due timestamp, topic string, partition int, cluster string, key binary, "
    f"headers {HEADERS_TYPE}, size int, value binary"
)


def session(settings: Settings | None = None) -> SparkSession:
    """Return a Spark session on this machine with Kafka's connector, or that of `spark-submit`.

    Raises SetupError if Java or the connector is missing.
    """
    settings = settings or load_settings()
    properties = QUERY_PROPERTIES | settings.spark_properties
    query_settings = settings.model_copy(update={"spark_properties": properties})
    return spark_session(query_settings, [] if is_submitted() else pipeline_jars())


def schedule(  # noqa: PLR0913 (a column each)
    df: DataFrame,
    *,
    topic: str | Column,
    at: str | Column,
    key: str | Column | None = None,
    value: str | Column | None = None,
    headers: str | Column | None = None,
    id: str | Column | None = None,  # noqa: A002 (the field's word)
    settings: Settings | None = None,
) -> int:
    """Schedule a message for each row, and return the number of rows.

    The DataFrame is computed twice: if intake would reject a row, nothing is sent. A job that fails
    on the way has sent some messages: run it again.

    Parameters
    ----------
    df
        The messages. A column is given by its name, or as a Column.
    topic
        Name of the destination; or a Column of type string.
    at
        Due time: timestamp, rounded up to ms.
    key, value
        string or binary. Default: the columns `key` and `value` of `df`, if it has them.
    headers
        map<string,string>, or an array of structs of name (string) and value (string or binary).
        Default: the column `headers` of `df`, if it has one.
    id
        Idempotency key: string. Default: a hash of all other columns. So the same DataFrame can be
        scheduled again, and equal rows are one message.
    settings
        Default: the environment and duetime.toml.

    Raises
    ------
    InvalidMessage
        A column has another type, or intake would reject a row.
    KafkaError
        Kafka does not answer.

    """
    settings = settings or load_settings()
    ensure_intake_topics(settings)
    given = {"key": key, "value": value, "headers": headers}
    columns = {
        "topic": F.lit(topic) if isinstance(topic, str) else topic,
        "at": _column(at),
        "id": _column(id),
        **{
            name: _column(name if column is None and name in df.columns else column)
            for name, column in given.items()
        },
    }
    messages = _canonical_messages(df.select(*(each.alias(name) for name, each in columns.items())))
    count = _check_rows(messages, settings)
    records = messages.transform(lambda it: _intake_records(it, settings))
    options = sink_options(settings, "bulk") | BULK_OPTIONS
    records.write.format("kafka").options(**options).mode("append").save()
    return count


def pending(spark: SparkSession, settings: Settings | None = None) -> DataFrame:
    """Return all pending messages, in the wheel and in another store, as a DataFrame.

    Columns: id string, due timestamp, topic string, partition int, cluster string, key binary,
    headers array<struct<key: string, value: binary>>, size int, value binary.

    `size` is that of key, value and headers in bytes. `due` of a failed message is its next retry.
    Of the messages with one id there is one, or none if it is cancelled. Messages that are
    delivered before the DataFrame is read are missing, and so are internal ones, such as those of
    schedules.

    Raises KafkaError.
    """
    settings = settings or load_settings()
    with closing(WheelReader(settings)) as reader:
        ranges = reader.ranges()
    sources = []
    if ranges:
        records = read_ranges(spark, settings, ranges, fail_on_missing=False)
        sources.append(records.select(*RECORD_COLUMNS))
    if settings.store_kind != "kafka":
        tasks = spark.range(0, STORE_TASKS, 1, STORE_TASKS)
        read = RowReader(
            TaskSettings.of(settings), lambda rows, part: rows.all_records(part, STORE_TASKS)
        )
        sources.append(tasks.mapInArrow(read, RECORD_TYPE).select(*RECORD_COLUMNS))
    if not sources:
        return spark.createDataFrame([], PENDING)
    messages = reduce(DataFrame.unionAll, sources).transform(waiting_messages)
    return messages.where(~_is_internal(settings))


def _column(given: str | Column | None) -> Column:
    if given is None:
        return F.lit(None)
    return F.col(given) if isinstance(given, str) else given


def _canonical_messages(parts: DataFrame) -> DataFrame:
    """Return `request`, a CanonicalRequest struct, and `now`. Raises InvalidMessage for a type."""
    for field in parts.schema:
        _check_type(field.name, field.dataType)
    given = F.col("headers")
    is_map = isinstance(parts.schema["headers"].dataType, MapType)
    pairs = (F.map_entries(given) if is_map else given).cast(HEADERS_TYPE)
    headers = F.coalesce(pairs, F.array().cast(HEADERS_TYPE))
    now = F.unix_millis(F.current_timestamp())
    return parts.withColumn("headers", headers).select(
        _canonical().struct().alias("request"), now.alias("now")
    )


def _canonical() -> CanonicalRequest:
    is_rounded = F.unix_micros("at") % 1_000 != 0
    # Rounded up, so that nothing is early.
    due_ms = F.unix_millis("at") + F.when(is_rounded, 1).otherwise(0)
    whole = F.struct("topic", due_ms.alias("due"), "key", "value", "headers")
    content_hash = F.substring(F.sha2(F.to_json(whole), 256), 1, 32)
    # Intake reads the last header of a name.
    expiries = F.filter("headers", lambda each: each["key"] == H.DUE_EXPIRES_MS)
    expires = F.get(F.reverse(expiries), F.lit(0))["value"].cast("string")
    return CanonicalRequest(
        topic=F.col("topic"),
        due_ms=due_ms,
        unique=F.coalesce(F.col("id").cast("string"), content_hash),
        key=F.col("key").cast("binary"),
        value=F.col("value").cast("binary"),
        headers=F.col("headers"),
        errors=(
            ErrorCase(
                when=F.col("at").isNull(), reason=Reason.NO_DUE_TIME, detail="the timestamp is null"
            ),
            ErrorCase(
                when=F.exists(
                    "headers",
                    lambda each: each["key"].isNull() | each["key"].isin(*RESERVED_HEADERS),
                ),
                reason=Reason.BAD_HEADERS,
                detail="a header has no name, or one that is made from the arguments",
            ),
            # The other refusals of the native envelope are about headers that are refused above.
            bad_expiry(expires),
        ),
    )


def _check_type(name: str, kind: DataType) -> None:
    """Accept text and bytes, and no other form of a time. Raises InvalidMessage."""
    is_text = isinstance(kind, (StringType, NullType))
    given = f"column {name} is {kind.simpleString()}: "
    if name == "at" and not isinstance(kind, TimestampType):
        raise InvalidMessage(
            Reason.BAD_DUE_TIME,
            f"{given}give a timestamp, such as F.timestamp_millis makes of epoch ms",
        )
    if name in ("topic", "id") and not is_text:
        reason = Reason.BAD_ID if name == "id" else Reason.BAD_TOPIC
        raise InvalidMessage(reason, f"{given}give text")
    if name in ("key", "value") and not (is_text or isinstance(kind, BinaryType)):
        raise InvalidMessage(
            Reason.MALFORMED, f"{given}give text or bytes, such as F.to_json makes of it"
        )
    if name == "headers" and not _is_headers_type(kind):
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"{given}give map<string,string>, or an array of names and values"
        )


def _is_headers_type(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        pair = [kind.keyType, kind.valueType]
    elif isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType):
        pair = [each.dataType for each in kind.elementType]
    else:
        return isinstance(kind, NullType)
    return (
        len(pair) == 2
        and isinstance(pair[0], StringType)
        and isinstance(pair[1], (StringType, BinaryType))
    )


def _check_rows(messages: DataFrame, settings: Settings) -> int:
    """Return the number of rows. Raises InvalidMessage if intake would reject some."""
    native = F.lit(TopicNames(settings).native)
    refused = F.coalesce(F.col("request.error"), first_error(validation_errors(settings, native)))
    by_refusal = messages.select(refused.alias("refused")).groupBy(
        "refused.reason", "refused.detail"
    )
    counted = by_refusal.count().orderBy(F.col("count").desc()).collect()
    wrong = [row for row in counted if row.reason is not None]
    if wrong:
        texts = "; ".join(f"{row.reason} {row['count']:,} ({row.detail})" for row in wrong)
        raise InvalidMessage(
            Reason(wrong[0].reason), f"some rows cannot be scheduled, so none was sent: {texts}"
        )
    return sum(row["count"] for row in counted)


def _intake_records(messages: DataFrame, settings: Settings) -> DataFrame:
    """Return rows for the Kafka sink: records of the native intake topic."""
    message = F.col("request")
    address = F.array(
        header(H.DUE_TOPIC, message["topic"]),
        header(H.DUE_AT_MS, message["due_ms"]),
        header(H.DUE_ID, message["unique"]),
    )
    row = SinkRow(
        topic=F.lit(TopicNames(settings).native),
        partition=F.lit(None),
        key=message["key"],
        value=message["value"],
        headers=F.concat(address.cast(HEADERS_TYPE), message["headers"]),
    )
    return messages.select(*row.columns())


def waiting_messages(records: DataFrame) -> DataFrame:
    """Return the pending messages among records of the wheel, each once. See `pending`."""
    names = F.slice("headers", 1, len(H.SCHEDULED))["key"]
    is_ours = names == F.array(*map(F.lit, H.SCHEDULED))
    id_ = _waiting(H.DUE_ID)
    retry_ms, at_ms = (each.try_cast("bigint") for each in (_state("retry"), _waiting(H.DUE_AT_MS)))
    ours = records.where(is_ours & id_.rlike(ID_PATTERN)).select(
        "*", id_.alias("id"), F.coalesce(retry_ms, at_ms).alias("due_ms")
    )
    # Of one id, take a cancel if there is one, or else the first message. While a distant slot is
    # cascaded, a message is in two slots.
    is_message = _waiting(H.DUE_TOPIC).isNotNull()
    arrival = F.col("topic").desc(), "partition", "offset"
    by_id = W.partitionBy("id", "due_ms").orderBy(is_message, *arrival)
    first = ours.select("*", F.row_number().over(by_id).alias("nth")).where("nth = 1")
    headers = F.slice("headers", len(H.SCHEDULED) + 1, F.size("headers"))
    return first.where(is_message).select(
        F.col("id"),
        F.timestamp_millis("due_ms").alias("due"),
        _waiting(H.DUE_TOPIC).alias("topic"),
        _waiting(H.DUE_PARTITION).try_cast("int").alias("partition"),
        F.nullif(_state("cluster"), F.lit("")).alias("cluster"),
        F.col("key"),
        headers.alias("headers"),
        record_bytes(F.col("key"), F.col("value"), headers).alias("size"),
        F.col("value"),
    )


def _is_internal(settings: Settings) -> Column:
    cluster, topic = F.col("cluster"), F.col("topic")
    each = (
        cluster.eqNullSafe(F.lit(name)) & (topic == internal)
        for name, internal in internal_destinations(settings)
    )
    return reduce(Column.__or__, each)


def _waiting(name: str) -> Column:
    return scheduled_text(F.col("headers"), name)


def _state(name: str) -> Column:
    return F.split_part(_waiting(H.DUE_STATE), F.lit(":"), F.lit(H.STATE.index(name) + 1))
