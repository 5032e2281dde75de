"""A message in the spool, shown as one that waits."""

from duetime.message import (
    DUE_CLUSTER,
    DUE_EXPIRES_MS,
    DUE_PARTITION,
    DUE_TOPIC,
    TAKEN,
    headers_without,
)
from duetime.outgoing import Outgoing
from duetime.stores import Found


def as_found(record: Outgoing) -> Found:
    """The message that this record schedules."""
    own = {name: (value or b"").decode() for name, value in record.headers if name in TAKEN}
    return Found(
        id=record.id,
        topic=own[DUE_TOPIC],
        partition=_number(own.get(DUE_PARTITION)),
        cluster=own.get(DUE_CLUSTER),
        expires_ms=_number(own.get(DUE_EXPIRES_MS)),
        key=record.key,
        value=record.value,
        headers=headers_without(record.headers, TAKEN),
        cancelled=False,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text else None
