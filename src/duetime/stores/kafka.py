"""The default store: the wheel's topics. Waiting costs disk; progress is a group's offsets.

The group's lag on a slot's partition is the number of records that wait there, for every Kafka tool
to read. A partition holds one slot after another (the ring), so a partition is taken up to its
present end, and what lies before the present slot's earliest possible append is what an earlier
turn missed.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from duetime.config import Settings
from duetime.errors import KafkaError, words
from duetime.message import MessageId
from duetime.stores import ANY_TIME, DueTimes, Found, OffsetRange, Pending
from duetime.stores.keeping import Keeping
from duetime.stores.logs import LogNote, belongs, is_same_topic
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place, WheelPlaces
from duetime.stores.reader import WheelReader
from duetime.topics import TopicNames
from duetime.wheel import Slot

log = logging.getLogger(__name__)

#: How often offsets are committed that have not changed, in seconds. Slots of the upper levels last
#: for days and months, and brokers forget offsets after a week (offsets.retention.minutes).
RECOMMIT_S = 86_400.0

#: How long before its slot is taken up a partition is left alone, in ms.
CALM_MS = 60_000


class KafkaStore:
    """The wheel in Kafka, as one planner sees it. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        keeping: Keeping | None = None,
        may_commit: Callable[[], bool] = lambda: True,
    ) -> None:
        """`keeping` knows whether somebody reads what is to be freed.

        `may_commit` says whether we lead: the group takes commits of anybody.
        """
        self._keeping = keeping or Keeping()
        self._may_commit = may_commit
        self._wheel = settings.wheel
        self._places = WheelPlaces(settings)
        self._offsets = Offsets(settings, TopicNames(settings).release_group)
        self._reader = WheelReader(settings, self._offsets)
        self._settled: dict[Place, int] = {}
        #: What the last run had taken up and not settled, and since when.
        self._begun: dict[Place, int] = {}
        #: Of which topic what is settled is: one that is created again has another id.
        self._topic_ids: dict[Place, str] = {}
        self._claimed: set[Place] = set()
        self._lock = threading.Lock()
        self._recommit_s = time.monotonic() + RECOMMIT_S
        #: What the clock said the last time.
        self._seen_ms = 0
        self._load()

    @property
    def levels(self) -> int:
        """Those of the wheel."""
        return self._wheel.levels

    def due(self, slot: Slot) -> Sequence[OffsetRange]:
        """Claim what waits in the slot now."""
        return self._claim(self._offsets.ends([self._places.of(slot)]))

    def overdue(self, now_ms: int) -> Sequence[OffsetRange]:
        """Claim what lies before anything that the present slot of its partition can hold."""
        lagging = self._lagging()
        starts = self._pass_over_removed(lagging)
        slots = {place: self._places.slot_filling(place, now_ms) for place in lagging}
        since = self._offsets.first_since(
            {place: self._wheel.filled_from_ms(slot) for place, slot in slots.items()}
        )
        ends = {
            place: end
            for place, end in lagging.items()
            if (first := since[place]) is None or first > self._settled[place]
        }
        # Where what is settled is not freed, the first record that is there is none of these.
        freed = [place for place in ends if starts[place] >= self._settled[place]]
        return self._claim(ends, self._due_times(freed, now_ms))

    def begin(self, claims: Iterable[OffsetRange], now_ms: int) -> None:
        """Note it with the committed offsets: one request, and no topic of its own."""
        begun = {
            (each.topic, each.partition): now_ms if each.begun_ms is None else each.begun_ms
            for each in claims
        }
        starts = {(each.topic, each.partition): each.start for each in claims}
        self._commit(starts, begun)
        with self._lock:
            self._begun |= begun

    def settle(self, claims: Iterable[OffsetRange]) -> None:
        """Commit, then free. What a crash between the two leaves, the next start frees."""
        ends = {(each.topic, each.partition): each.end for each in claims}
        # What is freed of another topic would be messages that nobody has read.
        other = self._of_other_topics(ends)
        with self._lock:
            self._claimed -= other
        self._rewind(other)
        settled = {place: end for place, end in ends.items() if place not in other}
        self._commit(settled)
        with self._lock:
            self._settled |= settled
            self._claimed -= ends.keys()
            for place in settled:
                self._begun.pop(place, None)
        self._keeping.free(settled, self._offsets.delete_before)

    def give_up(self, claims: Iterable[OffsetRange]) -> None:
        """Drop the claim: rescue finds what it held."""
        with self._lock:
            self._claimed -= {(each.topic, each.partition) for each in claims}

    def look_after(self, now_ms: int) -> None:
        """Keep the commits true while time goes on: to be called about once a second."""
        if now_ms < self._seen_ms:
            self._begin_no_later(now_ms)
        self._seen_ms = now_ms
        if time.monotonic() >= self._recommit_s:
            self._recommit_s = time.monotonic() + RECOMMIT_S
            self._recommit(now_ms)

    def _begin_no_later(self, now_ms: int) -> None:
        """Note what is begun as begun now: the clock was set back.

        What it sends from now on may be stamped by this clock, and would be looked for too late. A
        range that is settled at this instant may be noted as begun: it is read back then.
        """
        with self._lock:
            later = [place for place, at_ms in self._begun.items() if at_ms > now_ms]
            begun = dict.fromkeys(later, now_ms)
            self._begun |= begun
            starts = {place: self._settled[place] for place in later}
        self._commit(starts, begun)

    def _recommit(self, now_ms: int) -> None:
        """Commit what has not changed for a day: brokers forget it after a week.

        Of partitions that nobody works on, and whose slot is not about to be taken up. Meanwhile
        they are claimed: no commit overtakes another one.
        """
        with self._lock:
            free = [each for each in self._settled if each not in self._claimed]
            calm = [each for each in free if self._places.rests(each, now_ms, CALM_MS)]
            settled = {place: self._settled[place] for place in calm}
            begun = {place: self._begun[place] for place in calm if place in self._begun}
            self._claimed |= settled.keys()
        try:
            self._commit(settled, begun)
        finally:
            with self._lock:
                self._claimed -= settled.keys()

    def find(self, id: MessageId, now_ms: int) -> Found | None:  # noqa: A002 (what all call it)
        """The message with this id, if it waits."""
        return self._reader.find(id, now_ms)

    def pending(self, now_ms: int) -> Iterator[Pending]:
        """What waits, slot by slot, in order of time."""
        return iter(self._reader.pending(now_ms))

    def free(self, offsets: Mapping[Place, int], kept_since_ms: int | None = None) -> None:
        """Give the disk back that records before these offsets take, of any topic.

        But not what was appended since then, in epoch ms.
        """
        if kept_since_ms is not None:
            kept = self._offsets.first_since(dict.fromkeys(offsets, kept_since_ms))
            offsets = {
                place: at if (first := kept[place]) is None else min(at, first)
                for place, at in offsets.items()
            }
        self._keeping.free(offsets, self._offsets.delete_before)

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def places(self) -> list[Place]:
        """Every partition of the wheel."""
        return self._places.all()

    def _load(self) -> None:
        """Find where each partition goes on.

        That is committed again, because offsets expire that are not, and where nothing is yet: so
        what someone else removes from then on is noticed. What a crash has left settled is freed.
        """
        places = self._places.all()
        commits, starts = self._offsets.commits(places), self._offsets.starts(places)
        ends, ids = self._offsets.ends(places), self._ids_of(places)
        other = [
            place for place, one in commits.items() if not belongs(one, ends[place], ids.get(place))
        ]
        committed = {place: one.offset for place, one in commits.items() if place not in other}
        for place in committed:
            begun_ms = LogNote.parse(commits[place].note).begun_ms
            if begun_ms is not None:
                self._begun[place] = begun_ms
        self._topic_ids = ids
        kept = {place: at for place, at in (starts | committed).items() if place not in other}
        self._offsets.commit(kept, self._notes(kept, self._begun))
        self._offsets.delete_before(committed)
        _tell_removed(committed, starts)
        self._settled = {
            place: max(committed.get(place, 0), start) for place, start in starts.items()
        }
        self._rewind(other)

    def _rewind(self, places: Collection[Place]) -> None:
        """Go on from the start of these logs, where an offset of another log was settled.

        What is there is read back, as if it had been taken up when it was appended: some of it may
        have been, before the log lost its end.
        """
        if not places:
            return
        starts, ids = self._offsets.starts(places), self._ids_of(places)
        first_ms = self._offsets.first_appended_ms(places)
        with self._lock:
            # What is claimed meanwhile is looked at when it is settled.
            starts = {place: at for place, at in starts.items() if place not in self._claimed}
            begun = {place: first_ms[place] for place in starts if first_ms[place] >= 0}
            self._keeping.forget(starts)
            self._settled |= starts
            self._topic_ids |= {place: one for place, one in ids.items() if place in starts}
            for place in starts:
                self._begun.pop(place, None)
            self._begun |= begun
        self._offsets.commit(starts, self._notes(starts, begun))
        for topic in sorted({topic for topic, _ in starts}):
            log.error(
                "the log ends before what is settled, or the topic was created again: reading it "
                "from its start, without what was delivered before; see whether the brokers lost "
                "records topic=%s partitions=%d",
                topic,
                sum(place[0] == topic for place in starts),
            )

    def _of_other_topics(self, places: Iterable[Place]) -> set[Place]:
        """Return those whose topic is not the one that was settled."""
        ids = self._ids_of(places)
        with self._lock:
            return {
                place
                for place, one in ids.items()
                if not is_same_topic(self._topic_ids.get(place), one)
            }

    def _ids_of(self, places: Iterable[Place]) -> dict[Place, str]:
        """Return the topic id of each partition, where brokers give topics ids."""
        wanted = list(places)
        ids = self._offsets.topic_ids(topic for topic, _ in wanted)
        return {place: ids[place[0]] for place in wanted if place[0] in ids}

    def _notes(
        self, places: Iterable[Place], begun: Mapping[Place, int] = MappingProxyType({})
    ) -> dict[Place, str]:
        """Return the note for a commit of each partition."""
        with self._lock:
            return {
                place: LogNote(
                    topic_id=self._topic_ids.get(place), begun_ms=begun.get(place)
                ).text()
                for place in places
            }

    def _commit(
        self, offsets: Mapping[Place, int], begun: Mapping[Place, int] = MappingProxyType({})
    ) -> None:
        """Commit, with when it was begun. Raises KafkaError where another may lead by now."""
        if not self._may_commit():
            raise KafkaError("the lead is lost: whoever leads next says what is begun and settled")
        self._offsets.commit(offsets, self._notes(offsets, begun))

    def _due_times(self, places: Iterable[Place], now_ms: int) -> dict[Place, DueTimes]:
        """When what is overdue was due, which is told: it is taken up without it, too."""
        try:
            appended_ms = self._offsets.first_appended_ms(places)
        except KafkaError as error:
            log.warning("could not look when what is overdue was due error=%s", words(error))
            return {}
        return {
            place: self._places.left_over(place, ms, now_ms)
            for place, ms in appended_ms.items()
            # By now someone else may have removed all.
            if ms >= 0
        }

    def _pass_over_removed(self, places: Iterable[Place]) -> dict[Place, int]:
        """Where each of them starts now."""
        starts = self._offsets.starts(places)
        with self._lock:
            beyond = {
                place: start for place, start in starts.items() if start > self._settled[place]
            }
            _tell_removed(self._settled, beyond)
            self._settled |= beyond
        return starts

    def _lagging(self) -> dict[Place, int]:
        with self._lock:
            free = [place for place in self._settled if place not in self._claimed]
        ends, other = self._offsets.ends(free), self._of_other_topics(free)
        other |= {place for place, end in ends.items() if end < self._settled[place]}
        self._rewind(other)
        return {place: end for place, end in ends.items() if end > self._settled[place]}

    def _claim(
        self, ends: Mapping[Place, int], due: Mapping[Place, DueTimes] = MappingProxyType({})
    ) -> list[OffsetRange]:
        """Ranges up to these ends, of the partitions that nobody works on."""
        with self._lock:
            ranges = [
                OffsetRange(
                    topic,
                    partition,
                    self._settled[topic, partition],
                    end,
                    self._begun.get((topic, partition)),
                    due.get((topic, partition), ANY_TIME),
                )
                for (topic, partition), end in ends.items()
                if (topic, partition) not in self._claimed and end > self._settled[topic, partition]
            ]
            self._claimed |= {(each.topic, each.partition) for each in ranges}
        return ranges


def _tell_removed(settled: Mapping[Place, int], starts: Mapping[Place, int]) -> None:
    """Records between the two were removed by someone: we free what is settled, and no more."""
    for place, start in starts.items():
        if (lost := start - settled.get(place, start)) > 0:
            log.error(
                "records removed before they were due topic=%s partition=%d records=%d: "
                "check the topic with `duetime topics`",
                *place,
                lost,
            )
