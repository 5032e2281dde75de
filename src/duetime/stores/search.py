"""Searching the wheel for one id, as often as needed, without reading anything twice."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from duetime.config import Settings
from duetime.message import MessageId
from duetime.stores import Found, OffsetRange
from duetime.stores.index import FETCH_BYTES, LEAST_RECORDS, NEAR, IndexReader
from duetime.stores.listing import Stretch
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place
from duetime.stores.records import Entry, RangeReader
from duetime.topics import TopicNames


class WheelSearch:
    """Finds the message with one id. Each look reads what was appended since the one before.

    A look takes as long as its records take to read, so only the first one may be long. Not
    thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        offsets: Offsets,
        id: MessageId,  # noqa: A002 (what all call it)
        due_ms: int,
        stretches: Callable[[int], Iterable[Stretch]],
    ) -> None:
        """`due_ms` is when the message is due; `stretches` gives what waits at an instant."""
        self._settings, self._offsets = settings, offsets
        self._id, self._due_ms = id, due_ms
        self._stretches = stretches
        #: The records with this id.
        self._entries = list[Entry]()
        #: The offset up to which each partition has been read.
        self._read = dict[Place, int]()

    def find(self, now_ms: int) -> Found | None:
        """Return the message if it waits; `cancelled` if a cancel waits for it too.

        Raises KafkaError; the search can go on after that.
        """
        ranges = self._ranges(now_ms)
        self._entries += self._read_entries(self._unread(ranges))
        # Only now: a look that failed is repeated in full.
        self._read |= {(each.topic, each.partition): each.end for each in ranges}
        # What has been settled since does not wait any more.
        self._entries = [each for each in self._entries if _is_in(each, ranges)]
        return _found(self._entries)

    def _ranges(self, now_ms: int) -> list[OffsetRange]:
        """Return where the message may be, up to the first open transaction of each partition."""
        ranges = [
            each.range
            for each in self._stretches(now_ms)
            if each.overlaps(self._due_ms, self._due_ms + 1)
        ]
        # A transaction that is open now may end before the next look, and is read by that one.
        places = {(each.topic, each.partition) for each in ranges}
        ends = self._offsets.ends(places, committed_only=True)
        return [
            replace(each, end=max(each.start, min(each.end, ends[each.topic, each.partition])))
            for each in ranges
        ]

    def _unread(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        unread = [
            replace(each, start=max(each.start, self._read.get((each.topic, each.partition), 0)))
            for each in ranges
        ]
        return [each for each in unread if each.count > 0]

    def _read_entries(self, ranges: list[OffsetRange]) -> list[Entry]:
        if not ranges:
            return []
        small = [each for each in ranges if each.count < LEAST_RECORDS]
        large = [each for each in ranges if each.count >= LEAST_RECORDS]
        with RangeReader(self._settings) as reader:
            entries = list(reader.entries_of(self._id, small))
            for each in large:
                entries += self._look_up(each, reader)
        return [each for each in entries if each.due_ms == self._due_ms]

    def _look_up(self, waiting: OffsetRange, reader: RangeReader) -> Iterator[Entry]:
        """Give the entries with this id of a large range, with the help of its index."""
        group = TopicNames(self._settings).index_group
        with RangeReader(self._settings, group=group, fetch_bytes=FETCH_BYTES) as singly:
            # One part at a time: a consumer reads one range of a partition.
            for part in IndexReader(singly).narrowed(self._id, waiting):
                by = singly if part.count <= NEAR else reader
                yield from by.entries_of(self._id, [part])


def _is_in(entry: Entry, ranges: Iterable[OffsetRange]) -> bool:
    place = entry.record.topic(), entry.record.partition()
    return any(
        place == (each.topic, each.partition) and each.start <= entry.offset < each.end
        for each in ranges
    )


def _found(entries: Iterable[Entry]) -> Found | None:
    """Return the first message among the records with one id, and whether a cancel is there."""
    message, cancelled = None, False
    for entry in entries:
        cancelled = cancelled or entry.topic is None
        if message is None and entry.topic is not None:
            message = entry
    return message.found(cancelled=cancelled) if message else None
