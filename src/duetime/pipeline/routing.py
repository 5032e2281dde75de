"""Where a message goes next, as columns: the rows that a Kafka sink takes.

Pure columns: nothing is sent here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.columns import (
    HEADERS_TYPE,
    by_level,
    delivered_headers,
    header,
    lane,
    record_bytes,
    source,
    state_number,
    state_word,
    waiting_text,
)
from duetime.config import Settings
from duetime.envelopes import Refusal, first_refusal
from duetime.errors import Reason
from duetime.message import (
    CLUSTER_PATTERN,
    DUE_AT_MS,
    DUE_CALLBACK,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_ERROR_SOURCE,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    END,
    LATEST_MS,
    TOPIC_PATTERN,
    WAITING_HEADERS,
)
from duetime.pipeline.destinations import known_of, obstacles
from duetime.pipeline.election import lease_is_held
from duetime.topics import OVERHEAD_BYTES, TopicNames

#: A destination's partition; a cluster has no more than some hundred thousand.
PARTITION_PATTERN = rf"^[0-9]{{1,6}}{END}"

#: The longest callback that is kept of a record that is too large, in bytes.
URL_BYTES = 4_096

#: How many headers `Routes.failed` puts on top: the reason and its detail.
SAID = 2

#: The column with what is known of the destination. See `Routes.known`.
KNOWN = "destination"

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


class Routes:
    """The places a message can be sent to under these settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._wheel = settings.wheel
        self._ladder = settings.ladder
        self._room = settings.max_message_bytes + OVERHEAD_BYTES

    def rows(self, records: DataFrame, why: Column, to: SinkRow) -> DataFrame:
        """Rows for the sink: each to its place, which may depend on the column `why`.

        Only while we lead: whatever was held up before this is held up here.
        """
        known = records.select("*", why.alias("why"))
        return known.where(lease_is_held(self._settings)).select(*to.columns())

    def delivered(self, message: Waiting) -> SinkRow:
        """To its destination, or on its way to another cluster."""
        outbox = F.concat(F.lit(self._names.outbox("")), message.cluster)
        return choose(
            (message.cluster.isNotNull(), _own(outbox, F.lit(None), message)),
            otherwise=self.destination(message),
        )

    def destination(self, message: Waiting) -> SinkRow:
        """To where the sender wanted it, on whatever cluster the sink is for."""
        headers = delivered_headers(message.headers)
        return SinkRow(message.topic, message.partition, message.key, message.value, headers)

    def lane(self, message: Waiting, now: Column) -> SinkRow:
        """To the longest lane that ends in time; below the shortest, to the shortest."""
        number = F.coalesce(lane(self._ladder, message.due_ms - now), F.lit(0))
        return _own(F.lit(self._names.lanes), number, message)

    def wheel(self, message: Waiting, now: Column) -> SinkRow:
        """To its slot. What no level reaches (the clock went back) waits in the last level."""

        def chosen(of_level: Callable[[int, Column], Column]) -> Column:
            return by_level(self._wheel, message.due_ms, now, of_level, or_last=True)

        topic = chosen(lambda level, _: F.lit(self._names.wheel(level)))
        return _own(topic, chosen(lambda _, partition: partition), message)

    def known(self, topic: Column, cluster: Column) -> Column:
        """The column that `obstacle` reads: to be selected once, before it. Null of no topic."""
        return known_of(self._settings, topic, cluster).alias(KNOWN)

    def obstacle(self, message: Waiting, now: Column) -> Column:
        """Why it cannot be sent now, struct<reason,detail>; null where it can."""
        unknown = Refusal(
            when=~message.cluster.isin(*self._settings.clusters),
            reason=Reason.UNKNOWN_CLUSTER,
            detail="no cluster of this name is configured: add it to clusters",
        )
        others = obstacles(
            F.col(KNOWN),
            partition=message.partition.cast("int"),
            key=message.key,
            size=record_bytes(message.key, message.value, message.headers),
            is_expired=message.expires_ms < now,
        )
        return first_refusal([unknown, *others])

    def sent(self, message: Waiting) -> SinkRow:
        """To its destination, or where the column `why` has an obstacle, to what has failed."""
        why = F.col("why")
        return choose(
            (why.isNotNull(), self.failed(message, why)), otherwise=self.delivered(message)
        )

    def failed(self, message: Waiting, why: Column) -> SinkRow:
        """To the topic of what could not be delivered: as it waited, with the reason on top."""
        said = F.array(header(DUE_ERROR, why["reason"]), header(DUE_ERROR_DETAIL, why["detail"]))
        failed = replace(message, headers=F.concat(message.headers, said))
        return _own(F.lit(self._names.failed), F.lit(None), failed)

    def dead(self, message: Waiting, last_words: Column) -> SinkRow:
        """To the dead letters: the sender's own, and what became of it on top."""
        own = F.slice(message.headers, len(WAITING_HEADERS) + 1, F.size(message.headers))
        dead = replace(message, headers=F.concat(own, last_words))
        return _own(F.lit(self._names.dead), F.lit(None), dead)

    def rejected(self, reason: Column, detail: Column) -> SinkRow:
        """The raw record, untouched, with the reason in its headers.

        A record too large for the topic is not copied; its place in the intake topic is named, and
        its callback is kept.
        """
        headers = F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))
        fits = record_bytes(F.col("key"), F.col("value"), headers) <= self._room
        key, value = (F.when(fits, F.col(name)) for name in ("key", "value"))
        said = F.array(
            header(DUE_ERROR, reason),
            header(DUE_ERROR_DETAIL, detail),
            header(DUE_ERROR_SOURCE, source()),
        )
        callback = F.filter(
            headers,
            lambda one: (one["key"] == DUE_CALLBACK) & (F.octet_length(one["value"]) < URL_BYTES),
        )
        own = F.when(fits, headers).otherwise(callback)
        kept = F.concat(own, said.cast(HEADERS_TYPE))
        return SinkRow(F.lit(self._names.rejected), F.lit(None), key, value, kept)


def _own(topic: Column, partition: Column, message: Waiting) -> SinkRow:
    """A row for one of duetime's own topics."""
    return SinkRow(topic, partition, message.key, message.value, message.headers)
