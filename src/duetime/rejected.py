"""What was refused when it came in, as the topic of rejected records has it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from confluent_kafka import Message

from duetime.config import Settings
from duetime.errors import UnknownMessage
from duetime.message import DUE_ERROR, DUE_ERROR_DETAIL, DUE_ERROR_SOURCE
from duetime.stores import OffsetRange
from duetime.stores.offsets import whole
from duetime.stores.records import Header, RangeReader, headers_of
from duetime.topics import TopicNames

#: What a rejected record has on top of its own headers, in this order.
SAID = (DUE_ERROR, DUE_ERROR_DETAIL, DUE_ERROR_SOURCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A record that could not be taken, and why."""

    #: Its place in the topic of rejected records: what it is called by.
    number: int
    #: When it was rejected, epoch ms.
    at_ms: int
    reason: str
    detail: str
    #: Where it came in: topic/partition/offset.
    source: str
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    #: The sender's own.
    headers: Sequence[Header] = field(repr=False)


def latest(settings: Settings, limit: int) -> Iterator[Rejected]:
    """The last ones, the oldest of them first, one at a time; reads no others. Raises KafkaError.

    All payloads at once may be too much.
    """
    there = whole(settings, TopicNames(settings).rejected)
    return _read(settings, replace(there, start=max(there.start, there.end - limit)))


def find(settings: Settings, number: int) -> Rejected:
    """The one with this number. Raises UnknownMessage, KafkaError."""
    there = whole(settings, TopicNames(settings).rejected)
    is_there = there.start <= number < there.end
    wanted = replace(there, start=number, end=number + 1)
    found = list(_read(settings, wanted)) if is_there else []
    if not found:
        raise UnknownMessage(f"no rejected record has the number {number}")
    return found[0]


def _read(settings: Settings, wanted: OffsetRange) -> Iterator[Rejected]:
    if not wanted.count:
        return
    with RangeReader(settings) as reader:
        for each in reader.records([wanted]):
            if found := _rejected(each):
                yield found


def _rejected(record: Message) -> Rejected | None:
    """None where the record is none of ours."""
    headers = headers_of(record)
    own, said = headers[: -len(SAID)], headers[-len(SAID) :]
    if tuple(name for name, _ in said) != SAID:
        return None
    reason, detail, source = ((value or b"").decode(errors="replace") for _, value in said)
    return Rejected(
        number=record.offset() or 0,
        at_ms=record.timestamp()[1],
        reason=reason,
        detail=detail,
        source=source,
        key=record.key(),
        value=record.value(),
        headers=own,
    )
