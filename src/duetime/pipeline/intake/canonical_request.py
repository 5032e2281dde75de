"""Canonical requests: what an envelope makes of a record, and whether it is valid.

An envelope is a contract of senders, a function from a raw Kafka row to one struct:

    native      headers due-topic, due-at-ms | due-in-ms, ...       any payload
    airtel      {"topic", "key"?, "value", "headers"?, "postTime"}  JSON
    countdown   {"topic", "message", "countdown"}                   JSON
    scheduler   headers scheduler-epoch, scheduler-target-topic     any payload
    control     key = id, header due-op = cancel                    none

An envelope reads the columns of Spark's Kafka source (topic, partition, offset, timestamp, key,
value, headers) and those that `with_headers` and `intake.query` add:

    by_name      map<string,binary>, the record's headers
    text         string, the value of a JSON envelope; null where it is not UTF-8
    is_schedule  boolean, the record defines a schedule

It returns a CanonicalRequest, with the reason if it cannot be read. Executors evaluate it in the
JVM, and no input raises: what cannot be read is null, and null is rejected with a reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.clock import format_duration
from duetime.core.errors import Reason
from duetime.core.messages import (
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
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames, reserved_topics
from duetime.pipeline.delivery.delivery_errors import exists
from duetime.pipeline.delivery.rows import PARTITION_PATTERN, ErrorCase, first_error
from duetime.spark.columns import (
    HEADERS_TYPE,
    due_ms_of,
    header_map,
    header_text,
    is_in_reach,
    record_bytes,
)

#: The fields of a canonical request, and their types.
REQUEST = {
    "topic": "string",
    "partition": "string",
    "cluster": "string",
    "due_ms": "bigint",
    "expires_ms": "bigint",
    "unique": "string",
    "key": "binary",
    "value": "binary",
    "headers": HEADERS_TYPE,
    "operation": "string",
    "replaces": "string",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalRequest:
    """A sender's request, whatever the envelope: the fields of REQUEST, None for null."""

    #: The destination; null for a cancel.
    topic: Column | None = None
    #: The due time, epoch ms; of a schedule, its start.
    due_ms: Column
    #: The sender's id.
    unique: Column | None = None
    key: Column | None = None
    value: Column | None = None
    #: The headers to pass on; never null.
    headers: Column
    #: The destination's partition as the sender wrote it.
    partition: Column | None = None
    #: The destination's cluster; null is this one.
    cluster: Column | None = None
    #: The instant after which it is not delivered, epoch ms; null is never.
    expires_ms: Column | None = None
    #: Null for a message, `cancel`, or an operation on a schedule.
    operation: Column | None = None
    #: The full id of the message that it replaces, as the sender wrote it.
    replaces: Column | None = None
    #: Columns that are parsed from `text`, by name. They are selected before the struct, because
    #: Spark evaluates an expression in each branch that uses it, and parsing is dear.
    parsed: Mapping[str, Column] = field(default_factory=dict)
    #: The errors that only this envelope can have, in the order of the checks.
    errors: Sequence[ErrorCase] = ()

    def struct(self) -> Column:
        """Return the request as one column, with the first of its errors as `error`."""
        fields = []
        for name, kind in REQUEST.items():
            column = getattr(self, name)
            fields.append((F.lit(None) if column is None else column).cast(kind).alias(name))
        return F.struct(*fields, first_error(self.errors).alias("error"))


def request_struct(envelopes: Mapping[str, CanonicalRequest]) -> Column:
    """struct: the request of a row of any intake topic, by the envelope of its topic."""
    # Topics that share an envelope share a branch: the code for a row stays small.
    topics: dict[int, list[str]] = {}
    for topic, envelope in envelopes.items():
        topics.setdefault(id(envelope), []).append(topic)
    structs = {id(envelope): envelope.struct() for envelope in envelopes.values()}
    chosen = F.lit(None)
    for number in reversed(topics):
        chosen = F.when(F.col("topic").isin(topics[number]), structs[number]).otherwise(chosen)
    return chosen


def value_text(envelopes: Mapping[str, CanonicalRequest]) -> Column:
    """string: the value of a record whose envelope parses it; null where it is not UTF-8."""
    parsing = [topic for topic, envelope in envelopes.items() if envelope.parsed]
    raw = F.col("value").cast("string")
    return F.when(F.col("topic").isin(*parsing) & F.is_valid_utf8(raw), raw)


def parsed_columns(envelopes: Mapping[str, CanonicalRequest]) -> list[Column]:
    """Return what envelopes parse from `text`, each for the records of its topic."""
    return [
        F.when(F.col("topic") == topic, column).alias(name)
        for topic, envelope in envelopes.items()
        for name, column in envelope.parsed.items()
    ]


