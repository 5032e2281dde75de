"""The envelopes made of Kafka headers: duetime's own, its control records, and etf1's scheduler.

A native record with `due-cron` defines a schedule. It becomes a message to the topic
`duetime.schedule-commands`, due at once, whose headers hold the definition: H.SCHEDULE,
always all and in this order, then the sender's. A control record that pauses, resumes or stops a
schedule becomes such a message, too.
"""

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.messages import CLUSTER_PATTERN, ID_PATTERN, SCHEDULE_MARK, SCHEDULE_PATTERN
from duetime.pipeline.delivery.rows import ErrorCase
from duetime.pipeline.intake.canonical_request import (
    CanonicalRequest,
    named,
    record_headers,
    record_timestamp_ms,
    repeated,
    whole_number,
    without,
)
from duetime.spark.columns import HEADERS_TYPE, due_ms_of, header, unique_of

#: Headers of etf1's scheduler.
EPOCH = "scheduler-epoch"
TARGET_TOPIC = "scheduler-target-topic"
TARGET_KEY = "scheduler-target-key"


def native() -> CanonicalRequest:
    """Headers `due-topic` and `due-at-ms`, `due-in-ms` or `due-cron`; and optional ones.

    Source: docs/contracts.md.
    """
    # A row has it as a column: many expressions read it, and each look-up of the header costs a
    # hundredth of intake.
    is_schedule = F.col("is_schedule")
    due_ms = F.coalesce(
        whole_number(named(H.DUE_AT_MS)), record_timestamp_ms() + whole_number(named(H.DUE_IN_MS))
    )
    is_untimed = named(H.DUE_AT_MS).isNull() & named(H.DUE_IN_MS).isNull()
    headers = without(record_headers(), H.ADDRESS)
    return CanonicalRequest(
        topic=named(H.DUE_TOPIC),
        partition=named(H.DUE_PARTITION),
        cluster=named(H.DUE_CLUSTER),
        expires_ms=whole_number(named(H.DUE_EXPIRES_MS)),
        # A schedule without a time starts at once.
        due_ms=F.coalesce(due_ms, F.when(is_schedule & is_untimed, record_timestamp_ms())),
        # The due-id of a schedule is its name: each of its definitions is a message of its own.
        unique=F.when(~is_schedule, named(H.DUE_ID)),
        key=F.col("key"),
        value=F.col("value"),
        headers=F.when(is_schedule, _definition(due_ms)).otherwise(headers),
        operation=F.when(is_schedule, H.DEFINE),
        replaces=named(H.DUE_REPLACES),
        errors=(
            ErrorCase(
                ~named(H.DUE_CLUSTER).rlike(CLUSTER_PATTERN),
                Reason.UNKNOWN_CLUSTER,
                "due-cluster is no cluster's name: use 1 to 40 of a-z A-Z 0-9 _ -",
            ),
            ErrorCase(
                is_untimed & ~is_schedule,
                Reason.NO_DUE_TIME,
                "neither due-at-ms nor due-in-ms: add one of the two headers",
            ),
            ErrorCase(
                (named(H.DUE_AT_MS).isNotNull() & named(H.DUE_IN_MS).isNotNull())
                | repeated(H.DUE_AT_MS, H.DUE_IN_MS),
                Reason.TWO_DUE_TIMES,
                "more than one due-at-ms or due-in-ms: leave one",
            ),
            bad_expiry(named(H.DUE_EXPIRES_MS)),
            ErrorCase(
                ~_can_be_replaced(named(H.DUE_REPLACES)),
                Reason.BAD_ID,
                "due-replaces is no message's id: 12 hex digits, a dash and a name",
            ),
            ErrorCase(
                is_schedule & named(H.DUE_REPLACES).isNotNull(),
                Reason.BAD_ID,
                "a schedule replaces no message: leave out due-replaces, and cancel by the id",
            ),
            *_schedule_errors(is_schedule),
        ),
    )


def _definition(start_ms: Column) -> Column:
    """array: the headers of the schedule that the record defines; null for a start at once."""
    values = {
        H.DUE_OP: F.lit(H.DEFINE),
        H.DUE_SCHEDULE: named(H.DUE_ID),
        H.SCHEDULE_NEXT: start_ms,
        H.SCHEDULE_TOPIC: named(H.DUE_TOPIC),
        H.SCHEDULE_PARTITION: named(H.DUE_PARTITION),
        H.SCHEDULE_CLUSTER: named(H.DUE_CLUSTER),
    }
    sender = F.filter(record_headers(), lambda one: ~one["key"].isin(*H.CONSUMED))
    recurrence = {name: named(name) for name in H.RECURRENCE}
    return F.concat(_schedule_headers(values | recurrence), sender)


def _schedule_headers(values: Mapping[str, Column]) -> Column:
    """array: H.SCHEDULE with these values, and null for the others."""
    none = F.lit(None).cast("string")
    return F.array(*(header(name, values.get(name, none)) for name in H.SCHEDULE))


