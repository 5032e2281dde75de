"""What could not be delivered and waits for another try, looked for by its id.

A retry waits under the id of its message, and at another time: that follows from the last failure
and the settings, which have to be those of the pipeline. What has failed lies in one partition.
Where each id is in that is remembered: it is read once, and not for everybody who asks.
"""

import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

from confluent_kafka import Message

from duetime.backoff import backoff_ms
from duetime.config import Settings
from duetime.errors import Reason
from duetime.message import DUE_ERROR, DUE_ID, DUE_STATE, WAITING_HEADERS, MessageId
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place
from duetime.stores.records import Entry, RangeReader, headers_of, of_state
from duetime.tables import RetryPolicy
from duetime.topics import TopicNames

#: How far this machine's clock and the brokers' may differ, in ms.
MARGIN_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A message that could not be delivered."""

    #: When it is tried again, epoch ms: several instants where several copies of it have failed,
    #: and none where it was the last time.
    retries_ms: tuple[int, ...]
    #: Whether there was no such topic. Where there is one by the time that the pipeline looks at
    #: it, it is delivered at once, and waits for no retry.
    was_unknown: bool


def find_failed(identity: MessageId, settings: Settings, now_ms: int) -> Failed | None:
    """What became of this message, if it failed and may wait for a retry.

    What has failed since it was due is read, of the longest time between two tries at most, as far
    as nobody has asked this process for it yet. Raises KafkaError.
    """
    earliest_ms = max(identity.due_ms, now_ms - settings.retry_backoff_max_ms) - MARGIN_MS
    place = TopicNames(settings).failed, 0
    with closing(Offsets(settings, f"{settings.namespace}.reader")) as offsets:
        start = offsets.first_since({place: earliest_ms})[place]
        if start is None:
            return None
        with RangeReader(settings) as reader:
            index = _index(settings.bootstrap, place)
            found = index.of(identity, reader, offsets, start)
            ranges = [OffsetRange(*place, each, each + 1) for each in found]
            entries = [entry for each in ranges for entry in reader.entries_of(identity, [each])]
    return _judged(entries, settings) if entries else None


class Index:
    """Where each id is in a partition: 16 bytes a record. Thread-safe: one reads, others wait."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        #: What is known: offsets from the one up to, not including, the other.
        self._start = self._end = 0
        #: Of each record in it that has an id, in order.
        self._offsets, self._hashes = array("q"), array("q")

    def of(
        self, identity: MessageId, reader: RangeReader, offsets: Offsets, start: int
    ) -> list[int]:
        """Offsets of records, from that one on, that most likely have this id."""
        place = self._place
        with self._lock:
            # Asked here: who waits for the lock with an end would come with an old one.
            first, end = offsets.starts([place])[place], offsets.ends([place])[place]
            self._follow(reader, first, OffsetRange(*place, start, end))
            return list(self._of(hash(str(identity).encode()), start))

    def _follow(self, reader: RangeReader, first: int, asked: OffsetRange) -> None:
        if not self._offsets or self._end > asked.end:
            # Nothing is known yet, or it is of another topic that had this name.
            self._start = self._end = asked.start
            self._offsets, self._hashes = array("q"), array("q")
        if asked.start < self._start:
            offsets, hashes = _read(reader, self._place, asked.start, self._start)
            self._offsets, self._hashes = offsets + self._offsets, hashes + self._hashes
            self._start = asked.start
        offsets, hashes = _read(reader, self._place, max(first, self._end), asked.end)
        self._offsets.extend(offsets)
        self._hashes.extend(hashes)
        self._end = asked.end
        gone = bisect_left(self._offsets, first)
        del self._offsets[:gone], self._hashes[:gone]
        self._start = max(self._start, first)

    def _of(self, hashed: int, start: int) -> Iterator[int]:
        at = bisect_left(self._offsets, start)
        while True:
            try:
                at = self._hashes.index(hashed, at)
            except ValueError:
                return
            yield self._offsets[at]
            at += 1


@lru_cache(maxsize=8)
def _index(bootstrap: str, place: Place) -> Index:  # noqa: ARG001 (they tell it from others)
    """The one that all of this process share."""
    return Index(place)


def _read(
    reader: RangeReader, place: Place, start: int, end: int
) -> tuple["array[int]", "array[int]"]:
    """Offsets of what has an id, and what that is, hashed."""
    offsets, hashes, at = array("q"), array("q"), WAITING_HEADERS.index(DUE_ID)
    for record in reader.records([OffsetRange(*place, start, end)] if start < end else []):
        for name, value in headers_of(record)[at : at + 1]:
            if name == DUE_ID and value is not None:
                offsets.append(record.offset() or 0)
                hashes.append(hash(value))
    return offsets, hashes


def _judged(entries: Sequence[Entry], settings: Settings) -> Failed:
    """What is still to come of all these failures, in order."""
    waiting = dict[int, Entry]()
    for each in entries:
        if each.retry:
            # That retry is over: it is this failure.
            waiting.pop(each.retry.at_ms, None)
        waiting = {ms: one for ms, one in waiting.items() if not _is_next(one, each)}
        if (retry_ms := _retry_ms(each, settings)) is not None:
            waiting[retry_ms] = each
    return Failed(
        retries_ms=tuple(sorted(waiting)),
        was_unknown=all(_was_unknown(each.record) for each in waiting.values()),
    )


def _is_next(failure: Entry, later: Entry) -> bool:
    """Whether the later one came of trying that again, also at once and not at its retry."""
    attempts, failed = (_number(later.record, each) for each in ("attempts", "failed"))
    first_ms = _number(failure.record, "failed") or failure.record.timestamp()[1]
    return attempts == _attempts(failure.record) + 1 and failed == first_ms


def _retry_ms(entry: Entry, settings: Settings) -> int | None:
    """When it is tried again, as the pipeline judges it in `failures`; None where it is over."""
    attempts = _attempts(entry.record) + 1
    policy = settings.retry_topics.get(entry.topic or "", RetryPolicy())
    first_ms = policy.backoff_ms or settings.retry_backoff_ms
    spread = f"{entry.id}:{attempts}"
    wait_ms = backoff_ms(attempts, first_ms, settings.retry_backoff_max_ms, spread)
    retry_ms = entry.record.timestamp()[1] + wait_ms
    is_over = attempts >= (policy.attempts or settings.retry_attempts) or (
        entry.expires_ms is not None and entry.expires_ms < retry_ms
    )
    return None if is_over else retry_ms


def _attempts(record: Message) -> int:
    """How often it was tried before it failed."""
    return _number(record, "attempts") or 0


def _number(record: Message, name: str) -> int | None:
    state = headers_of(record)[WAITING_HEADERS.index(DUE_STATE)][1]
    text = of_state((state or b"").decode(), name)
    return int(text) if text else None


def _was_unknown(record: Message) -> bool:
    said = dict(headers_of(record)).get(DUE_ERROR)
    return said == str(Reason.UNKNOWN_TOPIC).encode()