def with_headers(records: DataFrame) -> DataFrame:
    """Add the column `by_name`, which `named` reads."""
    return records.select("*", header_map(record_headers()).alias("by_name"))


def record_headers() -> Column:
    """array: the record's headers; empty where there are none."""
    return F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))


def named(name: str) -> Column:
    """string: a header of the record by its name; null where it is missing."""
    return header_text(F.col("by_name"), name)


def without(headers: Column, names: Sequence[str]) -> Column:
    """array: the headers with other names than these, in order.

    A filter is interpreted. For a sender that writes these headers first, as duetime's client does,
    a slice replaces it.
    """
    count, leading, own = F.lit(0), F.lit(len(names)), F.array(*map(F.lit, names))
    for name in names:
        count = count + F.map_contains_key("by_name", name).cast("int")
    for position in reversed(range(len(names))):
        key = F.get(headers, F.lit(position))["key"]
        leading = F.when(F.array_contains(own, key), leading).otherwise(position)
    are_first = (F.size(headers) == F.size("by_name")) & (leading == count)
    return (
        F.when(F.size(headers) == 0, headers)
        .when(are_first, F.slice(headers, leading + 1, F.size(headers)))
        .otherwise(F.filter(headers, lambda one: ~F.array_contains(own, one["key"])))
    )


def repeated(*names: str) -> Column:
    """boolean: the record has more than one header of these names.

    They are counted only where some name is repeated.
    """
    headers = record_headers()
    found = F.filter(headers, lambda one: one["key"].isin(*names))
    return (F.size(headers) > F.size("by_name")) & (F.size(found) > 1)


def record_timestamp_ms() -> Column:
    """bigint: the record's timestamp, epoch ms."""
    return F.unix_millis("timestamp")


def whole_number(text: Column) -> Column:
    """bigint: a text of 1 to 18 decimal digits, which cannot overflow; else null."""
    return F.when(text.rlike(rf"^[0-9]{{1,18}}{END}"), text.cast("bigint"))


def validation_errors(settings: Settings, intake_topic: Column | None = None) -> list[ErrorCase]:
    """Return the errors of a request, in the order of the checks.

    `intake_topic` is where it came in, by default the row's `topic`.
    """
    return [
        *_destination_errors(settings),
        *_permission_errors(settings, F.col("topic") if intake_topic is None else intake_topic),
        *_due_time_errors(settings),
        *_record_errors(settings),
        _late_cancel(settings),
    ]


def _destination_errors(settings: Settings) -> list[ErrorCase]:
    topic, partition = F.col("request.topic"), F.col("request.partition")
    operation = F.col("request.operation")
    internal = is_internal(settings, topic, F.col("request.cluster"))
    return [
        ErrorCase(
            F.coalesce(operation == H.DEFINE, F.lit(True)) & topic.isNull(),
            Reason.NO_TOPIC,
            "no destination topic is named",
        ),
        ErrorCase(
            ~topic.rlike(TOPIC_PATTERN) | topic.isin(".", ".."),
            Reason.BAD_TOPIC,
            "the destination is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -",
        ),
        ErrorCase(
            internal & ~_is_probe(settings),
            Reason.INTERNAL_TOPIC,
            "the destination belongs to Kafka or duetime: choose another topic",
        ),
        ErrorCase(
            partition.isNotNull() & ~partition.rlike(PARTITION_PATTERN),
            Reason.BAD_PARTITION,
            "the partition is no whole number of 0 or more",
        ),
    ]


def is_internal(settings: Settings, topic: Column, cluster: Column) -> Column:
    """boolean: `core.messages.is_internal`, by the topic metadata of the row's cluster."""
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
        | topic.isin(*reserved_topics(settings))
        | F.coalesce(other, F.lit(False))
    )


def _is_probe(settings: Settings) -> Column:
    """boolean: the destination is that of a synthetic message, which comes in as any other."""
    topic, cluster = F.col("request.topic"), F.col("request.cluster")
    here = (topic == TopicNames(settings).warmup) & cluster.isNull()
    others = [
        (cluster == name) & (topic == each.probe_topic)
        for name, each in settings.clusters.items()
        if each.probe_topic
    ]
    return F.coalesce(reduce(or_, others, here), F.lit(False))


