"""Sets and bins: those of the published service, shortened where the server asks for it.

A bin's name has 15 characters at most.

set                   key            bins
kafka_message_cache   record's name  id topic key value headers postTime failureUrl tries
                                     and two of ours: place idDigest
kafka_message_id      record's name  id, expires when the message is due (only with notices)
kafka_message_claim   one record     who has taken up what, and since when

`headers` is a MessagePack array of names and values, because a value may be any bytes; `place` is
where the record lay in `duetime.store` (see `duetime.stores.rows`).

A record that the published service itself has written is *foreign*: it has no `name` and no
`place`, its `value` is an object and its `headers` are a map. It is delivered as intake would have
delivered it, and is called here by its digest, because its key may not be stored.
"""

import json
import math
import re
import struct
from typing import Any

import msgpack

from duetime.errors import InvalidMessage, Reason
from duetime.message import (
    ADDRESS,
    DUE_CALLBACK,
    DUE_STATE,
    DUE_TOPIC,
    STATE,
    UNIQUE_PATTERN,
    WAITING_HEADERS,
    MessageId,
    check_destination,
)
from duetime.stores.rows import PLACE, Record, Row, unpacked

CACHE, IDS, CLAIMS = "kafka_message_cache", "kafka_message_id", "kafka_message_claim"

#: The longest time to live that the server takes, in seconds: 10 years.
MOST_TTL_S = 10 * 365 * 86_400

Bins = dict[str, Any]

#: How the name of a foreign record begins here; its digest in hex follows.
FOREIGN_MARK = "#"

#: The part of `failurePostCallbackUrl` that a shorter name of that bin begins with.
FAILURE_BIN = "failure"


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


def name_here(bins: Bins, digest: bytes) -> str:
    """Return what a record is called here, from its bins `name` and `place`."""
    name, place = bins.get("name"), bins.get("place")
    is_placed = isinstance(place, bytes | bytearray) and len(place) == PLACE.size
    return name if is_placed and isinstance(name, str) else FOREIGN_MARK + digest.hex()


def digest_of(name: str) -> bytes | None:
    """Return the digest of a foreign record from its name, and None for a record of ours."""
    return bytes.fromhex(name[1:]) if name.startswith(FOREIGN_MARK) else None


def read_record(name: str, bins: Bins, namespace: str) -> Record:
    """Return the record with this name, of ours or foreign.

    Raises InvalidMessage where it cannot be understood.
    """
    try:
        digest = digest_of(name)
        return record_of(bins) if digest is None else _foreign(bins, digest, namespace)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        # What the error says may quote the payload.
        raise InvalidMessage(
            Reason.UNREADABLE, f"its bins cannot be read ({type(error).__name__})"
        ) from None


def foreign_id(bins: Bins, digest: bytes) -> MessageId:
    """Return the id of a foreign record, from its bins `id` and `postTime`."""
    given, due_ms = bins.get("id"), bins.get("postTime")
    is_unique = isinstance(given, str) and re.match(UNIQUE_PATTERN, given)
    if not isinstance(due_ms, int):
        raise InvalidMessage(Reason.NO_DUE_TIME, "its bin postTime is not a whole number")
    return MessageId(due_ms=due_ms, unique=str(given) if is_unique else digest.hex())


def _foreign(bins: Bins, digest: bytes, namespace: str) -> Record:
    """Return a foreign record as one that waits: what the Airtel envelope makes of the same."""
    topic, given = bins.get("topic"), bins.get("headers")
    if not isinstance(topic, str):
        raise InvalidMessage(Reason.NO_TOPIC, "its bin topic is not a text")
    if not isinstance(given, dict | None):
        raise InvalidMessage(Reason.BAD_HEADERS, "its bin headers is not a map")
    identity = foreign_id(bins, digest)
    values = (check_destination(topic, namespace), None, "0", str(identity.due_ms), str(identity))
    waiting = zip(WAITING_HEADERS, map(_published, values), strict=True)
    own = ((str(name), _published(value)) for name, value in (given or {}).items())
    headers = [*waiting, *(each for each in own if each[0] not in ADDRESS)]
    # A bin's name is shorter than the published one, and every service cuts it in its own way.
    url = next((bins[name] for name in sorted(bins) if name.startswith(FAILURE_BIN)), None)
    if url is not None:
        headers.append((DUE_CALLBACK, _published(url)))
    key, value = (_published(bins.get(name)) for name in ("key", "value"))
    return Record(-1, -1, 0, key, value, headers)


def _published(value: Any) -> bytes | None:  # noqa: ANN401 (whatever a bin may hold)
    """Return the bytes that the published service writes to Kafka: a text's own, or JSON."""
    if isinstance(value, bytes | bytearray | None):
        return _bytes(value)
    if isinstance(value, str):
        return value.encode()
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


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
