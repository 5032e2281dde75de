"""Cancelling with a definite answer: cancelled, too late, or unknown.

A cancel takes effect if it lies in the slot of its message before the release of that slot is
planned, whichever of the two arrived first. So it is sent, and then read back from there: a cancel
that is seen in time is certain.

A message that could not be delivered is pending under the same id, at the time of its retry. That
time follows from its last failure and the settings, which have to be those of the pipeline.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import lru_cache

from confluent_kafka import Message

from duetime.client.producer import SINGLE_RECORD, Producer
from duetime.core import headers as H
from duetime.core.clock import Clock, SystemClock, backoff_ms, format_duration, format_instant
from duetime.core.errors import DuetimeError, KafkaError, Reason, TooLate, UnknownMessage
from duetime.core.messages import MessageId, PendingMessage
from duetime.core.records import cancel_record
from duetime.core.setting_types import RetryPolicy
from duetime.core.settings import Settings, load_settings
from duetime.core.threads import wait_until
from duetime.core.timer_wheel import Slot
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import OffsetRange, Offsets, Partition
from duetime.kafka.range_reader import Entry, RangeReader, headers_of, state_part
from duetime.stores import Reader, Search
from duetime.stores.factory import open_reader

#: Difference of this clock and the pipeline's, and transit time of a record, at most, in ms.
CANCEL_MARGIN_MS = 500

#: Difference of this clock and the brokers', at most, in ms.
BROKER_CLOCK_MARGIN_MS = 60_000

#: Time until a message that was sent just now is in the wheel, at most, in ms.
ARRIVAL_MS = 5_000

#: Time until a cancel that was sent just now is in the wheel, at most, in ms.
CONFIRM_MS = 10_000

#: Interval between two reads, in seconds.
POLL_INTERVAL_S = 0.1


def cancel_and_confirm(
    id: MessageId | str,  # noqa: A002 (the field's word)
    settings: Settings | None = None,
    clock: Clock | None = None,
) -> None:
    """Cancel a message; return when it is certain that it will not be delivered.

    Safe to repeat: a cancel is seen until the release of its slot is planned. If the message could
    not be delivered, each pending retry is cancelled: several copies of it may have failed.

    Raises InvalidMessage (bad-id), TooLate (for one copy or more; the others are cancelled),
    UnknownMessage (if it arrives later, it is cancelled), and KafkaError if no pipeline has applied
    the cancel: the outcome is not known then.
    """
    identity = id if isinstance(id, MessageId) else MessageId.parse(id)
    settings, clock = settings or load_settings(), clock or SystemClock()
    now_ms, failed = clock.now_ms(), None
    if now_ms >= _last_confirm_ms(identity.due_ms, settings):
        failed = _failed_message(identity, settings, now_ms)
    with closing(open_reader(settings)) as reader:
        cancellation = _Cancellation(reader, identity, failed, settings, clock)
        instants = _open_retries(failed, now_ms) if failed else [None]
        pending, too_late = cancellation.pending(instants)
        if pending:
            with Producer(settings, **SINGLE_RECORD) as producer:
                for each in pending:
                    producer.send(cancel_record(identity, settings, each))
            cancellation.wait_until_confirmed(pending)
        if too_late:
            raise too_late[0]


def find_pending(
    identity: MessageId, reader: Reader, settings: Settings, now_ms: int
) -> PendingMessage:
    """Return the pending message, or its next retry. Raises TooLate, UnknownMessage."""
    found = reader.find(identity, now_ms)
    if found is None and _is_near(identity.due_ms, settings, now_ms):
        retries_ms = _open_retries(_failed_message(identity, settings, now_ms), now_ms)
        retries = (reader.find(identity, now_ms, retry_ms=each) for each in retries_ms)
        found = next((each for each in retries if each), None)
        if found is None and _is_near(retries_ms[-1], settings, now_ms):
            raise _too_late(identity, now_ms, retries_ms[-1])
    if found is None:
        raise unknown_message(identity, settings, now_ms)
    return found


def wait_until_found(find: Callable[[], PendingMessage]) -> PendingMessage:
    """Repeat `find`, as the message may be sent just now. Raises UnknownMessage."""

    def found_or_none() -> PendingMessage | None:
        try:
            return find()
        except UnknownMessage:
            return None

    return wait_until(found_or_none, ARRIVAL_MS / 1_000, POLL_INTERVAL_S) or find()


def closes_ms(due_ms: int, settings: Settings) -> int:
    """Return when the release of the slot of this due time is planned: no cancel works later."""
    slot = Slot(0, settings.wheel.number(0, due_ms))
    return settings.wheel.release_at_ms(slot, settings.release_lead_ms)


def unknown_message(identity: MessageId, settings: Settings, now_ms: int) -> DuetimeError:
    """Return the error for an id that is not in the wheel."""
    if _is_near(identity.due_ms, settings, now_ms):
        return TooLate(_on_its_way(identity, now_ms))
    due = format_instant(identity.due_ms)
    return UnknownMessage(
        f"unknown: no message {identity} waits, to be due {due}: "
        "see that the id is complete, and that duetime runs"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMessage:
    """A message that could not be delivered."""

    #: When it is retried, epoch ms: several instants if several copies have failed, none if no
    #: attempt is left.
    retries_ms: tuple[int, ...]
    #: True if its topic was missing. If the topic exists by the time that the pipeline plans the
    #: retry, the message is delivered at once, and no retry is pending.
    topic_was_unknown: bool


def find_failed_message(
    identity: MessageId, settings: Settings, now_ms: int
) -> FailedMessage | None:
    """Return the failed message with this id, if it failed recently enough to have a retry.

    Reads the failures since its due time, but not those that are older than the longest back-off,
    nor those that this process has read before. Raises KafkaError.
    """
    earliest_ms = max(identity.due_ms, now_ms - settings.retry_backoff_max_ms)
    partition = TopicNames(settings).retry, 0
    with closing(Offsets(settings)) as offsets:
        start = offsets.first_since({partition: earliest_ms - BROKER_CLOCK_MARGIN_MS})[partition]
        if start is None:
            return None
        with RangeReader(settings) as reader:
            index = _shared_index(settings.bootstrap, partition)
            found = index.offsets_of(identity, reader, offsets, start)
            ranges = [OffsetRange(*partition, each, each + 1) for each in found]
            entries = [entry for each in ranges for entry in reader.entries_of(identity, [each])]
    return _pending_retries(entries, settings) if entries else None


@dataclass(frozen=True, slots=True)
class _Cancellation:
    """One cancel request. An instant is that of a retry; None is the due time of the message."""

    reader: Reader
    identity: MessageId
    #: The message as it failed, if it is due already.
    failed: FailedMessage | None
    settings: Settings
    clock: Clock
    #: By instant. What was read before the cancel is sent is not read again to confirm it.
    searches: dict[int | None, Search] = field(default_factory=dict)

    def pending(self, instants: Sequence[int | None]) -> tuple[list[int | None], list[TooLate]]:
        """Return the instants that need a cancel, and the errors for those that are too near."""
        pending, too_late = list[int | None](), list[TooLate]()
        for each in instants:
            found, now_ms = self._find(each), self.clock.now_ms()
            due_ms = self.identity.due_ms if each is None else each
            is_near = _is_near(due_ms, self.settings, now_ms)
            if found and found.cancelled and now_ms < _last_confirm_ms(due_ms, self.settings):
                continue
            if is_near and (found is None or each is not None):
                too_late.append(_too_late(self.identity, now_ms, each))
            else:
                pending.append(each)
        return pending, too_late

    def wait_until_confirmed(self, instants: Sequence[int | None]) -> None:
        """Read until each cancel lies next to its message. Raises as `cancel_and_confirm` does.

        A read shows what was there when it began, and may take long. So the time that the cancel
        had is counted up to the beginning of the read, which `wait_until` does not do.
        """
        sent_ms = self.clock.now_ms()
        last_ms = min(
            _last_confirm_ms(self.identity.due_ms if each is None else each, self.settings)
            for each in instants
        )
        while True:
            read_ms = self.clock.now_ms()
            reads = [self._find(each) for each in instants]
            now_ms = self.clock.now_ms()
            if now_ms >= last_ms:
                raise _too_late(self.identity, now_ms, None)
            # One of several copies may not be there yet: its cancel is applied with the others.
            found = [each for each in reads if each]
            if found and all(each.cancelled for each in found):
                return
            self._check_timeout(read_ms - sent_ms, is_found=bool(found))
            time.sleep(POLL_INTERVAL_S)

    def _find(self, instant_ms: int | None) -> PendingMessage | None:
        if instant_ms not in self.searches:
            self.searches[instant_ms] = self.reader.search(self.identity, retry_ms=instant_ms)
        return self.searches[instant_ms](self.clock.now_ms())

    def _check_timeout(self, waited_ms: int, *, is_found: bool) -> None:
        # The retry of a message that has failed is in the wheel only some seconds later.
        if not is_found and self.failed is None and waited_ms >= ARRIVAL_MS:
            raise UnknownMessage(
                f"unknown: no message {self.identity} is pending; if it arrives later, it is "
                "cancelled"
            )
        if waited_ms < CONFIRM_MS:
            return
        if not is_found and self.failed and self.failed.topic_was_unknown:
            raise TooLate(
                f"too late: {self.identity} failed because its topic was missing, and no retry is "
                "pending: if the topic existed by then, it is delivered; if the pipeline has not "
                "checked since, its retry is cancelled"
            )
        raise KafkaError(
            f"the cancel of {self.identity} was sent, but no pipeline has applied it: check that "
            "duetime runs, then cancel again to be certain"
        )


def _last_confirm_ms(due_ms: int, settings: Settings) -> int:
    """Return until when a cancel that is seen is certain to take effect."""
    return closes_ms(due_ms, settings) - CANCEL_MARGIN_MS


def _is_near(due_ms: int, settings: Settings, now_ms: int) -> bool:
    return due_ms - now_ms < settings.short_delay_threshold_ms


def _on_its_way(identity: MessageId, now_ms: int) -> str:
    if identity.due_ms <= now_ms:
        past = format_duration(now_ms - identity.due_ms)
        return f"{identity} was due {past} ago: it is delivered, will be at once, or cannot be"
    left = format_duration(identity.due_ms - now_ms)
    return f"{identity} is due in {left}, and may be on its way already"


def _too_late(identity: MessageId, now_ms: int, retry_ms: int | None) -> TooLate:
    if retry_ms is None:
        return TooLate(f"too late: {_on_its_way(identity, now_ms)}")
    if now_ms - retry_ms < ARRIVAL_MS:
        return TooLate(f"too late: {identity} could not be delivered, and is just being retried")
    # Another failure would be known by now.
    past = format_duration(now_ms - retry_ms)
    return TooLate(
        f"too late: {identity} could not be delivered, and its retry was due {past} ago: it is "
        "delivered, or will be at once"
    )


def _failed_message(identity: MessageId, settings: Settings, now_ms: int) -> FailedMessage:
    """Return the message, which is due already, with its retries. Raises TooLate if it has none."""
    failed = find_failed_message(identity, settings, now_ms)
    if failed is None:
        raise _too_late(identity, now_ms, None)
    if not failed.retries_ms:
        raise TooLate(f"too late: {identity} could not be delivered, and is a dead letter")
    return failed


def _open_retries(failed: FailedMessage, now_ms: int) -> list[int]:
    """Return the retries in order, without those that are over; the last one in any case."""
    still_open = [each for each in failed.retries_ms if now_ms - each < ARRIVAL_MS]
    return still_open or [failed.retries_ms[-1]]


def _pending_retries(entries: Sequence[Entry], settings: Settings) -> FailedMessage:
    """Replay the failures of a message in order, and return the retries that are left."""
    pending = dict[int, Entry]()
    for each in entries:
        if each.retry:
            # This failure is the outcome of that retry.
            pending.pop(each.retry.at_ms, None)
        pending = {ms: failure for ms, failure in pending.items() if not _is_next(failure, each)}
        if (retry_ms := _retry_ms(each, settings)) is not None:
            pending[retry_ms] = each
    reasons = {dict(headers_of(each.record)).get(H.DUE_ERROR) for each in pending.values()}
    return FailedMessage(
        retries_ms=tuple(sorted(pending)),
        topic_was_unknown=reasons <= {Reason.UNKNOWN_TOPIC.encode()},
    )


def _is_next(failure: Entry, later: Entry) -> bool:
    """Return whether the later failure is of the next attempt, which may have come early."""
    attempts = _state(failure.record, "attempts") or 0
    first_ms = _state(failure.record, "failed") or failure.record.timestamp()[1]
    return (_state(later.record, "attempts"), _state(later.record, "failed")) == (
        attempts + 1,
        first_ms,
    )


def _retry_ms(entry: Entry, settings: Settings) -> int | None:
    """Return the instant of the next retry, as `duetime.pipeline.retries` does; None: no more."""
    attempts = (_state(entry.record, "attempts") or 0) + 1
    policy = settings.retry_topics.get(entry.topic or "", RetryPolicy())
    first_ms = policy.backoff_ms or settings.retry_backoff_ms
    spread = f"{entry.id}:{attempts}"
    wait_ms = backoff_ms(attempts, first_ms, settings.retry_backoff_max_ms, spread)
    retry_ms = entry.record.timestamp()[1] + wait_ms
    is_last = attempts >= (policy.attempts or settings.max_delivery_attempts)
    is_expired = entry.expires_ms is not None and entry.expires_ms < retry_ms
    return None if is_last or is_expired else retry_ms


def _state(record: Message, name: str) -> int | None:
    """Return a number of the DUE_STATE header."""
    state = headers_of(record)[H.SCHEDULED.index(H.DUE_STATE)][1]
    text = state_part((state or b"").decode(), name)
    return int(text) if text else None


class FailureIndex:
    """Maps ids to offsets of the topic of failures, in 8 bytes a record. Thread-safe.

    The topic is one partition, and has millions of records after an outage of a destination. The
    index is shared by all threads of a process, so that each record is read once.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._lock = threading.Lock()
        #: The first indexed offset, and the hashes of the ids from there on; 0 where there is none.
        self._start, self._hashes = 0, array("q")

    def offsets_of(
        self, identity: MessageId, reader: RangeReader, offsets: Offsets, start: int
    ) -> list[int]:
        """Return the offsets from `start` on that most likely have this id: hashes may collide."""
        partition = self._partition
        with self._lock:
            # Asked while locked: a thread that waits for the lock would come with an old end.
            first = offsets.starts([partition])[partition]
            self._extend(reader, first, max(start, first), offsets.ends([partition])[partition])
            return list(self._matches(hash(str(identity).encode()), start))

    def _extend(self, reader: RangeReader, first: int, start: int, end: int) -> None:
        """Index offsets `start` to `end`; forget those before `first`, which Kafka has deleted."""
        indexed_end = self._start + len(self._hashes)
        if not self._hashes or not first <= indexed_end <= end:
            # The index is empty or outdated, or of a deleted topic of this name.
            self._start, self._hashes, indexed_end = start, array("q"), start
        if start < self._start:
            self._hashes = self._read(reader, start, self._start) + self._hashes
            self._start = start
        self._hashes += self._read(reader, indexed_end, end)
        del self._hashes[: max(0, first - self._start)]
        self._start = max(self._start, first)

    def _read(self, reader: RangeReader, start: int, end: int) -> "array[int]":
        if start >= end:
            return array("q")
        hashes, at = array("q", bytes(8 * (end - start))), H.SCHEDULED.index(H.DUE_ID)
        for record in reader.records([OffsetRange(*self._partition, start, end)]):
            for name, value in headers_of(record)[at : at + 1]:
                if name == H.DUE_ID and value is not None:
                    hashes[(record.offset() or 0) - start] = hash(value)
        return hashes

    def _matches(self, hashed: int, start: int) -> Iterator[int]:
        at = max(0, start - self._start) - 1
        with suppress(ValueError):
            while True:
                at = self._hashes.index(hashed, at + 1)
                yield self._start + at


@lru_cache(maxsize=8)
def _shared_index(bootstrap: str, partition: Partition) -> FailureIndex:  # noqa: ARG001 (part of the cache's key)
    return FailureIndex(partition)
