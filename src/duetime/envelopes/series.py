"""A message that comes again: what a sender says of it, on its way to `duetime.recurring`.

A series is a message for that topic, due at once, with what is to become of it in headers of its
own: SERIES_HEADERS, always all and in this order, and then the sender's.
"""

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.columns import header
from duetime.envelopes import Refusal, named, record_headers
from duetime.errors import Reason
from duetime.message import (
    DEFINE,
    DUE_CLUSTER,
    DUE_CRON,
    DUE_EXPIRES_MS,
    DUE_ID,
    DUE_OP,
    DUE_PARTITION,
    DUE_SERIES,
    DUE_TOPIC,
    LONGEST_SAID,
    RECURRENCE,
    SERIES_CLUSTER,
    SERIES_HEADERS,
    SERIES_NEXT,
    SERIES_PARTITION,
    SERIES_PATTERN,
    SERIES_TOPIC,
    TAKEN,
)


def has_cron() -> Column:
    """Whether the record asks for a message that comes again, as the column `is_series`.

    Many expressions ask, and each look-up costs a hundredth of all of taking in: a row has it once.
    """
    return named(DUE_CRON).isNotNull().alias("is_series")


def is_series() -> Column:
    """What `has_cron` found."""
    return F.col("is_series")


def definition(start_ms: Column) -> Column:
    """The headers of the series that the record asks for; it begins then, null is at once."""
    said = {
        DUE_OP: F.lit(DEFINE),
        DUE_SERIES: named(DUE_ID),
        SERIES_NEXT: start_ms,
        SERIES_TOPIC: named(DUE_TOPIC),
        SERIES_PARTITION: named(DUE_PARTITION),
        SERIES_CLUSTER: named(DUE_CLUSTER),
    }
    own = F.filter(record_headers(), lambda one: ~one["key"].isin(*TAKEN))
    return F.concat(series_headers(said | {name: named(name) for name in RECURRENCE}), own)


def asked_of(name: Column, operation: Column) -> Column:
    """The headers of what is asked of a series by its name."""
    return series_headers({DUE_OP: operation, DUE_SERIES: name})


def series_headers(said: Mapping[str, Column]) -> Column:
    """SERIES_HEADERS with these values, and null for the others."""
    none = F.lit(None).cast("string")
    return F.array(*(header(name, said.get(name, none)) for name in SERIES_HEADERS))


def refusals() -> list[Refusal]:
    """What is wrong with a series alone; when it comes is looked at where it is heard."""
    longest = F.greatest(*(F.coalesce(F.length(named(each)), F.lit(0)) for each in RECURRENCE))
    name = named(DUE_ID)
    return [
        Refusal(
            when=is_series() & (longest > LONGEST_SAID),
            reason=Reason.BAD_CRON,
            detail=f"one of {', '.join(RECURRENCE)} is too long: write {LONGEST_SAID} characters "
            "at most",
        ),
        Refusal(
            when=is_series() & named(DUE_EXPIRES_MS).isNotNull(),
            reason=Reason.BAD_EXPIRY,
            detail="a series has no due-expires-ms: due-until ends it, and due-misfire says what "
            "becomes of runs that are late",
        ),
        Refusal(
            when=is_series() & (~name.rlike(SERIES_PATTERN) | name.startswith("@")),
            reason=Reason.BAD_ID,
            detail="the due-id of a series has at most 160 characters: letters, digits and "
            ". _ : = ~ + - (and @, but not first)",
        ),
    ]
