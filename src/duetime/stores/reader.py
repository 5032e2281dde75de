"""Looking at what waits in the wheel: nothing is claimed, nothing is committed, and no Spark.

A message that was due in less than the horizon (4 s) when it came in goes through the lanes, not
through the wheel: it is neither found nor counted.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Unpack

from duetime.config import Settings
from duetime.message import MessageId
from duetime.stores import Found, OffsetRange, Pending
from duetime.stores.listing import Listing, Stretch
from duetime.stores.logs import belongs
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place, WheelPlaces
from duetime.stores.records import RangeReader
from duetime.stores.search import WheelSearch
from duetime.stores.selection import Asked, Selection
from duetime.topics import TopicNames
from duetime.wheel import Slot


class WheelReader:
    """What waits in the wheel, for any process that wants to know. Thread-safe."""

    def __init__(self, settings: Settings, offsets: Offsets | None = None) -> None:
        self._settings = settings
        self._wheel = settings.wheel
        self._places = WheelPlaces(settings)
        self._offsets = offsets or Offsets(settings, TopicNames(settings).release_group)

    def pending(self, now_ms: int) -> list[Pending]:
        """How many records wait in each slot, in order of time; from offsets alone.

        Cancels, what they cancel, and duplicates count until the slot's time. Raises KafkaError.
        """
        stretches = sorted(self.stretches(now_ms), key=lambda each: (each.end_ms, each.slot))
        return [
            Pending(
                slot=each.slot,
                start_ms=self._wheel.start_ms(each.slot),
                end_ms=each.end_ms,
                count=each.range.count,
            )
            for each in stretches
        ]

    def messages(
        self, now_ms: int, *, limit: int | None = None, **asked: Unpack[Asked]
    ) -> Iterator[Found]:
        """The messages that wait, by due time, and by name where that is the same.

        One that failed is due when it is tried again.

        Those that are asked for. Cancelled ones are left out, and of those with one id all but one.
        Only the slots that overlap the range of time are read, each as it was when the look began;
        of a slot some 64 MiB are held at a time, and a larger one is read several times. Raises
        KafkaError.
        """
        selection = Selection.of(**asked)
        stretches = [
            each
            for each in self.stretches(now_ms)
            if each.overlaps(selection.from_ms, selection.to_ms)
        ]
        with RangeReader(self._settings) as reader:
            listing = Listing(reader=reader, stretches=stretches, selection=selection)
            yield from islice(listing, limit)

    def find(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        now_ms: int,
        *,
        retry_ms: int | None = None,
    ) -> Found | None:
        """The message with this id, if it waits; `cancelled` if a cancel waits for it too.

        Reads one slot a level at most. Raises KafkaError.
        """
        return self.search(id, retry_ms=retry_ms).find(now_ms)

    def search(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        *,
        retry_ms: int | None = None,
    ) -> WheelSearch:
        """Return a search for this id that reads nothing twice."""
        due_ms = id.due_ms if retry_ms is None else retry_ms
        covering = self._places.covering(due_ms)
        return WheelSearch(
            self._settings,
            self._offsets,
            id,
            due_ms,
            lambda now_ms: self.stretches(now_ms, covering),
        )

    def ranges(self) -> list[OffsetRange]:
        """Where everything lies that waits, cancels and duplicates too. Raises KafkaError."""
        waiting = self._waiting(self._places.all())
        ranges = [OffsetRange(*place, start, end) for place, (start, end) in waiting.items()]
        return [each for each in ranges if each.count > 0]

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def stretches(self, now_ms: int, places: Iterable[Place] | None = None) -> list[Stretch]:
        """What waits in these partitions, or in all."""
        waiting = self._waiting(list(self._places.all() if places is None else places))
        slots = {place: self._places.slot_filling(place, now_ms) for place in waiting}
        # A turn's records are told from an earlier turn's by their age.
        turns = self._offsets.first_since(
            {place: self._wheel.filled_from_ms(slot) for place, slot in slots.items()}
        )
        stretches = []
        for place, (start, end) in waiting.items():
            first = turns[place]
            turn = end if first is None else min(max(first, start), end)
            stretches += [
                self._left_over(slots[place], OffsetRange(*place, start, turn)),
                self._filling(slots[place], OffsetRange(*place, turn, end)),
            ]
        return [each for each in stretches if each.range.count > 0]

    def _waiting(self, places: list[Place]) -> dict[Place, tuple[int, int]]:
        """The offsets between which records wait, where some do."""
        commits, ends = self._offsets.commits(places), self._offsets.ends(places)
        ids = self._offsets.topic_ids(topic for topic, _ in places)
        committed = {
            place: commit.offset
            for place, commit in commits.items()
            if belongs(commit, ends[place], ids.get(place[0]))
        }
        lagging = [place for place in places if ends[place] > committed.get(place, 0)]
        starts = {
            place: max(start, committed.get(place, 0))
            for place, start in self._offsets.starts(lagging).items()
        }
        return {place: (start, ends[place]) for place, start in starts.items()}

    def _filling(self, slot: Slot, offsets: OffsetRange) -> Stretch:
        return Stretch(
            slot=slot,
            start_ms=self._wheel.start_ms(slot),
            end_ms=self._wheel.end_ms(slot),
            range=offsets,
        )

    def _left_over(self, filling: Slot, offsets: OffsetRange) -> Stretch:
        """What the turn before this one has left, or an earlier one: due at any time up to then."""
        slot = Slot(filling.level, filling.number - self._wheel.ring)
        return Stretch(slot=slot, start_ms=0, end_ms=self._wheel.end_ms(slot), range=offsets)


def within(slots: Iterable[Pending], from_ms: int | None, to_ms: int | None) -> list[Pending]:
    """The slots that hold anything due in the range; those at its ends hold more than that."""
    return [
        slot
        for slot in slots
        if slot.count
        and (from_ms is None or slot.end_ms > from_ms)
        and (to_ms is None or slot.start_ms < to_ms)
    ]
