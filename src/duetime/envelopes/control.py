"""Control records: what is asked about a message that waits, or about a series.

Key = id, header `due-op` = `cancel`, and of a retry `due-at-ms` = when it is; or key = name,
`due-op` = `pause`, `resume` or `stop`.
"""

from pyspark.sql import functions as F

from duetime.columns import HEADERS_TYPE, due_ms_of
from duetime.envelopes import Canonical, Refusal, named, record_timestamp_ms, whole_number
from duetime.envelopes.series import asked_of
from duetime.errors import Reason
from duetime.message import CANCEL, DUE_AT_MS, DUE_OP, ID_PATTERN, OF_SERIES, SERIES_PATTERN


def control() -> Canonical:
    """A cancel carries the id's own due time, so that it is routed to the slot of its message.

    A message that waits for a retry is in the slot of that, and the cancel says when it is.
    What is asked of a series is due at once.
    """
    asked = F.coalesce(named(DUE_OP), F.lit(""))
    is_cancel, of_series = asked == CANCEL, asked.isin(*OF_SERIES)
    text = F.when(F.is_valid_utf8(F.col("key").cast("string")), F.col("key").cast("string"))
    known = text.rlike(ID_PATTERN)
    nothing, at = F.lit(None), named(DUE_AT_MS)
    due_ms = due_ms_of(text)
    return Canonical(
        topic=nothing.cast("string"),
        due_ms=F.when(of_series, record_timestamp_ms()).when(
            known, F.when(at.isNull(), due_ms).otherwise(whole_number(at))
        ),
        unique=F.when(known & is_cancel, F.substring(text, 14, 200)),
        key=F.col("key"),
        value=nothing.cast("binary"),
        headers=F.when(of_series, asked_of(text, asked).cast(HEADERS_TYPE)).otherwise(
            F.array().cast(HEADERS_TYPE)
        ),
        operation=F.when(of_series, asked).otherwise(CANCEL),
        refusals=(
            Refusal(
                when=~(is_cancel | of_series),
                reason=Reason.BAD_OPERATION,
                detail="the header due-op must be cancel, or of a series pause, resume or stop",
            ),
            Refusal(
                when=is_cancel & ~F.coalesce(known, F.lit(False)),
                reason=Reason.BAD_ID,
                detail="the key must be a message id: 12 hex digits, a dash and a name",
            ),
            Refusal(
                when=of_series & ~F.coalesce(text.rlike(SERIES_PATTERN), F.lit(False)),
                reason=Reason.BAD_ID,
                detail="the key must be the name of a series, its due-id",
            ),
        ),
    )
