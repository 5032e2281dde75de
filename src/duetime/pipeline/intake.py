"""The intake queries: every envelope's topic in, every message routed, every bad one rejected.

Real-time queries of stateless columns. What a crash leaves uncommitted is finished by `recover`.

    intake      every intake topic but one, up to its end: read_uncommitted
    intake-tx   duetime.in.tx, for senders with transactions: read_committed

A reader of committed records stops at the first open transaction of a partition, whoever opened it.
So only what is sent to that topic waits for the transactions of others.

A record that replaces a message is two rows: its own message, and the cancel of the old one.
"""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import (
    HEADERS_TYPE,
    header_map,
    message_id,
    now_ms,
    source,
    state_text,
    waiting_headers,
)
from duetime.config import Settings
from duetime.envelopes import (
    Canonical,
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
from duetime.envelopes.series import has_cron
from duetime.message import (
    CANCEL,
    DUE_AT_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
)
from duetime.pipeline.kafka import read_stream
from duetime.pipeline.refusals import (
    asks_to_cancel,
    refusals,
    refusals_of_replacement,
    replaced_due_ms,
)
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import SinkRow, Waiting
from duetime.stores.places import Place
from duetime.topics import TopicNames

#: What the queries, their producers and the directories of their offsets are called.
INTAKE, INTAKE_TX = "intake", "intake-tx"


def intake(spark: SparkSession, settings: Settings, name: str = INTAKE) -> DataFrame:
    """Rows for the Kafka sink, from the topics of one query. Runs in executors, without end."""
    return Intake(settings).rows(intake_records(spark, settings, name))


def intake_topics(settings: Settings, name: str) -> list[str]:
    """The topics that the query of this name reads."""
    names = TopicNames(settings)
    return [names.transactional] if name == INTAKE_TX else names.plain_intake


def intake_records(
    spark: SparkSession,
    settings: Settings,
    name: str,
    *,
    batch: int | None = None,
    starting: Mapping[Place, int] | None = None,
) -> DataFrame:
    """The topics of the query of this name as an endless read.

    Without a checkpoint, from where it is `starting`.
    """
    return read_stream(
        spark,
        settings,
        intake_topics(settings, name),
        batch=batch,
        committed_only=name == INTAKE_TX,
        starting=starting,
    )


def envelopes(settings: Settings) -> dict[str, tuple[str, Canonical]]:
    """For each intake topic its short name, which ids carry, and its envelope."""
    names, of_headers = TopicNames(settings), native()
    return {
        names.native: ("in", of_headers),
        names.transactional: ("in.tx", of_headers),
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
        names = {topic: name for topic, (name, _) in known.items()}
        message = _message(names, TopicNames(settings).recurring)
        own_id = message_id(F.col("asked.due_ms"), _unique(names))
        of_replacement = refusals_of_replacement(settings, own_id)
        refused = first_refusal([*refusals(settings), *of_replacement])
        self._read = header_map(record_headers()).alias("by_name"), value_text(by_topic)
        self._parsed = *parsed(by_topic), has_cron()
        self._understood = canonical(by_topic).alias("asked"), now_ms().alias("now")
        self._judged = F.coalesce(F.col("asked.refusal"), refused).alias("refused")
        self._cancels_replaced = F.explode(_rows_of_record()).alias("cancels_replaced")
        self._due_ms = _due_ms().alias("due_ms")
        self._identity = _identity(message)
        self._routes = Routes(settings)
        topic = destination(settings)
        self._known = self._routes.known(topic, message.cluster)
        self._looked_for = self._routes.looked_for(topic, message.cluster)
        is_cancel = F.col("refused").isNull() & message.is_cancel
        self._levels = self._routes.levels(is_cancel, message.due_ms, F.col("now"))
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
        """Adds `refused`, struct<reason,detail>, null for what can be taken, and `due_ms`.

        A record that replaces a message has a second row, `cancels_replaced`.
        """
        rows = asked.select("*", self._judged).select("*", self._cancels_replaced)
        return rows.select("*", self._due_ms)

    def identified(self, judged: DataFrame) -> DataFrame:
        """Adds `id`, for a refused record the place where it is, and `is_cancel`."""
        return judged.select("*", *self._identity)

    def routed(self, judged: DataFrame) -> DataFrame:
        """Rows for the sink: topic, partition, key, value, headers."""
        known = judged.select("*", self._known).where(self._looked_for)
        return self._routes.rows(known.select("*", self._levels), self._why, self._to)


def destination(settings: Settings) -> Column:
    """Where a judged message is to go; null of one that is refused."""
    return F.when(F.col("refused").isNull(), _topic(TopicNames(settings).recurring))


def _identity(message: Waiting) -> tuple[Column, Column]:
    refused = F.col("refused").isNotNull()
    name = F.when(refused, source()).otherwise(message.id)
    return name.alias("id"), (~refused & message.is_cancel).alias("is_cancel")


def _obstacle(message: Waiting, settings: Settings) -> Column:
    """Why what is due already cannot be sent."""
    obstacle = Routes(settings).obstacle(message, F.col("now"))
    return F.when(_sent(message).isNotNull(), obstacle)


def _sent(message: Waiting) -> Column:
    """The destination of what is due already and can be taken; else null."""
    return F.when(F.col("refused").isNull() & (message.due_ms <= F.col("now")), message.topic)


def _place(message: Waiting, settings: Settings) -> SinkRow:
    routes = Routes(settings)
    refused = routes.rejected(F.col("refused.reason"), F.col("refused.detail"))
    level = F.col("level")
    return routes.place(
        message,
        F.col("now"),
        (F.col("refused").isNotNull(), refused),
        (level.isNotNull(), routes.slot(message, level)),
    )


def _topic(recurring: str) -> Column:
    """Where it is to be delivered: what is said of a series, to where series are kept."""
    asked = F.when(~F.col("cancels_replaced"), F.col("asked.topic"))
    return F.when(_is_of_series(), recurring).otherwise(asked)


def _is_of_series() -> Column:
    return F.coalesce(F.col("asked.operation") != CANCEL, F.lit(False))


def _due_ms() -> Column:
    """When it is due, epoch ms: what is said of a series at once, whenever that begins."""
    own = F.when(_is_of_series(), record_timestamp_ms()).otherwise(F.col("asked.due_ms"))
    return F.when(F.col("cancels_replaced"), replaced_due_ms()).otherwise(own)


def _rows_of_record() -> Column:
    """For each row that a record becomes, whether that is the cancel of what it replaces."""
    replaces = F.col("refused").isNull() & F.col("asked.replaces").isNotNull()
    own = F.lit(False)
    return F.when(replaces, F.array(own, F.lit(True))).otherwise(F.array(own))


def of_message(name: str) -> Column:
    """What the sender said of one message; null of a series, which has it with it.

    And of the cancel of a message that is replaced, which is for no place.
    """
    return F.when(~_is_of_series() & ~F.col("cancels_replaced"), F.col("asked")[name])


def _message(short_names: Mapping[str, str], recurring: str) -> Waiting:
    asked, due_ms = F.col("asked"), F.col("due_ms")
    topic, partition = _topic(recurring), of_message("partition")
    cancels_replaced = F.col("cancels_replaced")
    # A cancel may be of a retry, which has another time than its id.
    identity = (
        F.when(cancels_replaced, asked["replaces"])
        .when(asks_to_cancel(), asked["key"].cast("string"))
        .otherwise(message_id(due_ms, _unique(short_names)))
    )
    none = F.array().cast(HEADERS_TYPE)
    values = {
        DUE_TOPIC: topic,
        DUE_PARTITION: partition,
        DUE_STATE: _state(),
        DUE_AT_MS: due_ms,
        DUE_ID: identity,
    }
    return Waiting(
        topic=topic,
        partition=partition,
        cluster=of_message("cluster"),
        due_ms=due_ms,
        taken_ms=record_timestamp_ms(),
        expires_ms=asked["expires_ms"],
        id=identity,
        key=F.when(cancels_replaced, asked["replaces"].cast("binary")).otherwise(asked["key"]),
        value=F.when(~cancels_replaced, asked["value"]),
        headers=waiting_headers(values, F.when(cancels_replaced, none).otherwise(asked["headers"])),
    )


def _state() -> Column:
    state = {"taken": record_timestamp_ms(), "expires": of_message("expires_ms")}
    cluster = of_message("cluster")
    abroad = state_text(**state, cluster=cluster)
    # Most are for this cluster, and their state stays short.
    return F.when(cluster.isNull(), state_text(**state)).otherwise(abroad)


def _unique(short_names: Mapping[str, str]) -> Column:
    """The unique part of a message's id: the sender's own, else where the record was taken in."""
    short = F.lit(None).cast("string")
    for topic, name in short_names.items():
        short = F.when(F.col("topic") == topic, F.lit(name)).otherwise(short)
    made = F.concat(F.lit("@"), F.concat_ws(".", short, "partition", "offset"))
    return F.coalesce(F.col("asked.unique"), made)
