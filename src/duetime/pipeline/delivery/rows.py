"""The columns of a row on its way: the message, the sink's row, and an error. Nothing runs here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.messages import CLUSTER_PATTERN, END, LATEST_MS, TOPIC_PATTERN
from duetime.spark.columns import (
    HEADERS_TYPE,
    header,
    scheduled_text,
    source,
    state_fields,
    state_number,
    state_word,
)

#: A destination's partition; a cluster has at most some hundred thousand.
PARTITION_PATTERN = rf"^[0-9]{{1,6}}{END}"

#: The columns of a Kafka sink.
SINK = {
    "topic": "string",
    "partition": "int",
    "key": "binary",
    "value": "binary",
    "headers": HEADERS_TYPE,
}

#: The column with the number of the chosen row.
ROW = "sink_row"

ERROR_TYPE = "struct<reason:string,detail:string>"

#: The detail of a record in one of duetime's topics that duetime did not write.
FOREIGN = "not a duetime record (unexpected headers): check which client writes to this topic"

#: Headers that `with_error` appends: the reason and its detail.
ERROR_HEADERS = 2


@dataclass(frozen=True, slots=True)
class SinkRow:
    """A row for the Kafka sink, as columns; None is null.

    Not a struct: making one and taking it apart again would copy every payload twice.
    """

    topic: Column
    partition: Column | None
    key: Column | None
    value: Column | None
    headers: Column | None

    def columns(self) -> list[Column]:
        """Return the columns in the types of the sink, and with its names."""
        return [F.lit(getattr(self, name)).cast(kind).alias(name) for name, kind in SINK.items()]


@dataclass(frozen=True, slots=True)
class Choice:
    """The row of the first case that holds; a condition that is null does not hold."""

    cases: "tuple[tuple[Column, Route], ...]"
    otherwise: "Route"


#: Where a record goes.
Route = SinkRow | Choice


def choose(*cases: tuple[Column, Route], otherwise: Route) -> Choice:
    """Return the choice between these rows."""
    return Choice(cases, otherwise)


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """The columns of a route: the chosen row's number, if there are several, and its fields."""

    chosen: tuple[Column, ...]
    fields: tuple[Column, ...]

    @classmethod
    def of(cls, to: Route) -> "SinkColumns":
        """Build them: hundreds of calls to the JVM, which a caller with many batches makes once.

        The conditions are evaluated once a record, in a column of their own: in each column of the
        row they would be generated code that is too large for the JVM's compilers.
        """
        if isinstance(to, SinkRow):
            return cls((), tuple(to.columns()))
        rows: list[SinkRow] = []
        number = _numbered(to, rows)
        row = SinkRow(*(_by_number([getattr(each, name) for each in rows]) for name in SINK))
        return cls((number.alias(ROW),), tuple(row.columns()))


def sink_rows(records: DataFrame, to: Route | SinkColumns) -> DataFrame:
    """Return the rows of records for the sink."""
    columns = to if isinstance(to, SinkColumns) else SinkColumns.of(to)
    return records.select("*", *columns.chosen).select(*columns.fields)


def _numbered(to: Route, rows: list[SinkRow]) -> Column:
    """Append the rows that may be chosen, and return the chosen one's number."""
    if isinstance(to, SinkRow):
        rows.append(to)
        return F.lit(len(rows) - 1)
    numbers = [(condition, _numbered(row, rows)) for condition, row in to.cases]
    found = _numbered(to.otherwise, rows)
    for condition, number in reversed(numbers):
        found = F.when(condition, number).otherwise(found)
    return found


