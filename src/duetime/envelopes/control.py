"""Control records: what is asked about a message that waits.

Key = id, header `due-op` = `cancel`.
"""

from pyspark.sql import functions as F

from duetime.columns import HEADERS_TYPE
from duetime.envelopes import Canonical, Refusal, named
from duetime.errors import Reason
from duetime.message import CANCEL, DUE_OP, ID_PATTERN


def control() -> Canonical:
    """A cancel carries the id's own due time, so that it is routed to the slot of its message."""
    text = F.when(F.is_valid_utf8(F.col("key").cast("string")), F.col("key").cast("string"))
    known = text.rlike(ID_PATTERN)
    nothing = F.lit(None)
    return Canonical(
        topic=nothing.cast("string"),
        due_ms=F.when(known, F.conv(F.substring(text, 1, 12), 16, 10).cast("bigint")),
        unique=F.when(known, F.substring(text, 14, 200)),
        key=F.col("key"),
        value=nothing.cast("binary"),
        headers=F.array().cast(HEADERS_TYPE),
        operation=F.lit(CANCEL),
        refusals=(
            Refusal(
                when=F.coalesce(named(DUE_OP), F.lit("")) != CANCEL,
                reason=Reason.BAD_OPERATION,
                detail="the header due-op must be: cancel",
            ),
            Refusal(
                when=~F.coalesce(known, F.lit(False)),
                reason=Reason.BAD_ID,
                detail="the key must be a message id: 12 hex digits, a dash and a name",
            ),
        ),
    )
