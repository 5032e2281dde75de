"""Rows as the store writer saves them."""

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.stores.row_store import Record, Row, pack, record_name

NOW_MS = 1_800_000_000_000


def row(due_ms, unique="m", *, offset=0, value=b"v", is_cancel=False):
    """Return the row of a message or a cancel; `offset` is its origin in the inbox."""
    identity = str(MessageId(due_ms=due_ms, unique=unique))
    values = (None if is_cancel else b"orders", None, b"1", b"%d" % due_ms, identity.encode())
    record = Record(0, offset, NOW_MS, b"k", value, list(zip(H.SCHEDULED, values, strict=True)))
    return Row(record_name(identity, due_ms, is_cancel=is_cancel), identity, due_ms, pack(record))