def _by_number(columns: Sequence[Column | None]) -> Column:
    """Return the column whose number is in ROW; none of them twice, and null for none."""
    # Columns have no equality.
    numbers: dict[int, tuple[Column, list[int]]] = {}
    for number, column in enumerate(columns):
        if column is not None:
            numbers.setdefault(id(column), (column, []))[1].append(number)
    found = F.lit(None)
    for column, chosen in numbers.values():
        found = F.when(F.col(ROW).isin(chosen), column).otherwise(found)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageColumns:
    """A message, as columns; a cancel has no `topic`."""

    topic: Column
    #: string: the destination's partition, null for any.
    partition: Column
    #: string: the name of the destination's cluster, null for this one.
    cluster: Column
    #: bigint: epoch ms; of a message that failed, the instant of its retry.
    due_ms: Column
    #: bigint: when intake took it in, epoch ms.
    taken_ms: Column
    #: bigint: the instant after which it is not delivered, epoch ms; null is never.
    expires_ms: Column
    id: Column
    key: Column
    value: Column
    #: Begins with H.SCHEDULED.
    headers: Column
    #: bigint: the number of failed attempts, null for 0; None for a message that is certainly new.
    attempts: Column | None = None

    @property
    def is_cancel(self) -> Column:
        """boolean: the record cancels the message of its id."""
        return self.topic.isNull()


#: The columns that `parsed` adds for these fields of MessageColumns.
PARSED = {
    "topic": "due_topic",
    "partition": "due_partition",
    "cluster": "cluster",
    "due_ms": "due_ms",
    "taken_ms": "taken_ms",
    "expires_ms": "expires_ms",
    "id": "id",
    "attempts": "attempts",
}


def parsed(records: DataFrame) -> DataFrame:
    """Add PARSED, `is_whole` and `is_cancel` to scheduled records of Spark's Kafka source.

    `is_whole` (boolean): the sink can take the message. A foreign record, which may be anything,
    gets due time 0 and its position as id.

    Each column is evaluated once. Without them Spark would parse the headers wherever a field is
    used, in code that is too large for the JVM's compilers.
    """
    headers, message = F.col("headers"), message_columns()
    texts = {name: scheduled_text(headers, name) for name in H.SCHEDULED}
    texts |= {H.DUE_STATE: state_fields(headers)}
    read = records.select("*", *(each.alias(name) for name, each in texts.items()))
    known = read.select("*", *(each.alias(PARSED[field]) for field, each in _fields().items()))
    whole = known.select("*", _is_whole(message).alias("is_whole")).withColumns(
        {
            "due_ms": F.when(F.col("is_whole"), message.due_ms).otherwise(0),
            "id": F.when(F.col("is_whole"), message.id).otherwise(source()),
        }
    )
    is_cancel = (F.col("is_whole") & message.is_cancel).alias("is_cancel")
    return whole.select(*records.columns, *PARSED.values(), "is_whole", is_cancel)


def _fields() -> dict[str, Column]:
    """Return the fields of PARSED, read from columns that are named as the headers."""
    state = F.col(H.DUE_STATE)
    return {
        "topic": F.col(H.DUE_TOPIC),
        "partition": F.col(H.DUE_PARTITION),
        "cluster": state_word(state, "cluster"),
        "due_ms": F.coalesce(state_number(state, "retry"), F.col(H.DUE_AT_MS).cast("bigint")),
        "taken_ms": state_number(state, "taken"),
        "expires_ms": state_number(state, "expires"),
        "id": F.col(H.DUE_ID),
        "attempts": state_number(state, "attempts"),
    }


def _is_whole(message: MessageColumns) -> Column:
    topic = message.topic.rlike(TOPIC_PATTERN) & ~message.topic.isin(".", "..")
    return (
        F.coalesce(message.due_ms.between(0, LATEST_MS), F.lit(False))
        & message.id.isNotNull()
        & (message.topic.isNull() | topic)
        & (message.partition.isNull() | message.partition.rlike(PARTITION_PATTERN))
        & (message.cluster.isNull() | message.cluster.rlike(CLUSTER_PATTERN))
    )


def message_columns() -> MessageColumns:
    """Return the message of a `parsed` row."""
    fields = {field: F.col(name) for field, name in PARSED.items()}
    return MessageColumns(**fields, **{name: F.col(name) for name in ("key", "value", "headers")})


