"""The connection to Aerospike, its sets and bins, the lease table, and the published records.

The sets and bins have the names of that service, shortened where the server requires it: the name
of a bin has 15 characters at most.

set                   key            bins
kafka_message_cache   record's name  id topic key value headers postTime failureUrl tries
                                     and two that only duetime has: place idDigest
kafka_message_id      record's name  id; expires when the message is due (only with notifications)
kafka_message_claim   one record     the lease table

`headers` is a MessagePack array of names and values, because a value may be any bytes. `place` is
the record's origin in `duetime.store-inbox` (see `duetime.stores.row_store`).

The lease table says which scheduler has claimed which span of due times. A scheduler *holds* a span
under a lease that it extends while it works. Messages due in an unheld span are free. The table is
replaced as a whole, if no other process has replaced it since it was read, so two schedulers never
hold the same instant.

    held          [10:00:00, 10:00:01) by a     [10:00:01, 10:00:02) by a
    b asks for    [00:00:00, 10:00:03)
    b receives    [00:00:00, 10:00:00)          [10:00:02, 10:00:03)

A record that the published service has written is *foreign*: it has no `name` and no `place`, its
`value` is an object and its `headers` are a map. It is delivered as intake would have delivered it.
Its name here is its digest, because its key may not be stored.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import aerospike
import msgpack
from aerospike.exception import (
    AerospikeError,
    RecordExistsError,
    RecordGenerationError,
    RecordNotFound,
)

from duetime.core import headers as H
from duetime.core.errors import ConfigError, InvalidMessage, Reason, StoreError
from duetime.core.messages import UNIQUE_PATTERN, MessageId, check_destination
from duetime.core.settings import Settings
from duetime.kafka.range_reader import state_part
from duetime.stores.row_store import ORIGIN, Record, Row, headers_from, unpack

CACHE, IDS, CLAIMS = "kafka_message_cache", "kafka_message_id", "kafka_message_claim"

#: The longest time to live that the server accepts, in seconds: 10 years.
MAX_TTL_S = 10 * 365 * 86_400

#: The first character of a foreign record's name. Its digest in hex follows.
FOREIGN_MARK = "#"

#: The first letters of the bin `failurePostCallbackUrl`, however a service shortens its name.
FAILURE_BIN = "failure"

#: The server's port where the URL has none.
DEFAULT_PORT = 3_000

#: The metadata of a record that never expires.
FOREVER: dict[str, Any] = {"ttl": aerospike.TTL_NEVER_EXPIRE}

Bins = dict[str, Any]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A server, a namespace there, and the credentials."""

    host: str
    port: int
    namespace: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.namespace}"


def server_address(settings: Settings) -> ServerAddress:
    """Parse the setting `store`: aerospike://user:password@host:port/namespace.

    Raises ConfigError.
    """
    try:
        url = urlsplit(settings.store.get_secret_value())
        host, port, namespace = url.hostname, url.port or DEFAULT_PORT, url.path.strip("/")
    except ValueError:
        host, port, namespace = None, DEFAULT_PORT, ""
    if not (host and namespace) or "/" in namespace:
        raise ConfigError("setting store: write aerospike://host:port/namespace")
    return ServerAddress(
        host=host,
        port=port,
        namespace=namespace,
        user=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else None,
    )


@cache
def client(at: ServerAddress) -> aerospike.Client:
    """Return this process's client. Raises AerospikeError."""
    config: dict[str, object] = {"hosts": [(at.host, at.port)]}
    if at.user:
        config |= {"user": at.user, "password": at.password or ""}
    return aerospike.client(config)


@contextmanager
def aerospike_errors(at: ServerAddress) -> Iterator[None]:
    """Raise StoreError in place of an error of the Aerospike client."""
    try:
        yield
    except AerospikeError as error:
        detail = " ".join(str(getattr(error, "msg", None) or type(error).__name__).split())
        raise StoreError(
            f"Aerospike at {at} does not answer as it should ({detail}): check that it is up, and "
            "its address, namespace, user and password in setting store"
        ) from None


def check_server(settings: Settings) -> str:
    """Return a sentence that describes the cluster. Raises StoreError and ConfigError."""
    at = server_address(settings)
    with aerospike_errors(at):
        nodes = len(client(at).get_nodes())
    return f"Aerospike at {at} answers, with {nodes} nodes"


