"""A row on its way, as columns: what the sink takes, what waits, and what failed.

Pure columns: nothing is sent here.
"""

from dataclasses import dataclass, replace

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.columns import (
    HEADERS_TYPE,
    header,
    state_number,
    state_word,
    waiting_text,
)
from duetime.message import (
    CLUSTER_PATTERN,
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_CLUSTER,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    END,
    LAST_WORDS,
    LATEST_MS,
    TOPIC_PATTERN,
)

#: A destination's partition; a cluster has no more than some hundred thousand.
PARTITION_PATTERN = rf"^[0-9]{{1,6}}{END}"

#: How many headers `Routes.failed` puts on top: the reason and its detail.
SAID = 2

#: The columns of a Kafka sink.
SINK = {
    "topic": "string",
    "partition": "int",
    "key": "binary",
    "value": "binary",
    "headers": HEADERS_TYPE,
}


@dataclass(frozen=True, slots=True)
class SinkRow:
    """A row for the Kafka sink, as columns.

    No struct: making one and taking it apart again would copy every payload twice.
    """

    topic: Column
    partition: Column
    key: Column
    value: Column
    headers: Column

    def columns(self) -> list[Column]:
        """The columns in the types of the sink, and with its names."""
        return [getattr(self, name).cast(kind).alias(name) for name, kind in SINK.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A message on its way, as columns; `topic` is null for a cancel."""

    topic: Column
    partition: Column
    #: The name of the cluster that it is for; null is this one.
    cluster: Column
    due_ms: Column
    #: When it was taken in, epoch ms.
    taken_ms: Column
    #: After this instant it is not delivered any more, epoch ms; null is never.
    expires_ms: Column
    id: Column
    key: Column
    value: Column
    #: With WAITING_HEADERS in front.
    headers: Column
    #: How often it was tried before; null, or no column, if it was not.
    attempts: Column | None = None

    @property
    def is_cancel(self) -> Column:
        """Whether this is no message but the cancelling of one."""
        return self.topic.isNull()

    @property
    def is_whole(self) -> Column:
        """Whether the sink can take it. What someone else wrote there may be anything."""
        due = F.coalesce(self.due_ms.between(0, LATEST_MS), F.lit(False))
        topic = self.topic.rlike(TOPIC_PATTERN) & ~self.topic.isin(".", "..")
        partition = self.partition.rlike(PARTITION_PATTERN)
        cluster = self.cluster.rlike(CLUSTER_PATTERN)
        return (
            due
            & self.id.isNotNull()
            & (self.topic.isNull() | topic)
            & (self.partition.isNull() | partition)
            & (self.cluster.isNull() | cluster)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What became of a message that is not delivered any more, as columns."""

    reason: Column
    detail: Column
    #: How often it was tried.
    attempts: Column
    #: When it failed for the first and for the last time, epoch ms.
    first_ms: Column
    last_ms: Column


def waiting_record() -> Waiting:
    """A record of the wheel or of a lane; in any other, some are null."""
    headers = F.col("headers")
    state = waiting_text(headers, DUE_STATE)
    due_ms = waiting_text(headers, DUE_AT_MS).cast("bigint")
    return Waiting(
        topic=waiting_text(headers, DUE_TOPIC),
        partition=waiting_text(headers, DUE_PARTITION),
        cluster=state_word(state, "cluster"),
        due_ms=F.coalesce(state_number(state, "retry"), due_ms),
        taken_ms=state_number(state, "taken"),
        expires_ms=state_number(state, "expires"),
        id=waiting_text(headers, DUE_ID),
        key=F.col("key"),
        value=F.col("value"),
        headers=headers,
        attempts=state_number(state, "attempts"),
    )


def choose(*cases: tuple[Column, SinkRow], otherwise: SinkRow) -> SinkRow:
    """The row of the first case that holds; a condition that is null does not."""

    def chosen(name: str) -> Column:
        rows = [getattr(row, name) for _, row in cases]
        column: Column = getattr(otherwise, name)
        if all(each is column for each in rows):
            return column
        for (condition, _), each in zip(reversed(cases), reversed(rows), strict=True):
            column = F.when(condition, each).otherwise(column)
        return column

    return SinkRow(*(chosen(name) for name in SINK))


def reason() -> Column:
    """Of a record of the failed topic, why it is there."""
    return F.get("headers", F.size("headers") - SAID)["value"].cast("string")


def detail() -> Column:
    """The same as a sentence, in UTF-8."""
    return F.get("headers", F.size("headers") - SAID + 1)["value"]


def without_reason(message: Waiting) -> Waiting:
    """A record of the failed topic as it waited before."""
    own = F.greatest(F.size(message.headers) - SAID, F.lit(0))
    return replace(message, headers=F.slice(message.headers, 1, own))


def last_words(message: Waiting, at_ms: Column, failure: Failure) -> Column:
    """The headers that a dead letter has on top of the sender's own; it was due `at_ms`."""
    words = {
        DUE_TOPIC: message.topic,
        DUE_PARTITION: message.partition,
        DUE_CLUSTER: message.cluster,
        DUE_AT_MS: at_ms,
        DUE_ID: message.id,
        DUE_ERROR: failure.reason,
        DUE_ERROR_DETAIL: failure.detail,
        DUE_ATTEMPTS: failure.attempts,
        DUE_FAILED_FIRST_MS: failure.first_ms,
        DUE_FAILED_LAST_MS: failure.last_ms,
    }
    return F.array(*(header(name, words[name]) for name in LAST_WORDS))
