"""The reader of the wheel: finds, counts and lists messages. No claims, no commits, no Spark.

A message due in less than the short-delay threshold (4 s) when it came in goes through the lanes
instead: it is neither found nor counted.

Unsettled records of a partition form one or two *slot ranges*: those of its current slot, preceded
by those that an earlier turn of the ring left. Ranges of different levels overlap in time, so a
listing merges them. It reads a range when the merge reaches its start. By then every record with
the same due time is known, cancels included, whatever level it waits on.
"""

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from duetime.core.messages import LATEST_MS, MessageId, PendingMessage, SortKey
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import DueTimes, OffsetRange, Offsets, Partition, belongs
from duetime.kafka.range_reader import Entry, RangeReader
from duetime.stores import MessageFilter, PendingSlot, Reader, Search
from duetime.stores.slot_index import FETCH_BYTES, MIN_INDEXED_RECORDS, NEAR_OFFSETS, IndexReader

#: The most of one slot range held in memory, in bytes. A longer range is read several times.
MAX_HELD_BYTES = 64 * 1024 * 1024

#: Before and after every message in the order of a listing.
FIRST_SORT_KEY, END_SORT_KEY = SortKey(-1, ""), SortKey(LATEST_MS + 1, "")

#: A record and its sort key.
ListedEntry = tuple[SortKey, Entry]


class SlotPartitions:
    """Maps slots of the wheel to partitions of its topics, and back."""

    def __init__(self, settings: Settings) -> None:
        self._names = TopicNames(settings)
        self._wheel = settings.wheel
        self._lead_ms = settings.release_lead_ms

    def all(self) -> list[Partition]:
        """Return every partition of the wheel."""
        levels, numbers = range(self._wheel.levels), range(self._wheel.partitions)
        return [(self._names.wheel(level), each) for level in levels for each in numbers]

    def of(self, slot: Slot) -> list[Partition]:
        """Return the partitions that hold the slot."""
        topic = self._names.wheel(slot.level)
        return [(topic, each) for each in self._wheel.partitions_of(slot)]

    def covering(self, instant_ms: int, message_id: str) -> list[Partition]:
        """Return, for each level, the id's partition of the slot that covers the instant."""
        levels = range(self._wheel.levels)
        slots = (Slot(level, self._wheel.number(level, instant_ms)) for level in levels)
        return [
            (self._names.wheel(slot.level), self._wheel.partition(slot, message_id))
            for slot in slots
        ]

    def current_slot(self, partition: Partition, now_ms: int) -> Slot:
        """Return the first slot of the partition that is not closed at `now_ms`."""
        level, number = _level_and_number(partition)
        return self._wheel.current_slot(level, number, now_ms, self._lead_ms)

    def is_idle(self, partition: Partition, now_ms: int, for_ms: int) -> bool:
        """Return whether no slot of the partition closes within `for_ms`."""
        slot = self.current_slot(partition, now_ms)
        return self._wheel.release_at_ms(slot, self._lead_ms) > now_ms + for_ms

    def overdue_times(self, partition: Partition, appended_ms: int, now_ms: int) -> DueTimes:
        """Return when messages left from earlier turns of the ring are due.

        `appended_ms` is when the first of them was appended.
        """
        level, number = _level_and_number(partition)
        first = self._wheel.slot_filled(level, number, appended_ms)
        last = Slot(level, self.current_slot(partition, now_ms).number - self._wheel.ring)
        return DueTimes(self._wheel.start_ms(first), self._wheel.end_ms(last))


def _level_and_number(partition: Partition) -> tuple[int, int]:
    topic, number = partition
    return int(topic.rpartition(".")[2]), number


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRange:
    """Records of one partition that are due from `start_ms` up to, not including, `end_ms`."""

    slot: Slot
    start_ms: int
    end_ms: int
    range: OffsetRange

    def overlaps(self, from_ms: int, to_ms: int) -> bool:
        """Return whether a record may be due from `from_ms` up to, not including, `to_ms`."""
        return self.start_ms < to_ms and self.end_ms > from_ms


