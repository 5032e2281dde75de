"""Which messages the intake has already, after a crash: read there, since they were handed over."""

from collections.abc import Mapping

from confluent_kafka import Message

from duetime.config import Settings
from duetime.errors import DuetimeError
from duetime.message import DUE_AT_MS, DUE_ID, MessageId
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import RangeReader, headers_of
from duetime.topics import TopicNames

#: How far this machine's clock and the brokers' may differ, in ms.
MARGIN_MS = 60_000


def arrived(settings: Settings, taken_ms: Mapping[str, int]) -> set[str]:
    """Of these ids, those that the intake has; each is given with when it was handed over.

    Raises KafkaError.
    """
    if not taken_ms:
        return set()
    since_ms = min(taken_ms.values()) - MARGIN_MS
    # Its own records are in no transaction, and there also where one of others is open before them.
    with RangeReader(settings, committed_only=False) as reader:
        found = (_id(each) for each in reader.records(_ranges(settings, since_ms)))
        return {each for each in found if each is not None and each in taken_ms}


def _ranges(settings: Settings, since_ms: int) -> list[OffsetRange]:
    offsets = Offsets(settings, f"{settings.namespace}.reader")
    try:
        places = offsets.readable_places(TopicNames(settings).native)
        ends = offsets.ends(places)
        starts = offsets.first_since(dict.fromkeys(places, since_ms))
    finally:
        offsets.close()
    return [
        OffsetRange(*place, start, ends[place])
        for place, start in starts.items()
        if start is not None and start < ends[place]
    ]


def _id(record: Message) -> str | None:
    words = dict(headers_of(record))
    try:
        due_ms = int(words.get(DUE_AT_MS) or b"")
        return str(MessageId(due_ms=due_ms, unique=(words.get(DUE_ID) or b"").decode()))
    except (ValueError, DuetimeError):
        return None
