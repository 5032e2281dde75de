"""The intake query: every envelope's topic in, every message routed, every bad one rejected.

A real-time query of stateless columns. What a crash leaves uncommitted is finished by `recover`.
"""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.clock import format_duration
from duetime.columns import (
    header_map,
    message_id,
    now_ms,
    record_bytes,
    source,
    state_text,
    waiting_headers,
    wheel_level,
)
from duetime.config import Settings
from duetime.envelopes import (
    Canonical,
    Refusal,
    canonical,
    first_refusal,
    parsed,
    record_headers,
    record_timestamp_ms,
    value_text,
)
from duetime.envelopes.airtel import airtel
from duetime.envelopes.control import control
from duetime.envelopes.countdown import countdown
from duetime.envelopes.native import native
from duetime.envelopes.scheduler import scheduler
from duetime.errors import Reason
from duetime.message import (
    CANCEL,
    DUE_AT_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    LATEST_MS,
    TOPIC_PATTERN,
    UNIQUE_PATTERN,
)
from duetime.pipeline.kafka import read_stream
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import PARTITION_PATTERN, SinkRow, Waiting, choose
from duetime.topics import TopicNames


def intake(spark: SparkSession, settings: Settings) -> DataFrame:
    """Rows for the Kafka sink, from all intake topics. Runs in executors, without end."""
    return Intake(settings).rows(intake_records(spark, settings))


def intake_records(
    spark: SparkSession, settings: Settings, *, in_batches: bool = False
) -> DataFrame:
    """All intake topics as an endless read."""
    topics = TopicNames(settings).intake
    return read_stream(spark, settings, topics, in_batches=in_batches, committed_only=True)


def envelopes(settings: Settings) -> dict[str, tuple[str, Canonical]]:
    """For each intake topic its short name, which ids carry, and its envelope."""
    names = TopicNames(settings)
    return {
        names.native: ("in", native()),
        names.control: ("control", control()),
        names.airtel: ("airtel", airtel()),
        names.countdown: ("countdown", countdown()),
        names.scheduler: ("scheduler", scheduler()),
    }


class Intake:
    """The steps of the query. The columns are built once, which takes seconds: there are many."""

    def __init__(self, settings: Settings) -> None:
        known = envelopes(settings)
        by_topic = {topic: envelope for topic, (_, envelope) in known.items()}
        message = _message({topic: name for topic, (name, _) in known.items()})
        refused = F.coalesce(F.col("asked.refusal"), first_refusal(refusals(settings)))
        self._read = header_map(record_headers()).alias("by_name"), value_text(by_topic)
        self._parsed = parsed(by_topic)
        self._understood = canonical(by_topic).alias("asked"), now_ms().alias("now")
        self._refused = refused.alias("refused")
        self._identity = _identity(message)
        self._routes = Routes(settings)
        topic = F.when(F.col("refused").isNull(), message.topic)
        self._known = self._routes.known(topic, message.cluster)
        self._looked_for = self._routes.looked_for(topic, message.cluster)
        self._why = _obstacle(message, settings)
        self._to = _place(message, settings)

    def rows(self, records: DataFrame) -> DataFrame:
        """Rows for the Kafka sink."""
        return records.transform(self.understood).transform(self.judged).transform(self.routed)

    def understood(self, records: DataFrame) -> DataFrame:
        """Adds `asked`, the envelope's canonical struct, and `now`, the clock as of this row."""
        read = records.select("*", *self._read).select("*", *self._parsed)
        return read.select("*", *self._understood)

    def judged(self, asked: DataFrame) -> DataFrame:
        """Adds `refused`, struct<reason,detail>, null for what can be taken."""
        return asked.select("*", self._refused)

    def identified(self, judged: DataFrame) -> DataFrame:
        """Adds `id`, for a refused record the place where it is, and `is_cancel`."""
        return judged.select("*", *self._identity)

    def routed(self, judged: DataFrame) -> DataFrame:
        """Rows for the sink: topic, partition, key, value, headers."""
        known = judged.select("*", self._known).where(self._looked_for)
        return self._routes.rows(known, self._why, self._to)


def _identity(message: Waiting) -> tuple[Column, Column]:
    refused = F.col("refused").isNotNull()
    name = F.when(refused, source()).otherwise(message.id)
    return name.alias("id"), (~refused & asks_to_cancel()).alias("is_cancel")


def asks_to_cancel() -> Column:
    """Whether an understood record is a cancel, taken or refused."""
    return F.coalesce(F.col("asked.operation") == CANCEL, F.lit(False))


def _obstacle(message: Waiting, settings: Settings) -> Column:
    """Why what is due already cannot be sent."""
    obstacle = Routes(settings).obstacle(message, F.col("now"))
    return F.when(_sent(message).isNotNull(), obstacle)