def _can_be_replaced(identity: Column) -> Column:
    """boolean: the text is the id of a message; null for none.

    A schedule waits under an id, too, and would have no next run without it.
    """
    return identity.rlike(ID_PATTERN) & ~unique_of(identity).startswith(SCHEDULE_MARK)


def bad_expiry(text: Column) -> ErrorCase:
    """Return the error of a header `due-expires-ms` that is not an instant."""
    return ErrorCase(
        text.isNotNull() & whole_number(text).isNull(),
        Reason.BAD_EXPIRY,
        "due-expires-ms is no whole number: write it in epoch ms",
    )


def _schedule_errors(is_schedule: Column) -> list[ErrorCase]:
    """Return errors of schedules only; the schedules query validates the recurrence itself."""
    longest = F.greatest(*(F.coalesce(F.length(named(each)), F.lit(0)) for each in H.RECURRENCE))
    name = named(H.DUE_ID)
    return [
        ErrorCase(
            is_schedule & (longest > H.MAX_RECURRENCE_CHARACTERS),
            Reason.BAD_CRON,
            f"one of {', '.join(H.RECURRENCE)} is too long: write {H.MAX_RECURRENCE_CHARACTERS} "
            "characters at most",
        ),
        ErrorCase(
            is_schedule & named(H.DUE_EXPIRES_MS).isNotNull(),
            Reason.BAD_EXPIRY,
            "a schedule has no due-expires-ms: due-until ends it, and due-misfire says what "
            "becomes of runs that are late",
        ),
        ErrorCase(
            is_schedule & (~name.rlike(SCHEDULE_PATTERN) | name.startswith("@")),
            Reason.BAD_ID,
            "the due-id of a schedule has at most 160 characters: letters, digits and "
            ". _ : = ~ + - (and @, but not first)",
        ),
    ]


def has_cron() -> Column:
    """boolean: the record defines a schedule. The column `is_schedule`."""
    return named(H.DUE_CRON).isNotNull()


def control() -> CanonicalRequest:
    """Key = message id, header `due-op` = `cancel`; or key = schedule, `pause`, `resume` or `stop`.

    A cancel is due when its message is, so that it is routed to the same slot. Of a message that
    waits for a retry, `due-at-ms` is the instant of the retry. Other operations are due at once.
    """
    operation = F.coalesce(named(H.DUE_OP), F.lit(""))
    is_cancel, is_schedule = operation == H.CANCEL, operation.isin(*H.SCHEDULE_OPERATIONS)
    raw = F.col("key").cast("string")
    text = F.when(F.is_valid_utf8(raw), raw)
    is_id = text.rlike(ID_PATTERN)
    retry_ms = named(H.DUE_AT_MS)
    cancel_ms = F.when(retry_ms.isNull(), due_ms_of(text)).otherwise(whole_number(retry_ms))
    headers = _schedule_headers({H.DUE_OP: operation, H.DUE_SCHEDULE: text}).cast(HEADERS_TYPE)
    return CanonicalRequest(
        due_ms=F.when(is_schedule, record_timestamp_ms()).when(is_id, cancel_ms),
        unique=F.when(is_id & is_cancel, unique_of(text)),
        key=F.col("key"),
        headers=F.when(is_schedule, headers).otherwise(F.array().cast(HEADERS_TYPE)),
        operation=F.when(is_schedule, operation).otherwise(H.CANCEL),
        errors=(
            ErrorCase(
                ~(is_cancel | is_schedule),
                Reason.BAD_OPERATION,
                "the header due-op must be cancel, or for a schedule pause, resume or stop",
            ),
            ErrorCase(
                is_cancel & ~F.coalesce(is_id, F.lit(False)),
                Reason.BAD_ID,
                "the key must be a message id: 12 hex digits, a dash and a name",
            ),
            ErrorCase(
                is_schedule & ~F.coalesce(text.rlike(SCHEDULE_PATTERN), F.lit(False)),
                Reason.BAD_ID,
                "the key must be the name of a schedule, its due-id",
            ),
        ),
    )


def scheduler() -> CanonicalRequest:
    """`scheduler-epoch` in seconds, `scheduler-target-topic`, `scheduler-target-key`.

    The headers of etf1's kafka-message-scheduler, so that its senders need not change. Source:
    github.com/etf1/kafka-message-scheduler, README, "Schedule message".
    """
    seconds = whole_number(named(EPOCH))
    return CanonicalRequest(
        topic=named(TARGET_TOPIC),
        # Fewer than 10**15 seconds, so that the milliseconds cannot overflow.
        due_ms=F.when(seconds < 10**15, seconds * 1_000),
        key=named(TARGET_KEY).cast("binary"),
        value=F.col("value"),
        headers=without(record_headers(), (EPOCH, TARGET_TOPIC, TARGET_KEY, *H.ADDRESS)),
        errors=(
            ErrorCase(
                named(EPOCH).isNull(),
                Reason.NO_DUE_TIME,
                "the header scheduler-epoch is missing: add it, in seconds",
            ),
            ErrorCase(
                repeated(EPOCH),
                Reason.TWO_DUE_TIMES,
                "more than one header scheduler-epoch: leave one",
            ),
        ),
    )
