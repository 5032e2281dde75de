"""The default store: the wheel's topics. Waiting costs disk, and progress is a group's offsets.

The lag of the release group on a slot's partition is the number of records that wait there, visible
to every Kafka tool. A partition holds one slot after another (the ring), so a claim reaches to the
partition's current end. Records before the earliest possible append of the current slot were missed
by an earlier release job: they are overdue.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from duetime.core.errors import KafkaError, error_text
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.core.topics import TopicNames
from duetime.kafka.leadership import Generations, next_generation
from duetime.kafka.offsets import (
    ANY_TIME,
    DueTimes,
    LogIdentity,
    OffsetRange,
    Offsets,
    Partition,
    Position,
    is_same_topic,
)
from duetime.stores.wheel_reader import SlotPartitions

log = logging.getLogger(__name__)

#: How often unchanged offsets are committed again, in seconds. Slots of the upper levels last for
#: days and months, and brokers forget offsets after a week (offsets.retention.minutes).
RECOMMIT_INTERVAL_S = 86_400.0

#: A partition whose slot closes within this time is not committed again, in ms.
RECOMMIT_MARGIN_MS = 60_000

#: Deletes the records before these offsets.
DeleteBefore = Callable[[Mapping[Partition, int]], object]


class DeletionGuard:
    """Defers record deletion while recovery is reading. Thread-safe.

    Records are recovery's only evidence of what was already delivered. A message is written to its
    next partition before it is deleted from the previous one. A reader of one partition after the
    other would miss a message that moved and was deleted in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._deferred: dict[Partition, int] = {}

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Defer every deletion that is requested within this block."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def discard(self, partitions: Iterable[Partition]) -> None:
        """Drop deferred deletions of these partitions, whose logs were replaced."""
        with self._lock:
            for partition in partitions:
                self._deferred.pop(partition, None)

    def delete(self, offsets: Mapping[Partition, int], delete_before: DeleteBefore) -> None:
        """Delete records before `offsets`, and what was deferred; or defer it all."""
        with self._lock:
            for partition, offset in offsets.items():
                self._deferred[partition] = max(offset, self._deferred.get(partition, 0))
            if self._readers:
                return
            deletable, self._deferred = self._deferred, {}
        delete_before(deletable)