def _sent(message: Waiting) -> Column:
    """The destination of what is due already and can be taken; else null."""
    return F.when(F.col("refused").isNull() & (message.due_ms <= F.col("now")), message.topic)


def _place(message: Waiting, settings: Settings) -> SinkRow:
    now, routes = F.col("now"), Routes(settings)
    remaining = message.due_ms - now
    soon = ~message.is_cancel & (remaining < settings.horizon_ms)
    refused = routes.rejected(F.col("refused.reason"), F.col("refused.detail"))
    return choose(
        (F.col("refused").isNotNull(), refused),
        (remaining <= 0, routes.sent(message)),
        (soon, routes.lane(message, now)),
        otherwise=routes.store(message, now),
    )


def _message(short_names: Mapping[str, str]) -> Waiting:
    asked = F.col("asked")
    unique = F.coalesce(asked["unique"], _made_unique(short_names))
    identity = message_id(asked["due_ms"], unique)
    values = {
        DUE_TOPIC: asked["topic"],
        DUE_PARTITION: asked["partition"],
        DUE_STATE: _state(asked),
        DUE_AT_MS: asked["due_ms"],
        DUE_ID: identity,
    }
    return Waiting(
        topic=asked["topic"],
        partition=asked["partition"],
        cluster=asked["cluster"],
        due_ms=asked["due_ms"],
        taken_ms=record_timestamp_ms(),
        expires_ms=asked["expires_ms"],
        id=identity,
        key=asked["key"],
        value=asked["value"],
        headers=waiting_headers(values, asked["headers"]),
    )


def _state(asked: Column) -> Column:
    state = {"taken": record_timestamp_ms(), "expires": asked["expires_ms"]}
    abroad = state_text(**state, cluster=asked["cluster"])
    # Most are for this cluster, and their state stays short.
    return F.when(asked["cluster"].isNull(), state_text(**state)).otherwise(abroad)


def _made_unique(short_names: Mapping[str, str]) -> Column:
    """The unique part of an id for a sender that gave none: where the record was taken in."""
    short = F.lit(None).cast("string")
    for topic, name in short_names.items():
        short = F.when(F.col("topic") == topic, F.lit(name)).otherwise(short)
    return F.concat(F.lit("@"), F.concat_ws(".", short, "partition", "offset"))


def refusals(settings: Settings) -> list[Refusal]:
    """What is wrong in any envelope, in the order of the checks. Reads `asked` and `now`."""
    asked, now = F.col("asked"), F.col("now")
    topic, due_ms, unique = asked["topic"], asked["due_ms"], asked["unique"]
    is_cancel = asks_to_cancel()
    size = record_bytes(asked["key"], asked["value"], asked["headers"])
    internal = topic.startswith(f"{settings.namespace}.") | topic.startswith("__")
    warming = topic == TopicNames(settings).warmup
    return [
        Refusal(
            when=~is_cancel & topic.isNull(),
            reason=Reason.NO_TOPIC,
            detail="no destination topic is named",
        ),
        Refusal(
            when=~topic.rlike(TOPIC_PATTERN) | topic.isin(".", ".."),
            reason=Reason.BAD_TOPIC,
            detail="the destination is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -",
        ),
        Refusal(
            when=internal & ~warming,
            reason=Reason.INTERNAL_TOPIC,
            detail="the destination belongs to Kafka or duetime: choose another topic",
        ),
        Refusal(
            when=asked["partition"].isNotNull() & ~asked["partition"].rlike(PARTITION_PATTERN),
            reason=Reason.BAD_PARTITION,
            detail="the partition is no whole number of 0 or more",
        ),
        Refusal(
            when=due_ms.isNull() | (due_ms < 0),
            reason=Reason.BAD_DUE_TIME,
            detail="the due time is no whole number in range: epoch ms, or ms from now",
        ),
        Refusal(
            when=wheel_level(settings.wheel, due_ms, now).isNull() | (due_ms > LATEST_MS),
            reason=Reason.BEYOND_WHEEL,
            detail="the wheel ends before that time: due more than "
            f"{format_duration(settings.wheel.span_ms())} from now",
        ),
        Refusal(
            when=~is_cancel & unique.isNotNull() & ~unique.rlike(UNIQUE_PATTERN),
            reason=Reason.BAD_ID,
            detail="due-id may have 1 to 200 letters, digits, . _ : = ~ + - (and @, but not first)",
        ),
        Refusal(
            when=size > settings.largest_bytes,
            reason=Reason.TOO_LARGE,
            detail=f"key, value and headers together are over {settings.largest_bytes} bytes",
        ),
        Refusal(
            # Nearer than the horizon the message may be in a lane, or its window be planned: a
            # cancel that is taken is certain to be heard.
            when=is_cancel & (due_ms - now < settings.horizon_ms),
            reason=Reason.TOO_LATE,
            detail=f"due in less than {settings.horizon_ms} ms: it is on its way, or delivered",
        ),
    ]
