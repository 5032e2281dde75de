"""The contracts that messages come in, each a function from a raw Kafka row to canonical columns.

    native      headers due-topic, due-at-ms | due-in-ms, ...       any payload
    airtel      {"topic", "key"?, "value", "headers"?, "postTime"}  JSON
    countdown   {"topic", "message", "countdown"}                   JSON
    scheduler   headers scheduler-epoch, scheduler-target-topic     any payload
    control     key = id, header due-op = cancel

An envelope reads the columns of Spark's Kafka source (topic, partition, offset, timestamp, key,
value, headers), `by_name`, the headers as a map, and where it parses, `text`, the value as text. It
says what the sender asked for, or why it cannot be read. Everything runs in executors, in the JVM,
and no input raises: what cannot be read is null, and null is refused with a reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.columns import HEADERS_TYPE, header_text
from duetime.errors import Reason
from duetime.message import END


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A condition under which a record is refused. `when` may be null, which is false."""

    when: Column
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """What a sender asked for, whatever the envelope. Types are Spark's."""

    #: string: the destination; null for a cancel.
    topic: Column
    #: bigint: the instant it is due, epoch ms; of a series, when it begins.
    due_ms: Column
    #: string: the sender's own id; null where there is none.
    unique: Column
    #: binary, null allowed.
    key: Column
    #: binary, null allowed.
    value: Column
    #: array<struct<key:string,value:binary>>: the headers to pass on; never null.
    headers: Column
    #: string: the destination's partition as the sender wrote it.
    partition: Column = field(default_factory=lambda: F.lit(None).cast("string"))
    #: string: the cluster that it is for; null is this one.
    cluster: Column = field(default_factory=lambda: F.lit(None).cast("string"))
    #: bigint: after this instant it is not delivered any more, epoch ms; null is never.
    expires_ms: Column = field(default_factory=lambda: F.lit(None).cast("bigint"))
    #: string: null for a message, or `cancel`.
    operation: Column = field(default_factory=lambda: F.lit(None).cast("string"))
    #: string: the full id of the message that it takes the place of, as the sender wrote it.
    replaces: Column = field(default_factory=lambda: F.lit(None).cast("string"))
    #: What is read from `text`, by the names of columns. Selected on its own, because Spark
    #: evaluates what several branches of a condition use in each of them, and parsing is dear.
    parsed: Mapping[str, Column] = field(default_factory=dict)
    #: What this envelope alone can find wrong, in the order of the checks.
    refusals: Sequence[Refusal] = ()

    def struct(self) -> Column:
        """All of it as one column."""
        return F.struct(
            self.topic.alias("topic"),
            self.partition.alias("partition"),
            self.cluster.alias("cluster"),
            self.due_ms.alias("due_ms"),
            self.expires_ms.alias("expires_ms"),
            self.unique.alias("unique"),
            self.key.alias("key"),
            self.value.alias("value"),
            self.headers.cast(HEADERS_TYPE).alias("headers"),
            self.operation.alias("operation"),
            self.replaces.alias("replaces"),
            first_refusal(self.refusals).alias("refusal"),
        )


def first_refusal(refusals: Sequence[Refusal]) -> Column:
    """struct<reason,detail> of the first refusal that holds; null where none does."""
    chosen = F.lit(None).cast("struct<reason:string,detail:string>")
    for refusal in reversed(refusals):
        said = F.struct(
            F.lit(str(refusal.reason)).alias("reason"), F.lit(refusal.detail).alias("detail")
        )
        chosen = F.when(refusal.when, said).otherwise(chosen)
    return chosen


def canonical(envelopes: Mapping[str, Canonical]) -> Column:
    """One struct column for a row of any intake topic, by the envelope of its topic."""
    # Topics that share an envelope share a branch: the code for a row stays small.
    topics: dict[int, list[str]] = {}
    for topic, envelope in envelopes.items():
        topics.setdefault(id(envelope), []).append(topic)
    structs = {id(envelope): envelope.struct() for envelope in envelopes.values()}
    chosen = F.lit(None)
    for number in reversed(topics):
        chosen = F.when(F.col("topic").isin(topics[number]), structs[number]).otherwise(chosen)
    return chosen


def value_text(envelopes: Mapping[str, Canonical]) -> Column:
    """`text`: the value of a record whose envelope parses it; null where it is no UTF-8."""
    parsing = [topic for topic, envelope in envelopes.items() if envelope.parsed]
    raw = F.col("value").cast("string")
    return F.when(F.col("topic").isin(*parsing) & F.is_valid_utf8(raw), raw).alias("text")


def parsed(envelopes: Mapping[str, Canonical]) -> list[Column]:
    """What the envelopes read from `text`, each from the records of its own topic."""
    return [
        F.when(F.col("topic") == topic, column).alias(name)
        for topic, envelope in envelopes.items()
        for name, column in envelope.parsed.items()
    ]


def record_headers() -> Column:
    """The record's own headers; empty where there are none."""
    return F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))


def named(name: str) -> Column:
    """One of the record's own headers as text; null where there is none."""
    return header_text(F.col("by_name"), name)


def without(headers: Column, names: Sequence[str]) -> Column:
    """The headers with other names than these, in order.

    A sender that writes these first, as duetime's own client does, spares the filter, which is
    interpreted: then a slice is enough.
    """
    count = F.lit(0)
    for name in names:
        count = count + F.map_contains_key("by_name", name).cast("int")
    leading = F.lit(len(names))
    for position in reversed(range(len(names))):
        key = F.get(headers, F.lit(position))["key"]
        leading = F.when(key.isin(*names), leading).otherwise(position)
    are_first = (F.size(headers) == F.size("by_name")) & (leading == count)
    others = F.filter(headers, lambda one: ~one["key"].isin(*names))
    return (
        F.when(F.size(headers) == 0, headers)
        .when(are_first, F.slice(headers, leading + 1, F.size(headers)))
        .otherwise(others)
    )


def repeated(*names: str) -> Column:
    """Whether headers of these names are there more than once; counted only where some name is."""
    headers = record_headers()
    found = F.filter(headers, lambda one: one["key"].isin(*names))
    return (F.size(headers) > F.size("by_name")) & (F.size(found) > 1)


def record_timestamp_ms() -> Column:
    """When the broker appended the record, in epoch ms."""
    return F.unix_millis("timestamp")


def whole_number(text: Column) -> Column:
    """The text as bigint where it is 1 to 18 decimal digits, which cannot overflow; else null."""
    return F.when(text.rlike(rf"^[0-9]{{1,18}}{END}"), text.cast("bigint"))