class KafkaStore:
    """The wheel in Kafka, for the one scheduler that leads. Thread-safe. Raises KafkaError."""

    def __init__(
        self,
        settings: Settings,
        deletion_guard: DeletionGuard | None = None,
        may_commit: Callable[[], bool] = lambda: True,
        generations: Generations | None = None,
    ) -> None:
        """Read the committed offsets, and log records that were removed before they were due.

        `deletion_guard` defers deletions while recovery reads. `may_commit` returns whether this
        process leads: the group accepts commits from any process. `generations` has the number of
        the leader before us, and gets ours.
        """
        self._deletion_guard = deletion_guard or DeletionGuard()
        self._may_commit = may_commit
        self._wheel = settings.wheel
        self._partitions = SlotPartitions(settings)
        self._offsets = Offsets(settings, TopicNames(settings).release_group)
        self._lock = threading.Lock()
        self._settled: dict[Partition, int] = {}
        #: When unsettled claims were started, epoch ms; includes those of the previous leader.
        self._started_ms: dict[Partition, int] = {}
        #: The topics whose offsets are settled. A topic that is created again has another id.
        self._topic_ids: dict[Partition, str] = {}
        #: The leader epochs at which the settled offsets, or the ends of claims, were of the log.
        self._epochs: dict[Partition, int | None] = {}
        self._generations = generations or Generations()
        #: Ours is committed for all partitions before anything else: see `_late`.
        self._generation = 0
        self._claimed: set[Partition] = set()
        self._recommit_at_s = time.monotonic() + RECOMMIT_INTERVAL_S
        self._last_now_ms = 0
        self._load()

    @property
    def levels(self) -> int:
        """The levels of the wheel."""
        return self._wheel.levels

    def acquire(self, slot: Slot) -> Sequence[OffsetRange]:
        """See `Store.acquire`."""
        return self._claim(self._latest(self._partitions.of(slot)), {})

    def acquire_overdue(self, now_ms: int) -> Sequence[OffsetRange]:
        """Claim the partitions whose first record is older than any of the current slot."""
        lagging = self._lagging()
        starts = self._skip_removed(lagging)
        first_of_slot = self._offsets.first_since(
            {
                each: self._wheel.earliest_append_ms(self._partitions.current_slot(each, now_ms))
                for each in lagging
            }
        )
        overdue = {
            each: at
            for each, at in lagging.items()
            if (first := first_of_slot[each]) is None or first > self._settled[each]
        }
        # Where settled records are not deleted yet, the log's first record is not an overdue one.
        trimmed = [each for each in overdue if starts[each] >= self._settled[each]]
        return self._claim(overdue, self._due_times(trimmed, now_ms))

    def mark_started(self, claims: Iterable[OffsetRange], now_ms: int) -> None:
        """Commit the instant with the current offsets: one request, and no topic for it."""
        claims = list(claims)
        started_ms = {
            each.place: now_ms if each.started_ms is None else each.started_ms for each in claims
        }
        self._commit({each.place: each.start for each in claims}, started_ms)
        with self._lock:
            self._started_ms |= started_ms

    def settle(self, claims: Iterable[OffsetRange]) -> None:
        """Commit, then delete. The next start deletes what a crash between the two leaves."""
        ends = {each.place: each.end for each in claims}
        # In a topic that was created again, these offsets are of records that were never read.
        replaced = self._replaced(ends)
        with self._lock:
            self._claimed -= replaced
        self._rewind(replaced)
        settled = {each: end for each, end in ends.items() if each not in replaced}
        self._commit(settled, {})
        with self._lock:
            self._settled |= settled
            self._claimed -= ends.keys()
            for partition in settled:
                self._started_ms.pop(partition, None)
        self._deletion_guard.delete(settled, self._delete)

    def release(self, claims: Iterable[OffsetRange]) -> None:
        """See `Store.release`."""
        with self._lock:
            self._claimed -= {each.place for each in claims}

    def close(self) -> None:
        """Close the connections."""
        self._offsets.close()

    def refresh_commits(self, now_ms: int) -> None:
        """Correct commits after the clock was set back, and repeat old ones.

        To be called about once a second. Raises KafkaError.
        """
        if now_ms < self._last_now_ms:
            self._restart_claims(now_ms)
        self._last_now_ms = now_ms
        if time.monotonic() >= self._recommit_at_s:
            self._recommit_at_s = time.monotonic() + RECOMMIT_INTERVAL_S
            self._recommit(now_ms)

    def delete_before(
        self, offsets: Mapping[Partition, int], keep_since_ms: int | None = None
    ) -> None:
        """Delete the records before these offsets, of any topic, and free their disk space.

        Records appended at `keep_since_ms` (epoch ms) or later are kept. Raises KafkaError.
        """
        if keep_since_ms is not None:
            kept = self._offsets.first_since(dict.fromkeys(offsets, keep_since_ms))
            offsets = {
                partition: offset if (first := kept[partition]) is None else min(offset, first)
                for partition, offset in offsets.items()
            }
        self._deletion_guard.delete(offsets, self._delete)

    def _load(self) -> None:
        """Find the offset at which each partition continues, and commit it again.

        Uncommitted offsets expire. A partition without a commit gets one, so that records removed
        by others are noticed from then on. Settled records left by a crash are deleted.
        """
        partitions = self._partitions.all()
        commits, starts = self._offsets.commits(partitions), self._offsets.starts(partitions)
        latest, self._topic_ids = self._offsets.latest(partitions), self._ids_of(partitions)
        notes = {each: LogIdentity.parse(one.note) for each, one in commits.items()}
        self._epochs = {each: at.leader_epoch for each, at in latest.items()} | {
            each: note.leader_epoch for each, note in notes.items() if note.leader_epoch is not None
        }
        replaced = self._truncated({each: one.offset for each, one in commits.items()}, latest) | {
            each
            for each, note in notes.items()
            if not is_same_topic(note.topic_id, self._topic_ids.get(each))
        }
        committed = {each: one.offset for each, one in commits.items() if each not in replaced}
        for partition in committed:
            if (started_ms := notes[partition].started_ms) is not None:
                self._started_ms[partition] = started_ms
        late = self._late({each: notes[each] for each in committed})
        firsts = self._offsets.first_appended_ms(late)
        # Negative: no record is left there.
        self._started_ms |= {each: at for each, at in firsts.items() if at >= 0}
        current = {each: at for each, at in (starts | committed).items() if each not in replaced}
        self._commit(current, self._started_ms)
        self._generations.present = self._generation
        self._delete_as_leader(committed)
        # What a former leader has committed late may lie before what its successor has deleted.
        _log_removed({each: at for each, at in committed.items() if each not in late}, starts)
        self._settled = {each: max(committed.get(each, 0), at) for each, at in starts.items()}
        self._rewind(replaced)

    def _late(self, notes: Mapping[Partition, LogIdentity]) -> list[Partition]:
        """Return the partitions that a former leader has committed last: all there is read back.

        It stood still for longer than its lease, and has overwritten the start that its successor
        had noted. That one had committed all partitions, so another generation shows it.
        """
        generations = {each: note.generation or 0 for each, note in notes.items()}
        last = self._generations.last(max(generations.values(), default=0))
        self._generation = next_generation(last)
        late = [each for each, one in generations.items() if one not in {0, last}]
        if late:
            log.warning(
                "a former leader has committed after its lease: reading back since the first "
                "record partitions=%d",
                len(late),
            )
        return late

    def _rewind(self, partitions: Collection[Partition]) -> None:
        """Continue at the start of these logs: the settled offset belongs to another log.

        Their records are treated as started when they were appended, and so are read back: some
        may have been delivered before the log lost its end.
        """
        if not partitions:
            return
        latest, ids = self._offsets.latest(partitions), self._ids_of(partitions)
        starts = self._offsets.starts(partitions)
        first_ms = self._offsets.first_appended_ms(partitions)
        with self._lock:
            # A partition claimed meanwhile is checked again when the claim is settled.
            starts = {each: at for each, at in starts.items() if each not in self._claimed}
            started_ms = {each: first_ms[each] for each in starts if first_ms[each] >= 0}
            self._deletion_guard.discard(starts)
            self._settled |= starts
            self._topic_ids |= {each: one for each, one in ids.items() if each in starts}
            self._epochs |= {each: latest[each].leader_epoch for each in starts}
            for partition in starts:
                self._started_ms.pop(partition, None)
            self._started_ms |= started_ms
        self._commit(starts, started_ms)
        for topic in sorted({topic for topic, _ in starts}):
            log.error(
                "the log has lost its end, or the topic was created again: reading from its start "
                "without repeating deliveries; check whether the brokers lost records "
                "topic=%s partitions=%d",
                topic,
                sum(each[0] == topic for each in starts),
            )

    def _restart_claims(self, now_ms: int) -> None:
        """Commit unsettled claims as started now: the clock was set back.

        What they send from now on may be stamped earlier than the committed instant, and recovery
        would not find it. A claim settled at this moment may be committed as started: it is read
        back then.
        """
        with self._lock:
            later = [each for each, at_ms in self._started_ms.items() if at_ms > now_ms]
            started_ms = dict.fromkeys(later, now_ms)
            self._started_ms |= started_ms
            starts = {each: self._settled[each] for each in later}
        self._commit(starts, started_ms)

    def _recommit(self, now_ms: int) -> None:
        """Commit the offsets of idle partitions again.

        They are claimed meanwhile, so that no commit overtakes another.
        """
        with self._lock:
            settled = {
                each: offset
                for each, offset in self._settled.items()
                if each not in self._claimed
                and self._partitions.is_idle(each, now_ms, RECOMMIT_MARGIN_MS)
            }
            started_ms = {each: at for each, at in self._started_ms.items() if each in settled}
            self._claimed |= settled.keys()
        try:
            self._commit(settled, started_ms)
        finally:
            with self._lock:
                self._claimed -= settled.keys()

    def _commit(
        self, offsets: Mapping[Partition, int], started_ms: Mapping[Partition, int]
    ) -> None:
        if not self._may_commit():
            raise KafkaError("leadership is lost: the next leader commits from here on")
        self._offsets.commit(offsets, self._notes(offsets, started_ms))

    def _notes(
        self, partitions: Iterable[Partition], started_ms: Mapping[Partition, int]
    ) -> dict[Partition, str]:
        with self._lock:
            return {
                each: LogIdentity(
                    topic_id=self._topic_ids.get(each),
                    leader_epoch=self._epochs.get(each),
                    started_ms=started_ms.get(each),
                    generation=self._generation,
                ).text()
                for each in partitions
            }

    def _replaced(self, partitions: Iterable[Partition]) -> set[Partition]:
        """Return the partitions whose topic was created again since its offset was settled."""
        ids = self._ids_of(partitions)
        with self._lock:
            return {
                each
                for each, one in ids.items()
                if not is_same_topic(self._topic_ids.get(each), one)
            }

    def _ids_of(self, partitions: Iterable[Partition]) -> dict[Partition, str]:
        wanted = list(partitions)
        ids = self._offsets.topic_ids(topic for topic, _ in wanted)
        return {each: ids[each[0]] for each in wanted if each[0] in ids}

    def _latest(self, partitions: Collection[Partition]) -> dict[Partition, Position]:
        """Return the ends of the logs; first rewind the logs that have lost their end."""
        with self._lock:
            settled = {
                each: self._settled[each] for each in partitions if each not in self._claimed
            }
        latest = self._offsets.latest(partitions)
        self._rewind(self._truncated(settled, latest))
        return latest

    def _truncated(
        self, offsets: Mapping[Partition, int], latest: Mapping[Partition, Position]
    ) -> set[Partition]:
        """Return the partitions whose log has lost records before the offset.

        A log may have grown past the offset again. Then its leader epoch is another one. A log that
        begins at the offset holds no unread record before it.
        """
        found = {each for each, offset in offsets.items() if latest[each].offset < offset}
        with self._lock:
            moved = {
                each: Position(offset, self._epochs[each])
                for each, offset in offsets.items()
                if self._epochs[each] != latest[each].leader_epoch
            }
        starts = self._offsets.starts(moved)
        kept = {each: at for each, at in moved.items() if starts[each] < at.offset}
        found |= self._offsets.truncated(kept)
        with self._lock:
            # Another thread may have claimed or settled since: then another offset is the log's.
            self._epochs |= {
                each: latest[each].leader_epoch
                for each, at in moved.items()
                if each not in found | self._claimed
                and (self._settled.get(each, at.offset), self._epochs[each]) == at
            }
        return found

    def _delete(self, offsets: Mapping[Partition, int]) -> None:
        """Delete settled records. A log that has a new leader is left for a later deletion.

        It may have lost its end: then unread records have taken these offsets. The next scan tells.
        """
        with self._lock:
            epochs = {each: self._epochs[each] for each in offsets if each in self._epochs}
        try:
            latest = self._offsets.latest(epochs)
        except KafkaError as error:
            log.warning("settled records are not deleted yet error=%s", error_text(error))
            latest = {}
        changed = {
            each
            for each, epoch in epochs.items()
            if each not in latest or latest[each].leader_epoch != epoch
        }
        self._delete_as_leader(
            {each: offset for each, offset in offsets.items() if each not in changed}
        )

    def _delete_as_leader(self, offsets: Mapping[Partition, int]) -> None:
        """Delete records, unless the lead is lost: the topic may have been created again since."""
        if self._may_commit():
            self._offsets.delete_before(offsets)

    def _lagging(self) -> dict[Partition, Position]:
        """Return the ends of the unclaimed partitions that have unsettled records."""
        with self._lock:
            unclaimed = [each for each in self._settled if each not in self._claimed]
        self._rewind(self._replaced(unclaimed))
        latest = self._latest(unclaimed)
        return {each: at for each, at in latest.items() if at.offset > self._settled[each]}

    def _skip_removed(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Continue after records that others removed; return the start of each log."""
        starts = self._offsets.starts(partitions)
        with self._lock:
            beyond = {each: start for each, start in starts.items() if start > self._settled[each]}
            _log_removed(self._settled, beyond)
            self._settled |= beyond
        return starts

    def _due_times(self, partitions: Iterable[Partition], now_ms: int) -> dict[Partition, DueTimes]:
        """Return when overdue records are due. A failure is logged: claims need no due times."""
        try:
            appended_ms = self._offsets.first_appended_ms(partitions)
        except KafkaError as error:
            log.warning("due times of overdue records unknown error=%s", error_text(error))
            return {}
        return {
            each: self._partitions.overdue_times(each, at_ms, now_ms)
            for each, at_ms in appended_ms.items()
            # Negative: retention has just removed every record.
            if at_ms >= 0
        }

    def _claim(
        self, ends: Mapping[Partition, Position], due: Mapping[Partition, DueTimes]
    ) -> list[OffsetRange]:
        """Claim the unsettled records before these positions, except in claimed partitions.

        Except, too, where the settled offset is not known to be of the log at that leader epoch:
        another thread has settled it meanwhile. The next scan checks it.
        """
        with self._lock:
            ranges = [
                OffsetRange(
                    *each,
                    self._settled[each],
                    end.offset,
                    self._started_ms.get(each),
                    due.get(each, ANY_TIME),
                )
                for each, end in ends.items()
                if each not in self._claimed
                and end.offset > self._settled[each]
                and end.leader_epoch == self._epochs[each]
            ]
            self._claimed |= {each.place for each in ranges}
        return ranges


def _log_removed(settled: Mapping[Partition, int], starts: Mapping[Partition, int]) -> None:
    """Log unsettled records that are gone. The store itself deletes only settled ones."""
    for partition, start in starts.items():
        if (lost := start - settled.get(partition, start)) > 0:
            log.error(
                "records removed before they were due topic=%s partition=%d records=%d: "
                "check the topic with `duetime topics`",
                *partition,
                lost,
            )