def bins_from_row(row: Row) -> Bins:
    """Return the bins of a saved row. A null is left out, as the server does."""
    record = unpack(row.packed)
    headers, waiting = dict(record.headers), dict(record.headers[: len(H.SCHEDULED)])
    bins = {
        "id": row.id,
        "topic": _text(headers.get(H.DUE_TOPIC)),
        "key": record.key,
        "value": record.value,
        "headers": msgpack.packb([each for header in record.headers for each in header]),
        "postTime": row.due_ms,
        "failureUrl": _text(headers.get(H.DUE_CALLBACK)),
        "tries": int(state_part(_text(waiting.get(H.DUE_STATE)), "attempts") or 0),
        "place": row.packed[: ORIGIN.size],
    }
    return {name: value for name, value in bins.items() if value is not None}


def record_from_bins(bins: Bins) -> Record:
    """Return the record that these bins were made of."""
    headers = headers_from(msgpack.unpackb(bytes(bins["headers"])))
    key, value = (_bytes(bins.get(name)) for name in ("key", "value"))
    return Record._make([*ORIGIN.unpack(bytes(bins["place"])), key, value, headers])


def record_name_in(bins: Bins, digest: bytes) -> str:
    """Return the name of a record from its bins `name` and `place`."""
    name, place = bins.get("name"), bins.get("place")
    is_own = isinstance(place, bytes | bytearray) and len(place) == ORIGIN.size
    return name if is_own and isinstance(name, str) else FOREIGN_MARK + digest.hex()


def digest_of(name: str) -> bytes | None:
    """Return the digest of a foreign record from its name; None for any other record."""
    return bytes.fromhex(name[1:]) if name.startswith(FOREIGN_MARK) else None


def read_record(name: str, bins: Bins, namespace: str) -> Record:
    """Return the record with this name. Raises InvalidMessage if its bins cannot be read."""
    try:
        digest = digest_of(name)
        return (
            record_from_bins(bins) if digest is None else _foreign_record(bins, digest, namespace)
        )
    except (KeyError, TypeError, ValueError, struct.error) as error:
        # The error's text may quote the payload.
        raise InvalidMessage(
            Reason.MALFORMED, f"its bins cannot be read ({type(error).__name__})"
        ) from None


def foreign_id(bins: Bins, digest: bytes) -> MessageId:
    """Return the id of a foreign record, from its bins `id` and `postTime`."""
    given, due_ms = bins.get("id"), bins.get("postTime")
    is_unique = isinstance(given, str) and re.match(UNIQUE_PATTERN, given)
    if not isinstance(due_ms, int):
        raise InvalidMessage(Reason.NO_DUE_TIME, "its bin postTime is not a whole number")
    return MessageId(due_ms=due_ms, unique=str(given) if is_unique else digest.hex())


def _foreign_record(bins: Bins, digest: bytes, namespace: str) -> Record:
    """Return a foreign record as the Airtel envelope would schedule it."""
    topic, given = bins.get("topic"), bins.get("headers")
    if not isinstance(topic, str):
        raise InvalidMessage(Reason.NO_TOPIC, "its bin topic is not a text")
    if not isinstance(given, dict | None):
        raise InvalidMessage(Reason.BAD_HEADERS, "its bin headers is not a map")
    identity = foreign_id(bins, digest)
    values = (check_destination(topic, namespace), None, "0", str(identity.due_ms), str(identity))
    headers = list(zip(H.SCHEDULED, map(_published, values), strict=True))
    headers += [
        (str(name), _published(value))
        for name, value in (given or {}).items()
        if str(name) not in H.ADDRESS
    ]
    # The published name is too long for a bin, and every service shortens it differently.
    url = next((bins[name] for name in sorted(bins) if name.startswith(FAILURE_BIN)), None)
    if url is not None:
        headers.append((H.DUE_CALLBACK, _published(url)))
    key, value = (_published(bins.get(name)) for name in ("key", "value"))
    return Record(-1, -1, 0, key, value, headers)