def _permission_errors(settings: Settings, intake_topic: Column) -> list[ErrorCase]:
    # No case without a table: Spark plans each column, and evaluates it for each row.
    if not settings.allow:
        return []
    topic, cluster = F.col("request.topic"), F.col("request.cluster")
    is_outside, names = F.lit(False), TopicNames(settings)
    # Redriven dead letters and batches of messages: the way in is another, and not the right.
    tables = settings.allow.copy()
    if names.native in tables:
        tables.setdefault(names.transactional, tables[names.native])
    for name, allowed in tables.items():
        is_allowed = fits(topic, allowed.topics) & (
            cluster.isNull() | fits(cluster, allowed.clusters)
        )
        is_outside = F.when(intake_topic == name, ~is_allowed).otherwise(is_outside)
    return [
        ErrorCase(
            is_outside & ~_is_probe(settings),
            Reason.NOT_ALLOWED,
            "what comes in by this intake topic may not go there: see allow",
        )
    ]


def fits(name: Column, patterns: Sequence[str]) -> Column:
    """boolean: `core.setting_types.fits`; null where the name is null."""
    as_regex = (each.replace(".", r"\.").replace("*", ".*").replace("?", ".") for each in patterns)
    return name.rlike(f"^({'|'.join(as_regex)}){END}") if patterns else name.isNull() & F.lit(False)


def _due_time_errors(settings: Settings) -> list[ErrorCase]:
    due_ms, wheel = F.col("request.due_ms"), settings.wheel
    # As `Wheel.check_reach`: the last level reaches furthest.
    is_in_time = is_in_reach(wheel, wheel.levels - 1, due_ms, F.col("now"))
    return [
        ErrorCase(
            due_ms.isNull() | (due_ms < 0),
            Reason.BAD_DUE_TIME,
            "the due time is no whole number in range: epoch ms, or ms from now",
        ),
        ErrorCase(
            ~is_in_time | (due_ms > LATEST_MS),
            Reason.DELAY_TOO_LONG,
            "the wheel ends before that time: due more than "
            f"{format_duration(wheel.span_ms())} from now",
        ),
    ]


def _record_errors(settings: Settings) -> list[ErrorCase]:
    request = F.col("request")
    unique, max_bytes = request["unique"], settings.largest_bytes
    size = record_bytes(request["key"], request["value"], request["headers"])
    return [
        ErrorCase(
            ~is_cancel() & unique.isNotNull() & ~unique.rlike(UNIQUE_PATTERN),
            Reason.BAD_ID,
            "due-id may have 1 to 200 letters, digits, . _ : = ~ + - (and @, but not first)",
        ),
        ErrorCase(
            size > max_bytes,
            Reason.TOO_LARGE,
            f"key, value and headers together are over {max_bytes} bytes",
        ),
    ]


def _late_cancel(settings: Settings) -> ErrorCase:
    # Below the threshold the message may be in a lane, or its release be planned: a cancel that is
    # accepted is certain to be in time.
    threshold_ms = settings.short_delay_threshold_ms
    return ErrorCase(
        is_cancel() & (F.col("request.due_ms") - F.col("now") < threshold_ms),
        Reason.TOO_LATE,
        f"due in less than {threshold_ms} ms: it is on its way, or delivered",
    )


def replacement_errors(settings: Settings, own_id: Column) -> list[ErrorCase]:
    """Return the errors of a record that replaces a message; `own_id` is its new id."""
    replaced, needed_ms = (
        F.col("request.replaces"),
        settings.short_delay_threshold_ms + REPLACING_MS,
    )
    return [
        ErrorCase(
            # The cancel would be of the new message as well, and neither would be delivered.
            replaced.isNotNull() & (replaced == own_id),
            Reason.BAD_ID,
            "due-replaces is this message's own id: give it another due-id or due time",
        ),
        ErrorCase(
            # By the record's own timestamp: an intake that reads the record again after a crash
            # decides the same, and its sender knows the decision from the acknowledgement.
            replaced_due_ms() - record_timestamp_ms() < needed_ms,
            Reason.TOO_LATE,
            f"the message in due-replaces was due within {needed_ms} ms: it stays, and this "
            "one is not taken",
        ),
    ]


def replaced_due_ms() -> Column:
    """bigint: the due time of the message that the record replaces; null for none."""
    return due_ms_of(F.col("request.replaces"))


def is_cancel() -> Column:
    """boolean: the request is a cancel, valid or not."""
    return F.coalesce(F.col("request.operation") == H.CANCEL, F.lit(False))


def is_cancel_in_time(settings: Settings) -> Column:
    """boolean: the request is a cancel, and came before its message was as good as sent."""
    came_ms = F.unix_millis("timestamp")
    return is_cancel() & (came_ms + settings.short_delay_threshold_ms <= F.col("request.due_ms"))
