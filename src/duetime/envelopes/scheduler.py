"""The headers of etf1's kafka-message-scheduler, so that its senders need not change.

Source: github.com/etf1/kafka-message-scheduler, README, "Schedule message".
"""

from pyspark.sql import functions as F

from duetime.envelopes import (
    Canonical,
    Refusal,
    named,
    record_headers,
    repeated,
    whole_number,
    without,
)
from duetime.errors import Reason
from duetime.message import ADDRESS

EPOCH = "scheduler-epoch"
TARGET_TOPIC = "scheduler-target-topic"
TARGET_KEY = "scheduler-target-key"


def scheduler() -> Canonical:
    """`scheduler-epoch` in seconds, `scheduler-target-topic`, `scheduler-target-key`."""
    seconds = whole_number(named(EPOCH))
    return Canonical(
        topic=named(TARGET_TOPIC),
        # Fewer than 10**15 seconds, so that the milliseconds cannot overflow.
        due_ms=F.when(seconds < 10**15, seconds * 1_000),
        unique=F.lit(None).cast("string"),
        key=named(TARGET_KEY).cast("binary"),
        value=F.col("value"),
        headers=without(record_headers(), (EPOCH, TARGET_TOPIC, TARGET_KEY, *ADDRESS)),
        refusals=(
            Refusal(
                when=named(EPOCH).isNull(),
                reason=Reason.NO_DUE_TIME,
                detail="the header scheduler-epoch is missing: add it, in seconds",
            ),
            Refusal(
                when=repeated(EPOCH),
                reason=Reason.TWO_DUE_TIMES,
                detail="more than one header scheduler-epoch: leave one",
            ),
        ),
    )
