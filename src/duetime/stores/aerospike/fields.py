"""Sets and bins: those of the published service, shortened where the server asks for it.

A bin's name has 15 characters at most.

set                   key            bins
kafka_message_cache   record's name  id topic key value headers postTime failureUrl tries
                                     and two of ours: place idDigest
kafka_message_id      record's name  id, expires when the message is due (only with notices)
kafka_message_claim   one record     who has taken up what, and since when

`headers` is a MessagePack array of names and values, because a value may be any bytes; `place` is
where the record lay in `duetime.store` (see `duetime.stores.rows`).
"""

import math
from typing import Any

import msgpack

from duetime.message import DUE_CALLBACK, DUE_STATE, DUE_TOPIC, STATE, WAITING_HEADERS
from duetime.stores.rows import PLACE, Record, Row, unpacked

CACHE, IDS, CLAIMS = "kafka_message_cache", "kafka_message_id", "kafka_message_claim"

#: The longest time to live that the server takes, in seconds: 10 years.
MOST_TTL_S = 10 * 365 * 86_400

Bins = dict[str, Any]


def bins_of(row: Row) -> Bins:
    """The bins of a cached message; what is null is left out, as the server has it."""
    record = unpacked(row.packed)
    by_name = dict(record.headers)
    named = {
        "id": row.id,
        "topic": _text(by_name.get(DUE_TOPIC)),
        "key": record.key,
        "value": record.value,
        "headers": msgpack.packb([each for header in record.headers for each in header]),
        "postTime": row.due_ms,
        "failureUrl": _text(by_name.get(DUE_CALLBACK)),
        "tries": _tries(record),
        "place": row.packed[: PLACE.size],
    }
    return {name: value for name, value in named.items() if value is not None}


def record_of(bins: Bins) -> Record:
    """The record again."""
    partition, offset, timestamp_ms = PLACE.unpack(bytes(bins["place"]))
    flat = msgpack.unpackb(bytes(bins["headers"]))
    headers = list(zip(flat[::2], flat[1::2], strict=True))
    key, value = (_bytes(bins.get(name)) for name in ("key", "value"))
    return Record(partition, offset, timestamp_ms, key, value, headers)


def ttl_s(due_ms: int, now_ms: int) -> int:
    """How long the id lives: until the message is due, never less than the server's least."""
    return min(max(1, math.ceil((due_ms - now_ms) / 1_000)), MOST_TTL_S)


def _tries(record: Record) -> int:
    """How often it was tried to be delivered."""
    names = [name for name, _ in record.headers[: len(WAITING_HEADERS)]]
    if tuple(names) != WAITING_HEADERS:
        return 0
    state = (_text(record.headers[names.index(DUE_STATE)][1]) or "").split(":")
    position = STATE.index("attempts")
    return int(state[position] or 0) if len(state) > position else 0


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _bytes(value: Any) -> bytes | None:  # noqa: ANN401 (the client gives bytes or bytearray)
    return None if value is None else bytes(value)
