"""Where a message goes next, as columns: the rows that a Kafka sink takes.

Every function gives a struct<topic,partition,key,value,headers>. Pure columns: nothing is sent
here.
"""

from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.columns import (
    HEADERS_TYPE,
    delivered_headers,
    header,
    lane,
    record_bytes,
    source,
    state_number,
    waiting_text,
    wheel_level,
    wheel_partition,
)
from duetime.config import Settings
from duetime.message import (
    DUE_AT_MS,
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
from duetime.pipeline.destinations import obstacle
from duetime.topics import OVERHEAD_BYTES, TopicNames

#: A destination's partition; a cluster has no more than some hundred thousand.
PARTITION_PATTERN = rf"^[0-9]{{1,6}}{END}"

#: How many headers `Routes.failed` puts on top: the reason and its detail.
SAID = 2

#: The columns of a Kafka sink.
SINK = ("topic", "partition", "key", "value", "headers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A message on its way, as columns; `topic` is null for a cancel."""

    topic: Column
    partition: Column
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
        return (
            due
            & self.id.isNotNull()
            & (self.topic.isNull() | topic)
            & (self.partition.isNull() | partition)
        )


def waiting_record() -> Waiting:
    """A record of the wheel or of a lane; in any other, some are null."""
    headers = F.col("headers")
    state = waiting_text(headers, DUE_STATE)
    due_ms = waiting_text(headers, DUE_AT_MS).cast("bigint")
    return Waiting(
        topic=waiting_text(headers, DUE_TOPIC),
        partition=waiting_text(headers, DUE_PARTITION),
        due_ms=F.coalesce(state_number(state, "retry"), due_ms),
        taken_ms=state_number(state, "taken"),
        expires_ms=state_number(state, "expires"),
        id=waiting_text(headers, DUE_ID),
        key=F.col("key"),
        value=F.col("value"),
        headers=headers,
    )


def routed(records: DataFrame, why: Column, to: Column) -> DataFrame:
    """Rows for the sink: each to its place, which may depend on the column `why`."""
    return records.select("*", why.alias("why")).select(to.alias("to")).select("to.*")


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

    def destination(self, message: Waiting) -> Column:
        """To where the sender wanted it."""
        partition = message.partition.cast("int")
        return _row(message, message.topic, partition, delivered_headers(message.headers))

    def lane(self, message: Waiting, now: Column) -> Column:
        """To the longest lane that ends in time; below the shortest, to the shortest."""
        number = F.coalesce(lane(self._ladder, message.due_ms - now), F.lit(0))
        return _row(message, F.lit(self._names.lanes), number, message.headers)

    def wheel(self, message: Waiting, now: Column) -> Column:
        """To its slot. What no level reaches (the clock went back) waits in the last level."""
        level = F.coalesce(
            wheel_level(self._wheel, message.due_ms, now), F.lit(self._wheel.levels - 1)
        )
        topic = F.concat(F.lit(self._names.wheel(0)[:-1]), level.cast("string"))
        partition = wheel_partition(self._wheel, level, message.due_ms)
        return _row(message, topic, partition, message.headers)

    def obstacle(self, message: Waiting, now: Column) -> Column:
        """Why it cannot be sent now, struct<reason,detail>; null where it can."""
        return obstacle(
            self._settings,
            topic=message.topic,
            partition=message.partition.cast("int"),
            key=message.key,
            size=record_bytes(message.key, message.value, message.headers),
            is_expired=message.expires_ms < now,
        )

    def sent(self, message: Waiting) -> Column:
        """To its destination, or where the column `why` has an obstacle, to what has failed."""
        why = F.col("why")
        return F.when(why.isNotNull(), self.failed(message, why)).otherwise(
            self.destination(message)
        )

    def failed(self, message: Waiting, why: Column) -> Column:
        """To the topic of what could not be delivered: as it waited, with the reason on top."""
        said = F.array(header(DUE_ERROR, why["reason"]), header(DUE_ERROR_DETAIL, why["detail"]))
        headers = F.concat(message.headers, said)
        return _row(message, F.lit(self._names.failed), F.lit(None), headers)

    def dead(self, message: Waiting, last_words: Column) -> Column:
        """To the dead letters: the sender's own, and what became of it on top."""
        own = F.slice(message.headers, len(WAITING_HEADERS) + 1, F.size(message.headers))
        return _row(message, F.lit(self._names.dead), F.lit(None), F.concat(own, last_words))

    def rejected(self, reason: Column, detail: Column) -> Column:
        """The raw record, untouched, with the reason in its headers.

        A record too large for the topic is not copied; its place in the intake topic is named.
        """
        headers = F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))
        fits = record_bytes(F.col("key"), F.col("value"), headers) <= self._room
        said = F.array(
            header(DUE_ERROR, reason),
            header(DUE_ERROR_DETAIL, detail),
            header(DUE_ERROR_SOURCE, source()),
        )
        return F.struct(
            F.lit(self._names.rejected).alias("topic"),
            F.lit(None).cast("int").alias("partition"),
            F.when(fits, F.col("key")).alias("key"),
            F.when(fits, F.col("value")).alias("value"),
            F.when(fits, F.concat(headers, said))
            .otherwise(said)
            .cast(HEADERS_TYPE)
            .alias("headers"),
        )


def _row(message: Waiting, topic: Column, partition: Column, headers: Column) -> Column:
    return F.struct(
        topic.alias("topic"),
        partition.cast("int").alias("partition"),
        message.key.alias("key"),
        message.value.alias("value"),
        headers.cast(HEADERS_TYPE).alias("headers"),
    )
