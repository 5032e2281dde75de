"""Scheduling the rows of a DataFrame: records of the native intake topic, written by executors."""

from pyspark.sql import Column, DataFrame
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

from duetime.columns import HEADERS_TYPE, header
from duetime.config import Settings, load_settings
from duetime.envelopes import Canonical, Refusal, first_refusal
from duetime.envelopes.native import no_expiry
from duetime.errors import InvalidMessage, Reason
from duetime.message import DUE_AT_MS, DUE_EXPIRES_MS, DUE_ID, DUE_TOPIC
from duetime.outgoing import OWN_HEADERS
from duetime.pipeline.kafka import sink_options
from duetime.pipeline.refusals import refusals
from duetime.pipeline.rows import SinkRow
from duetime.reach import require_intake
from duetime.topics import TopicNames

#: The columns of a DataFrame that are taken if they are there and nothing else is said.
KEY, VALUE, HEADERS = "key", "value", "headers"

#: Where the sink of the pipeline is punctual, this one waits for company, and for longer until the
#: cluster has everything: a job that fails is run again as a whole.
MANY = {
    "kafka.linger.ms": "20",
    "kafka.batch.size": str(256 * 1024),
    "kafka.delivery.timeout.ms": "120000",
    "kafka.request.timeout.ms": "30000",
    "kafka.max.block.ms": "60000",
}


def schedule(  # noqa: PLR0913 (a column each)
    df: DataFrame,
    *,
    topic: str | Column,
    at: str | Column,
    key: str | Column | None = None,
    value: str | Column | None = None,
    headers: str | Column | None = None,
    id: str | Column | None = None,  # noqa: A002 (what all call it)
    settings: Settings | None = None,
) -> int:
    """Schedule each row for `topic` (a name, or a column of names); returns how many.

    `at` is a timestamp. `key`, `value` and `headers` are columns; those that the DataFrame calls so
    need not be named. `id` is the sender's own id; without one it is made of all the rest, so that
    the same DataFrame can be scheduled again, and rows that are alike are one message.

    Raises InvalidMessage, and nothing is sent then, where intake would reject any row: the
    DataFrame is computed twice. A job that fails on the way has sent some: run it again.
    """
    settings = settings or load_settings()
    require_intake(settings)
    asked = _asked(df, _named(df, topic, at, (key, value, headers), id))
    count = _checked(asked, settings)
    _records(asked, settings).write.format("kafka").options(
        **sink_options(settings, "bulk") | MANY
    ).mode("append").save()
    return count


def _named(
    df: DataFrame,
    topic: str | Column,
    at: str | Column,
    parts: tuple[str | Column | None, ...],
    own_id: str | Column | None,
) -> dict[str, Column]:
    """The columns that were asked for, by what they are."""
    given = dict(zip((KEY, VALUE, HEADERS), parts, strict=True))
    named = {
        name: _column(name if one is None and name in df.columns else one)
        for name, one in given.items()
    }
    address = {"topic": F.lit(topic) if isinstance(topic, str) else topic, "at": _column(at)}
    return address | named | {"id": _column(own_id)}


def _column(given: str | Column | None) -> Column:
    if given is None:
        return F.lit(None)
    return F.col(given) if isinstance(given, str) else given


def _asked(df: DataFrame, named: dict[str, Column]) -> DataFrame:
    """`asked`, as an envelope's, and `now`. Raises InvalidMessage for columns of other types."""
    parts = df.select(*(column.alias(name) for name, column in named.items()))
    for field in parts.schema:
        _check_type(field.name, field.dataType)
    sent = parts.withColumn(HEADERS, _headers(parts.schema[HEADERS].dataType))
    return sent.select(
        _canonical().struct().alias("asked"), F.unix_millis(F.current_timestamp()).alias("now")
    )


