"""duetime's own contract: headers on any record, payload untouched."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.envelopes import (
    Canonical,
    Refusal,
    named,
    record_headers,
    record_timestamp_ms,
    repeated,
    whole_number,
    without,
)
from duetime.envelopes.series import definition, is_series, refusals
from duetime.errors import Reason
from duetime.message import (
    ADDRESS,
    CLUSTER_PATTERN,
    DEFINE,
    DUE_AT_MS,
    DUE_CLUSTER,
    DUE_EXPIRES_MS,
    DUE_ID,
    DUE_IN_MS,
    DUE_PARTITION,
    DUE_REPLACES,
    DUE_TOPIC,
    ID_PATTERN,
    SERIES_MARK,
)


def native() -> Canonical:
    """Headers `due-topic` and `due-at-ms`, `due-in-ms` or `due-cron`; and optional ones.

    Source: docs/contracts.md.
    """
    again = is_series()
    at_ms, in_ms = whole_number(named(DUE_AT_MS)), whole_number(named(DUE_IN_MS))
    asked_ms = F.coalesce(at_ms, record_timestamp_ms() + in_ms)
    untimed = named(DUE_AT_MS).isNull() & named(DUE_IN_MS).isNull()
    headers = F.when(again, definition(asked_ms)).otherwise(without(record_headers(), ADDRESS))
    return Canonical(
        topic=named(DUE_TOPIC),
        partition=named(DUE_PARTITION),
        cluster=named(DUE_CLUSTER),
        expires_ms=whole_number(named(DUE_EXPIRES_MS)),
        # A series begins at once, unless it has a time.
        due_ms=F.coalesce(asked_ms, F.when(again & untimed, record_timestamp_ms())),
        # What asks for a series is no message of its name: each is heard.
        unique=F.when(~again, named(DUE_ID)),
        key=F.col("key"),
        value=F.col("value"),
        headers=headers,
        operation=F.when(again, DEFINE),
        replaces=named(DUE_REPLACES),
        refusals=(
            Refusal(
                when=~named(DUE_CLUSTER).rlike(CLUSTER_PATTERN),
                reason=Reason.UNKNOWN_CLUSTER,
                detail="due-cluster is no cluster's name: use 1 to 40 of a-z A-Z 0-9 _ -",
            ),
            Refusal(
                when=untimed & ~again,
                reason=Reason.NO_DUE_TIME,
                detail="neither due-at-ms nor due-in-ms: add one of the two headers",
            ),
            Refusal(
                when=(named(DUE_AT_MS).isNotNull() & named(DUE_IN_MS).isNotNull())
                | repeated(DUE_AT_MS, DUE_IN_MS),
                reason=Reason.TWO_DUE_TIMES,
                detail="more than one due-at-ms or due-in-ms: leave one",
            ),
            no_expiry(named(DUE_EXPIRES_MS)),
            Refusal(
                when=~_can_be_replaced(named(DUE_REPLACES)),
                reason=Reason.BAD_ID,
                detail="due-replaces is no message's id: 12 hex digits, a dash and a name",
            ),
            Refusal(
                when=again & named(DUE_REPLACES).isNotNull(),
                reason=Reason.BAD_ID,
                detail="a series replaces no message: leave out due-replaces, and cancel by the id",
            ),
            *refusals(),
        ),
    )


def _can_be_replaced(identity: Column) -> Column:
    """Whether this is the id of a message; null where there is none.

    A series waits under an id too, and would have no next run without it.
    """
    return identity.rlike(ID_PATTERN) & ~F.substring(identity, 14, 200).startswith(SERIES_MARK)


def no_expiry(said: Column) -> Refusal:
    """What the header `due-expires-ms` says is no instant."""
    return Refusal(
        when=said.isNotNull() & whole_number(said).isNull(),
        reason=Reason.BAD_EXPIRY,
        detail="due-expires-ms is no whole number: write it in epoch ms",
    )