def _published(value: Any) -> bytes | None:  # noqa: ANN401 (a bin may hold anything)
    """Return the bytes that the published service writes to Kafka: the text itself, or JSON."""
    if isinstance(value, bytes | bytearray | None):
        return _bytes(value)
    if isinstance(value, str):
        return value.encode()
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def ttl_s(due_ms: int, now_ms: int) -> int:
    """Return how long an id lives, in seconds: until the message is due, in the server's limits."""
    return min(max(1, math.ceil((due_ms - now_ms) / 1_000)), MAX_TTL_S)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _bytes(value: Any) -> bytes | None:  # noqa: ANN401 (the client returns bytes or bytearray)
    return None if value is None else bytes(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSpan:
    """Due times from `start_ms` up to, not including, `end_ms`, leased until `until_ms`."""

    start_ms: int
    end_ms: int
    owner: str
    until_ms: int
    #: When its delivery was started, epoch ms; None before that.
    started_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseTable:
    """The leased spans by name, and the term of the latest writer. Immutable."""

    spans: Mapping[str, LeasedSpan] = field(default_factory=dict)
    term: int = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "LeaseTable":
        """Return the table from its bin."""
        spans = {name: LeasedSpan(**span) for name, span in stored["spans"].items()}
        return cls(spans, stored["term"])

    def stored(self) -> dict[str, Any]:
        """Return the bin: plain values without nulls."""
        spans = {
            name: {key: value for key, value in asdict(span).items() if value is not None}
            for name, span in self.spans.items()
        }
        return {"spans": spans, "term": self.term}

    def free(self, start_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
        """Yield the unheld parts of a span, in order."""
        for span in sorted(self.spans.values(), key=lambda each: each.start_ms):
            if span.start_ms > start_ms:
                yield start_ms, min(span.start_ms, end_ms)
            start_ms = max(start_ms, span.end_ms)
            if start_ms >= end_ms:
                return
        yield start_ms, end_ms

    def expired(self, now_ms: int, busy: Collection[str]) -> dict[str, LeasedSpan]:
        """Return spans whose lease has ended, except the `busy` ones."""
        return {
            name: span
            for name, span in self.spans.items()
            if span.until_ms <= now_ms and name not in busy
        }

    def held(self, names: Collection[str], owner: str) -> dict[str, LeasedSpan]:
        """Return the named spans that the owner still holds."""
        return {
            name: span for name, span in self.spans.items() if name in names and span.owner == owner
        }

    def with_spans(self, spans: Mapping[str, LeasedSpan]) -> "LeaseTable":
        """Return the table with these spans added or replaced."""
        return replace(self, spans={**self.spans, **spans})

    def without(self, names: Collection[str], owner: str) -> "LeaseTable":
        """Return the table without the named spans that the owner holds."""
        removed = self.held(names, owner)
        return replace(self, spans={k: v for k, v in self.spans.items() if k not in removed})


class LeaseTableRecord:
    """The stored table of one namespace of duetime. Thread-safe. Raises StoreError."""

    def __init__(self, at: ServerAddress, name: str) -> None:
        self._at = at
        self._key = (at.namespace, CLAIMS, name)

    def read(self) -> LeaseTable:
        """Return the current table."""
        return self._read()[0]

    def change(self, change: Callable[[LeaseTable], tuple[LeaseTable, _Result]]) -> _Result:
        """Replace the table by compare-and-swap, and return the result of `change`.

        `change` returns the new table and a result. It is called again after a conflict.
        """
        while True:
            table, generation = self._read()
            changed, result = change(table)
            if changed == table or self._replace(changed, generation):
                return result

    def _read(self) -> tuple[LeaseTable, int | None]:
        with aerospike_errors(self._at):
            try:
                _, meta, bins = client(self._at).get(self._key)
            except RecordNotFound:
                return LeaseTable(), None
        return LeaseTable.of(bins["ledger"]), meta["gen"]

    def _replace(self, table: LeaseTable, generation: int | None) -> bool:
        meta, policy = FOREVER, {"exists": aerospike.POLICY_EXISTS_CREATE}
        if generation is not None:
            meta, policy = FOREVER | {"gen": generation}, {"gen": aerospike.POLICY_GEN_EQ}
        with aerospike_errors(self._at):
            try:
                client(self._at).put(self._key, {"ledger": table.stored()}, meta, policy)
            except (RecordExistsError, RecordGenerationError):
                return False
        return True