class WheelReader(Reader):
    """The messages that wait in the wheel. Raises KafkaError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wheel = settings.wheel
        self._partitions = SlotPartitions(settings)
        self._offsets = Offsets(settings, TopicNames(settings).release_group)

    def search(self, message_id: MessageId, *, retry_ms: int | None = None) -> Search:
        """Return a search that reads the id's part of one slot a level, and nothing twice."""
        due_ms = message_id.due_ms if retry_ms is None else retry_ms
        slot_ranges = partial(
            self.slot_ranges, partitions=self._partitions.covering(due_ms, str(message_id))
        )
        return WheelSearch(self._settings, self._offsets, message_id, due_ms, slot_ranges).find

    def pending(self, now_ms: int) -> list[PendingSlot]:
        """Count the records of each slot, from offsets alone.

        Cancels, what they cancel, and duplicates count until the slot is released.
        """
        counts = Counter[Slot]()
        for each in self.slot_ranges(now_ms):
            counts[each.slot] += each.range.count
        found = [
            PendingSlot(
                slot=slot,
                start_ms=self._wheel.start_ms(slot),
                end_ms=self._wheel.end_ms(slot),
                count=count,
            )
            for slot, count in counts.items()
        ]
        return sorted(found, key=lambda each: (each.end_ms, each.slot))

    def matching(self, message_filter: MessageFilter, now_ms: int) -> Iterator[PendingMessage]:
        """Yield the messages that match, in order; see `Reader.messages`.

        Reads only slots that overlap the filter's time range, as they were at the call. Holds some
        64 MiB of a slot; a larger slot is read several times.
        """
        slot_ranges = [
            each
            for each in self.slot_ranges(now_ms)
            if each.overlaps(message_filter.from_ms, message_filter.to_ms)
        ]
        with RangeReader(self._settings) as reader:
            yield from Listing(
                reader=reader, slot_ranges=slot_ranges, message_filter=message_filter
            )

    def ranges(self) -> list[OffsetRange]:
        """Return the ranges of all unsettled records, cancels and duplicates included."""
        unsettled = self._unsettled(self._partitions.all())
        return [each for each in unsettled.values() if each.count > 0]

    def slot_ranges(
        self, now_ms: int, partitions: Iterable[Partition] | None = None
    ) -> list[SlotRange]:
        """Return the unsettled records of these partitions, or of all, by slot."""
        unsettled = self._unsettled(
            list(self._partitions.all() if partitions is None else partitions)
        )
        slots = {each: self._partitions.current_slot(each, now_ms) for each in unsettled}
        # Records of this turn of the ring differ from those of an earlier one by their age.
        first_of_slot = self._offsets.first_since(
            {each: self._wheel.earliest_append_ms(slot) for each, slot in slots.items()}
        )
        found = list[SlotRange]()
        for partition, whole in unsettled.items():
            slot, first = slots[partition], first_of_slot[partition]
            middle = whole.end if first is None else min(max(first, whole.start), whole.end)
            earlier = Slot(slot.level, slot.number - self._wheel.ring)
            found += [
                # Left by the previous turn, or by one before it: due at any time up to its end.
                self._slot_range(earlier, 0, replace(whole, end=middle)),
                self._slot_range(slot, self._wheel.start_ms(slot), replace(whole, start=middle)),
            ]
        return [each for each in found if each.range.count > 0]

    def close(self) -> None:
        """Close the connections."""
        self._offsets.close()

    def _slot_range(self, slot: Slot, start_ms: int, offsets: OffsetRange) -> SlotRange:
        end_ms = self._wheel.end_ms(slot)
        return SlotRange(slot=slot, start_ms=start_ms, end_ms=end_ms, range=offsets)

    def _unsettled(self, partitions: list[Partition]) -> dict[Partition, OffsetRange]:
        """Return the unsettled range of each partition that lags behind its end."""
        commits, ends = self._offsets.commits(partitions), self._offsets.ends(partitions)
        ids = self._offsets.topic_ids(topic for topic, _ in partitions)
        committed = {
            each: commit.offset
            for each, commit in commits.items()
            if belongs(commit, ends[each], ids.get(each[0]))
        }
        lagging = [each for each in partitions if ends[each] > committed.get(each, 0)]
        return {
            each: OffsetRange(*each, max(start, committed.get(each, 0)), ends[each])
            for each, start in self._offsets.starts(lagging).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """An iterable of the messages in some slot ranges, in order, each once."""

    reader: RangeReader
    slot_ranges: Sequence[SlotRange]
    message_filter: MessageFilter
    max_held_bytes: int = MAX_HELD_BYTES
    #: By sort key: a cancel for another due time than its message's cancels nothing.
    _cancelled: set[SortKey] = field(default_factory=set, init=False)

    def __iter__(self) -> Iterator[PendingMessage]:
        last: SortKey | None = None
        streams = [self._stream(each) for each in self.slot_ranges]
        for sort_key, entry in heapq.merge(*streams, key=_sort_key):
            if entry is not None and sort_key != last and sort_key not in self._cancelled:
                last = sort_key
                yield entry.to_message()

    def _stream(self, slot_range: SlotRange) -> Iterator[tuple[SortKey, Entry | None]]:
        # The merge takes a stream's first element at once, and the second when it reaches the
        # first one's key. Nothing is read until then.
        yield SortKey(slot_range.start_ms, ""), None
        after, is_complete = FIRST_SORT_KEY, False
        while not is_complete:
            entries, is_complete = self._next_part(slot_range, after)
            yield from entries
            after = entries[-1][0] if entries else after

    def _next_part(self, slot_range: SlotRange, after: SortKey) -> tuple[list[ListedEntry], bool]:
        """Return as many of the next messages as may be held, and whether they are the last."""
        held, size_bytes, end = list[ListedEntry](), 0, END_SORT_KEY
        for sort_key, entry in self._matching(slot_range):
            if not after < sort_key < end:
                continue
            held.append((sort_key, entry))
            size_bytes += entry.size_bytes
            if size_bytes > self.max_held_bytes and len(held) > 1:
                held, size_bytes = _first(held, self.max_held_bytes // 2)
                end = held[-1][0]
        held.sort(key=_sort_key)
        return held, end is END_SORT_KEY

    def _matching(self, slot_range: SlotRange) -> Iterator[ListedEntry]:
        """Yield the matching messages; remember cancels on the way."""
        for entry in self.reader.entries([slot_range.range]):
            sort_key = entry.sort_key
            if not self.message_filter.matches(entry.topic, sort_key):
                continue
            if entry.topic is None:
                self._cancelled.add(sort_key)
            else:
                yield sort_key, entry


def _first(held: list[ListedEntry], max_bytes: int) -> tuple[list[ListedEntry], int]:
    """Return the first messages in order, at most `max_bytes` but at least one; their bytes."""
    # A stable sort: of duplicates, the first stays first.
    held.sort(key=_sort_key)
    sizes_bytes = list(accumulate(entry.size_bytes for _, entry in held))
    count = max(1, bisect_right(sizes_bytes, max_bytes))
    return held[:count], sizes_bytes[count - 1]


def _sort_key(listed: tuple[SortKey, object]) -> SortKey:
    return listed[0]


class WheelSearch:
    """Finds the message with one id; see `Search`. Reads what was appended since the last call.

    A call takes as long as its records take to read, so only the first may be long. Not
    thread-safe.
    """

    def __init__(
        self,
        settings: Settings,
        offsets: Offsets,
        message_id: MessageId,
        due_ms: int,
        slot_ranges: Callable[[int], Iterable[SlotRange]],
    ) -> None:
        """Search what `slot_ranges` returns for an instant for a message due at `due_ms`."""
        self._settings, self._offsets = settings, offsets
        self._id, self._due_ms = message_id, due_ms
        self._slot_ranges = slot_ranges
        #: The unsettled records with this id.
        self._entries = list[Entry]()
        #: The offset up to which each partition has been read.
        self._read_up_to = dict[Partition, int]()

    def find(self, now_ms: int) -> PendingMessage | None:
        """See `Reader.find`. Raises KafkaError; the search can continue after that."""
        ranges = self._ranges(now_ms)
        self._entries += self._read(
            replace(each, start=max(each.start, self._read_up_to.get(each.place, 0)))
            for each in ranges
        )
        # Only now: after an error everything is read again.
        self._read_up_to |= {each.place: each.end for each in ranges}
        # Records settled since then do not wait any longer.
        self._entries = [each for each in self._entries if _is_in(each, ranges)]
        message = next((each for each in self._entries if each.topic is not None), None)
        is_cancelled = any(each.topic is None for each in self._entries)
        return message.to_message(cancelled=is_cancelled) if message else None

    def _ranges(self, now_ms: int) -> list[OffsetRange]:
        """Return where the message may be, up to the first open transaction of each partition."""
        ranges = [
            each.range
            for each in self._slot_ranges(now_ms)
            if each.overlaps(self._due_ms, self._due_ms + 1)
        ]
        # A transaction that is open now may be committed later: the next call reads it.
        ends = self._offsets.ends({each.place for each in ranges}, committed_only=True)
        return [
            replace(each, end=max(each.start, min(each.end, ends[each.place]))) for each in ranges
        ]

    def _read(self, ranges: Iterable[OffsetRange]) -> list[Entry]:
        unread = [each for each in ranges if each.count > 0]
        if not unread:
            return []
        small = [each for each in unread if each.count < MIN_INDEXED_RECORDS]
        large = [each for each in unread if each.count >= MIN_INDEXED_RECORDS]
        with RangeReader(self._settings) as reader:
            entries = list(reader.entries_of(self._id, small))
            for each in large:
                entries += self._look_up(each, reader)
        return [each for each in entries if each.due_ms == self._due_ms]

    def _look_up(self, large: OffsetRange, reader: RangeReader) -> Iterator[Entry]:
        group = TopicNames(self._settings).index_group
        with RangeReader(self._settings, group=group, fetch_bytes=FETCH_BYTES) as single_reader:
            # One part at a time: a consumer reads one range of a partition.
            for part in IndexReader(single_reader).narrowed(self._id, large):
                best = single_reader if part.count <= NEAR_OFFSETS else reader
                yield from best.entries_of(self._id, [part])


def _is_in(entry: Entry, ranges: Iterable[OffsetRange]) -> bool:
    place = entry.record.topic(), entry.record.partition()
    return any(place == each.place and each.start <= entry.offset < each.end for each in ranges)
