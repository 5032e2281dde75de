"""What can be wrong with a message in any envelope, as columns: they read `asked` and `now`."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.clock import format_duration
from duetime.columns import due_ms_of, record_bytes, wheel_level
from duetime.config import Settings
from duetime.envelopes import Refusal, record_timestamp_ms
from duetime.errors import Reason
from duetime.message import (
    CANCEL,
    DEFINE,
    END,
    LATEST_MS,
    LEADER,
    MARKERS,
    NAMESPACE_TOPIC,
    REPLACING_MS,
    TOPIC_PATTERN,
    UNIQUE_PATTERN,
    WHEEL,
)
from duetime.pipeline.obstacles import exists
from duetime.pipeline.rows import PARTITION_PATTERN
from duetime.topics import TopicNames, markers


def refusals(settings: Settings, came_by: Column | None = None) -> list[Refusal]:
    """All of it, in the order of the checks.

    `came_by` is the intake topic; None is the record's own.
    """
    by = F.col("topic") if came_by is None else came_by
    return [
        *_of_place(settings),
        *_not_allowed(settings, by),
        *_of_time(settings),
        *_of_record(settings),
        _of_cancel(settings),
    ]


def is_internal(settings: Settings, topic: Column, cluster: Column) -> Column:
    """`message.is_internal` as a column, by what is known of the topics of the row's cluster."""
    name = F.substring_index(topic, ".", 1)
    other = F.when(
        topic.rlike(NAMESPACE_TOPIC),
        exists(settings, F.concat(name, F.lit(LEADER)), cluster)
        & exists(settings, F.concat(name, F.lit(f"{WHEEL}0")), cluster),
    )
    return (
        topic.startswith("__")
        | topic.startswith(f"{settings.namespace}.")
        | topic.endswith(MARKERS)
        | topic.isin(*markers(settings))
        | F.coalesce(other, F.lit(False))
    )


def fits(name: Column, patterns: Sequence[str]) -> Column:
    """`tables.fits` as a column; null where the name is."""
    as_regex = (each.replace(".", r"\.").replace("*", ".*").replace("?", ".") for each in patterns)
    return name.rlike(f"^({'|'.join(as_regex)}){END}") if patterns else name.isNull() & F.lit(False)


def refusals_of_replacement(settings: Settings, own_id: Column) -> list[Refusal]:
    """What can be wrong with a record that replaces a message, and is to have the id `own_id`."""
    replaced, needed_ms = F.col("asked.replaces"), settings.horizon_ms + REPLACING_MS
    return [
        Refusal(
            # The cancel would be of the new message as well, and neither would be delivered.
            when=replaced.isNotNull() & (replaced == own_id),
            reason=Reason.BAD_ID,
            detail="due-replaces is this message's own id: give it another due-id or due time",
        ),
        Refusal(
            # By the record's own time: whoever reads the record once more, after a crash, decides
            # the same, and its sender knows what is decided from the acknowledgement.
            when=replaced_due_ms() - record_timestamp_ms() < needed_ms,
            reason=Reason.TOO_LATE,
            detail=f"the message in due-replaces was due within {needed_ms} ms: it stays, and this "
            "one is not taken",
        ),
    ]


def asks_to_cancel() -> Column:
    """Whether an understood record is a cancel, taken or refused."""
    return F.coalesce(F.col("asked.operation") == CANCEL, F.lit(False))


def _of_place(settings: Settings) -> list[Refusal]:
    topic, partition = F.col("asked.topic"), F.col("asked.partition")
    internal = is_internal(settings, topic, F.col("asked.cluster"))
    return [
        Refusal(
            when=F.coalesce(F.col("asked.operation") == DEFINE, F.lit(True)) & topic.isNull(),
            reason=Reason.NO_TOPIC,
            detail="no destination topic is named",
        ),
        Refusal(
            when=~topic.rlike(TOPIC_PATTERN) | topic.isin(".", ".."),
            reason=Reason.BAD_TOPIC,
            detail="the destination is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -",
        ),
        Refusal(
            when=internal & ~_is_probe(settings),
            reason=Reason.INTERNAL_TOPIC,
            detail="the destination belongs to Kafka or duetime: choose another topic",
        ),
        Refusal(
            when=partition.isNotNull() & ~partition.rlike(PARTITION_PATTERN),
            reason=Reason.BAD_PARTITION,
            detail="the partition is no whole number of 0 or more",
        ),
    ]


def _not_allowed(settings: Settings, came_by: Column) -> list[Refusal]:
    """Nothing where there is no table: each column is planned, and looked at for each row."""
    if not settings.allow:
        return []
    topic, cluster = F.col("asked.topic"), F.col("asked.cluster")
    outside = F.lit(False)
    for intake, allowed in settings.allow.items():
        is_here = cluster.isNull() | fits(cluster, allowed.clusters)
        outside = F.when(came_by == intake, ~(fits(topic, allowed.topics) & is_here)).otherwise(
            outside
        )
    return [
        Refusal(
            when=outside & ~_is_probe(settings),
            reason=Reason.NOT_ALLOWED,
            detail="what comes in by this intake topic may not go there: see allow",
        )
    ]


def _is_probe(settings: Settings) -> Column:
    """Whether it goes where the pipeline's own messages do, which come in as everybody's."""
    topic, cluster = F.col("asked.topic"), F.col("asked.cluster")
    here = (topic == TopicNames(settings).warmup) & cluster.isNull()
    there = [
        (cluster == name) & (topic == each.probe_topic)
        for name, each in settings.clusters.items()
        if each.probe_topic
    ]
    return F.coalesce(reduce(or_, there, here), F.lit(False))


def _of_time(settings: Settings) -> list[Refusal]:
    due_ms = F.col("asked.due_ms")
    return [
        Refusal(
            when=due_ms.isNull() | (due_ms < 0),
            reason=Reason.BAD_DUE_TIME,
            detail="the due time is no whole number in range: epoch ms, or ms from now",
        ),
        Refusal(
            when=wheel_level(settings.wheel, due_ms, F.col("now")).isNull() | (due_ms > LATEST_MS),
            reason=Reason.BEYOND_WHEEL,
            detail="the wheel ends before that time: due more than "
            f"{format_duration(settings.wheel.span_ms())} from now",
        ),
    ]


def _of_record(settings: Settings) -> list[Refusal]:
    asked = F.col("asked")
    unique = asked["unique"]
    return [
        Refusal(
            when=~asks_to_cancel() & unique.isNotNull() & ~unique.rlike(UNIQUE_PATTERN),
            reason=Reason.BAD_ID,
            detail="due-id may have 1 to 200 letters, digits, . _ : = ~ + - (and @, but not first)",
        ),
        Refusal(
            when=record_bytes(asked["key"], asked["value"], asked["headers"])
            > settings.largest_bytes,
            reason=Reason.TOO_LARGE,
            detail=f"key, value and headers together are over {settings.largest_bytes} bytes",
        ),
    ]


def _of_cancel(settings: Settings) -> Refusal:
    # Nearer than the horizon the message may be in a lane, or its window be planned: a cancel that
    # is taken is certain to be heard.
    return Refusal(
        when=asks_to_cancel() & (F.col("asked.due_ms") - F.col("now") < settings.horizon_ms),
        reason=Reason.TOO_LATE,
        detail=f"due in less than {settings.horizon_ms} ms: it is on its way, or delivered",
    )


def replaced_due_ms() -> Column:
    """When the message is due that an understood record replaces; null where there is none."""
    return due_ms_of(F.col("asked.replaces"))
