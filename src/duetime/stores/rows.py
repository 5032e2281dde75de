"""Records as a store of rows keeps them: packed, and under names by which each is saved once.

A record on its way to the store lies in `duetime.store`. Its place there tells a record that is
saved again from another one with the same id. Packed, it is its place, then key, value, and each
header's name and value as MessagePack, which every language reads:

    4 bytes partition | 8 bytes offset | 8 bytes timestamp, epoch ms | [key, value, name, value ...]
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgpack

from duetime.message import WAITING_HEADERS, MessageId
from duetime.stores import Found, Reader
from duetime.stores.records import Header, address
from duetime.stores.selection import Position

#: partition, offset, timestamp.
PLACE = struct.Struct(">iqq")

#: How the name of a cancel begins: it waits beside the message that it is for.
CANCEL_MARK = "!"


#: About how many bytes of what is looked at are held at once, and how many records at first and at
#: most.
FIND_BYTES, FIND_FIRST, FIND_MOST = 4 * 1024 * 1024, 10, 500


class Row(NamedTuple):
    """A record as it is kept."""

    #: Unique in the store.
    name: str
    #: What a message shares with its cancel and its retries, so that they are kept together.
    id: str
    due_ms: int
    packed: bytes


@dataclass(frozen=True, slots=True)
class KeyedSearch:
    """A search for one id in a store that keeps it under a key: each look is one request."""

    reader: Reader
    id: MessageId
    retry_ms: int | None

    def find(self, now_ms: int) -> Found | None:
        """Return the message if it waits; `cancelled` if a cancel waits for it too."""
        return self.reader.find(self.id, now_ms, retry_ms=self.retry_ms)


class Record(NamedTuple):
    """A packed record, unpacked."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]

    def found(self, *, cancelled: bool = False) -> Found | None:
        """The message, as those who look for it get it; None of anything else."""
        about = address(self.headers)
        if about is None or about.topic is None:
            return None
        return Found(
            id=about.id,
            topic=about.topic,
            partition=about.partition,
            cluster=about.cluster,
            expires_ms=about.expires_ms,
            key=self.key,
            value=self.value,
            headers=self.headers[len(WAITING_HEADERS) :],
            cancelled=cancelled,
            retry=about.retry,
        )


class Rows(Protocol):
    """A store of rows as whoever saves and reads them has it, mostly in an executor."""

    def begin_term(self) -> int:
        """From now on nobody saves who began before."""
        ...

    def save(self, rows: Iterable[Row], term: int) -> None:
        """Save them. Safe to repeat: what is there already stays as it is.

        Raises StoreError where another term has begun.
        """
        ...

    def records(self, claim: Any) -> Iterator[list[Record]]:  # noqa: ANN401 (the store's own kind)
        """What a claim of this store holds, in order of time, some at a time."""
        ...

    def everything(self, part: int, parts: int) -> Iterator[list[Record]]:
        """One of so many parts of all that waits, claimed or not, some at a time, in no order.

        What is claimed meanwhile may be there twice.
        """
        ...


def portions(rows: Iterable[Row], most: int, most_bytes: int) -> Iterator[list[Row]]:
    """The rows in groups of so many, and of so many bytes, at most; or of one that is larger."""
    group, size = list[Row](), 0
    for row in rows:
        if group and (len(group) == most or size + len(row.packed) > most_bytes):
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row.packed)
    if group:
        yield group


def found_in_parts(
    names: Sequence[str], find: Callable[[Sequence[str]], Sequence[Found]]
) -> Iterator[Found]:
    """The messages that are found under the names, as few at a time as are large."""
    start, size = 0, FIND_FIRST
    while start < len(names):
        some = names[start : start + size]
        found = find(some)
        yield from found
        start += len(some)
        average = sum(len(each.value or b"") for each in found) // len(some) + 1
        size = min(max(FIND_BYTES // average, 1), FIND_MOST)


def with_cancel(name: str) -> tuple[str, str]:
    """The names of a message and of its cancel, from either."""
    message = name.removeprefix(CANCEL_MARK)
    return message, CANCEL_MARK + message


def names_of(id: MessageId, retry_ms: int | None) -> tuple[str, str]:  # noqa: A002 (as below)
    """The same of the message with this id, or of its retry at that instant."""
    due_ms = id.due_ms if retry_ms is None else retry_ms
    return with_cancel(name_of(str(id), due_ms, is_cancel=False))


def name_of(id: str, due_ms: int, *, is_cancel: bool) -> str:  # noqa: A002 (what all call it)
    """What a record is called in the store."""
    name = Position.of(id, due_ms).name
    return CANCEL_MARK + name if is_cancel else name


def packed(record: Record) -> bytes:
    """The record in one piece."""
    flat = [each for header in record.headers for each in header]
    place = PLACE.pack(record.partition, record.offset, record.timestamp_ms)
    body: bytes = msgpack.packb([record.key, record.value, *flat])
    return place + body


def unpacked(data: bytes) -> Record:
    """The record again."""
    key, value, *flat = msgpack.unpackb(memoryview(data)[PLACE.size :])
    headers = list(zip(flat[::2], flat[1::2], strict=True))
    partition, offset, timestamp_ms = PLACE.unpack_from(data)
    return Record(partition, offset, timestamp_ms, key, value, headers)


def lost(name: str) -> Record:
    """What takes the place of a record whose payload somebody removed: it will be rejected."""
    return Record(-1, -1, 0, name.encode(), None, [])