def _canonical() -> Canonical:
    due_ms = _due_ms()
    return Canonical(
        topic=F.col("topic"),
        due_ms=due_ms,
        unique=F.coalesce(F.col("id").cast("string"), _made_of_all(due_ms)),
        key=F.col(KEY).cast("binary"),
        value=F.col(VALUE).cast("binary"),
        headers=F.col(HEADERS),
        refusals=(
            Refusal(
                when=F.col("at").isNull(),
                reason=Reason.NO_DUE_TIME,
                detail="the timestamp is null",
            ),
            Refusal(
                when=F.exists(HEADERS, _is_named_wrongly),
                reason=Reason.BAD_HEADERS,
                detail="a header has no name, or one that is made from the arguments",
            ),
            # What else the native envelope refuses speaks of headers that are not taken here.
            no_expiry(_last(DUE_EXPIRES_MS)),
        ),
    )


def _is_named_wrongly(one: Column) -> Column:
    return one["key"].isNull() | one["key"].isin(*OWN_HEADERS)


def _last(name: str) -> Column:
    """The last header of this name as text, as intake reads it; null where there is none."""
    named = F.filter(HEADERS, lambda one: one["key"] == name)
    return F.get(F.reverse(named), F.lit(0))["value"].cast("string")


def _due_ms() -> Column:
    """Rounded up, so that nothing is early."""
    more = F.unix_micros("at") % 1_000 != 0
    return F.unix_millis("at") + F.when(more, 1).otherwise(0)


def _made_of_all(due_ms: Column) -> Column:
    """An id that is another for any other message."""
    whole = F.struct("topic", due_ms.alias("due"), KEY, VALUE, HEADERS)
    return F.substring(F.sha2(F.to_json(whole), 256), 1, 32)


def _headers(kind: DataType) -> Column:
    given = F.col(HEADERS)
    pairs = F.map_entries(given) if isinstance(kind, MapType) else given
    return F.coalesce(pairs.cast(HEADERS_TYPE), F.array().cast(HEADERS_TYPE))


def _check_type(name: str, kind: DataType) -> None:
    """Only text and bytes are sent, and no time is guessed. Raises InvalidMessage."""
    text = isinstance(kind, (StringType, NullType))
    payload = text or isinstance(kind, BinaryType)
    says = f"column {name} is {kind.simpleString()}: "
    if name == "at" and not isinstance(kind, TimestampType):
        raise InvalidMessage(
            Reason.BAD_DUE_TIME,
            f"{says}give a timestamp, which F.timestamp_millis makes of epoch ms",
        )
    if name in ("topic", "id") and not text:
        reason = Reason.BAD_ID if name == "id" else Reason.BAD_TOPIC
        raise InvalidMessage(reason, f"{says}give text")
    if name in (KEY, VALUE) and not payload:
        raise InvalidMessage(
            Reason.UNREADABLE, f"{says}give text or bytes, such as F.to_json makes of it"
        )
    if name == HEADERS and not _are_headers(kind):
        raise InvalidMessage(
            Reason.BAD_HEADERS, f"{says}give map<string,string>, or an array of names and values"
        )


def _are_headers(kind: DataType) -> bool:
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


def _checked(asked: DataFrame, settings: Settings) -> int:
    """How many rows there are. Raises InvalidMessage where intake would reject some."""
    native = F.lit(TopicNames(settings).native)
    refused = F.coalesce(F.col("asked.refusal"), first_refusal(refusals(settings, native)))
    judged = asked.select(refused.alias("refused")).groupBy("refused.reason", "refused.detail")
    counted = judged.count().orderBy(F.col("count").desc()).collect()
    wrong = [row for row in counted if row.reason is not None]
    if wrong:
        told = "; ".join(f"{row.reason} {row['count']:,} ({row.detail})" for row in wrong)
        raise InvalidMessage(
            Reason(wrong[0].reason), f"some rows cannot be scheduled, so none was sent: {told}"
        )
    return sum(row["count"] for row in counted)


def _records(asked: DataFrame, settings: Settings) -> DataFrame:
    """Rows for the Kafka sink: records of the native intake topic."""
    message = F.col("asked")
    own = F.array(
        header(DUE_TOPIC, message["topic"]),
        header(DUE_AT_MS, message["due_ms"]),
        header(DUE_ID, message["unique"]),
    )
    row = SinkRow(
        topic=F.lit(TopicNames(settings).native),
        partition=F.lit(None),
        key=message["key"],
        value=message["value"],
        headers=F.concat(own.cast(HEADERS_TYPE), message["headers"]),
    )
    return asked.select(*row.columns())
