"""Rows as the saving query hands them to a store."""

from duetime.message import WAITING_HEADERS, MessageId
from duetime.stores.rows import Record, Row, name_of, packed

NOW_MS = 1_800_000_000_000


def row(due_ms, unique="m", *, offset=0, value=b"v", is_cancel=False):
    """A message as it is saved, or a cancel; `offset` is where it lay on its way."""
    identity = str(MessageId(due_ms=due_ms, unique=unique))
    values = (None if is_cancel else b"orders", None, b"1", b"%d" % due_ms, identity.encode())
    record = Record(0, offset, NOW_MS, b"k", value, list(zip(WAITING_HEADERS, values, strict=True)))
    return Row(name_of(identity, due_ms, is_cancel=is_cancel), identity, due_ms, packed(record))