def is_foreign() -> Column:
    """boolean: a `parsed` row is no message, in a topic where only messages are."""
    return ~F.col("is_whole") | F.col("due_topic").isNull()


def pending_headers(message: MessageColumns, state: Column) -> MessageColumns:
    """Return a message whose `headers` are the sender's as it is scheduled, with this state."""
    values = {
        H.DUE_TOPIC: message.topic,
        H.DUE_PARTITION: message.partition,
        H.DUE_STATE: state,
        H.DUE_AT_MS: message.due_ms,
        H.DUE_ID: message.id,
    }
    scheduled = F.array(*(header(name, values[name]) for name in H.SCHEDULED))
    return replace(message, headers=F.concat(scheduled, message.headers))


class ErrorCase(NamedTuple):
    """A condition under which a row is wrong. `when` may be null, which is false."""

    when: Column
    reason: Reason | Column
    detail: str | Column


def first_error(cases: Sequence[ErrorCase]) -> Column:
    """struct<reason,detail>: the first case that holds; null where none does."""
    found = F.lit(None).cast(ERROR_TYPE)
    for case in reversed(cases):
        error = error_struct(F.lit(case.reason), F.lit(case.detail))
        found = F.when(case.when, error).otherwise(found)
    return found


def error_struct(reason: Column, detail: Column) -> Column:
    """struct<reason,detail> of two texts."""
    return F.struct(reason.alias("reason"), detail.alias("detail"))


def with_error(message: MessageColumns, error: Column) -> MessageColumns:
    """Return the message with the error in its last headers, as the retry topic has it."""
    appended = F.array(
        header(H.DUE_ERROR, error["reason"]), header(H.DUE_ERROR_DETAIL, error["detail"])
    )
    return replace(message, headers=F.concat(message.headers, appended))


def error_reason() -> Column:
    """string: the reason in a record of the retry topic."""
    return F.get("headers", F.size("headers") - ERROR_HEADERS)["value"].cast("string")


def error_detail() -> Column:
    """binary: the detail in a record of the retry topic, as UTF-8."""
    return F.get("headers", F.size("headers") - ERROR_HEADERS + 1)["value"]


def without_error(message: MessageColumns) -> MessageColumns:
    """Return a message of the retry topic without the headers of its error."""
    length = F.greatest(F.size(message.headers) - ERROR_HEADERS, F.lit(0))
    return replace(message, headers=F.slice(message.headers, 1, length))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureColumns:
    """The failure of a message that becomes a dead letter, as columns."""

    reason: Column
    detail: Column
    #: Deliveries that were tried.
    attempts: Column
    #: When it failed for the first and for the last time, epoch ms.
    first_ms: Column
    last_ms: Column


def dead_letter_headers(
    message: MessageColumns, due_at_ms: Column, failure: FailureColumns
) -> Column:
    """Return H.DEAD_LETTER, which a dead letter has after the sender's own."""
    values = {
        H.DUE_TOPIC: message.topic,
        H.DUE_PARTITION: message.partition,
        H.DUE_CLUSTER: message.cluster,
        H.DUE_AT_MS: due_at_ms,
        H.DUE_ID: message.id,
        H.DUE_ERROR: failure.reason,
        H.DUE_ERROR_DETAIL: failure.detail,
        H.DUE_ATTEMPTS: failure.attempts,
        H.DUE_FAILED_FIRST_MS: failure.first_ms,
        H.DUE_FAILED_LAST_MS: failure.last_ms,
    }
    return F.array(*(header(name, values[name]) for name in H.DEAD_LETTER))


def sender_headers(message: MessageColumns) -> Column:
    """Return the headers of a scheduled message without H.SCHEDULED."""
    return F.slice(message.headers, len(H.SCHEDULED) + 1, F.size(message.headers))
