"""The countdown envelope of the Redis black box: one JSON object, due so many seconds from now."""

from pyspark.sql import functions as F

from duetime.envelopes import (
    Canonical,
    Refusal,
    record_headers,
    record_timestamp_ms,
    without,
)
from duetime.envelopes.json_text import JsonEnvelope
from duetime.errors import Reason
from duetime.message import ADDRESS, END

#: Seconds as JSON writes them. An exponent of two digits: Java would write out all the digits of
#: 1e-999999999, and be busy with that until its memory ends.
SECONDS_PATTERN = rf"^-?[0-9]{{1,40}}(?:\.[0-9]{{1,40}})?(?:[eE][+-]?[0-9]{{1,2}})?{END}"


def countdown() -> Canonical:
    """`{"topic", "message", "countdown" (seconds, fractions allowed)}`; Kafka headers pass through.

    The seconds count from the record's append to the intake topic, and are rounded up to whole ms.
    """
    fields = "topic string, message string, countdown string"
    envelope = JsonEnvelope("countdown", fields, payload="message")
    text = envelope.field("countdown")
    number = F.when(text.rlike(SECONDS_PATTERN), text)
    wait_ms = F.ceil(number.try_cast("decimal(38,15)") * 1_000).try_cast("bigint")
    return Canonical(
        topic=envelope.field("topic"),
        due_ms=F.when(wait_ms.between(0, 10**15), record_timestamp_ms() + wait_ms),
        unique=F.lit(None).cast("string"),
        key=F.lit(None).cast("binary"),
        value=envelope.payload(),
        headers=without(record_headers(), ADDRESS),
        parsed=envelope.parsed,
        refusals=(
            *envelope.refusals(),
            Refusal(
                when=text.isNull(),
                reason=Reason.NO_DUE_TIME,
                detail="the field countdown is missing: add it, in seconds",
            ),
            Refusal(
                when=envelope.repeats("countdown"),
                reason=Reason.TWO_DUE_TIMES,
                detail="the field countdown is there more than once: leave one",
            ),
            Refusal(
                when=number.try_cast("double") < 0,
                reason=Reason.BAD_DUE_TIME,
                detail="the field countdown is negative: a delay is 0 or more",
            ),
        ),
    )
