"""Cancelling with a definite answer: yes, too late, or unknown.

A cancel takes effect if it lies in the message's slot before the slot is taken up, whichever of the
two came first. So it is sent, then looked for there, and what is seen in time is certain.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from duetime.client import AT_ONCE, Producer
from duetime.clock import Clock, format_duration, format_instant
from duetime.config import Settings
from duetime.errors import DuetimeError, KafkaError, TooLate, UnknownMessage
from duetime.failed import Failed, find_failed
from duetime.message import MessageId
from duetime.outgoing import cancelled
from duetime.stores import Found, Reader, Search
from duetime.stores.opening import open_reader
from duetime.wheel import Slot

#: How far this clock and the pipeline's may differ, and a record be on its way, in ms.
MARGIN_MS = 500

#: How long a message that was sent just now may take to turn up in the wheel, in ms.
ARRIVAL_MS = 5_000

#: How long the cancel may take to turn up there, in ms.
CONFIRM_MS = 10_000

#: How often is looked, in seconds.
LOOK_S = 0.1


def cancel_surely(identity: MessageId, settings: Settings, clock: Clock) -> None:
    """Cancel; returns when it is certain that the message will not be delivered.

    Safe to repeat: a cancel that is there is seen until its window is planned. One that could not
    be delivered, and waits for a retry, is cancelled there; where several copies of it do, each.

    Raises TooLate (also where that is so of one copy: the others are cancelled), UnknownMessage
    (should the message come in yet, it is cancelled), and KafkaError where nobody took the cancel
    in: it is not known what becomes of it then.
    """
    now_ms, failed = clock.now_ms(), None
    if now_ms >= _last_ms(identity.due_ms, settings):
        failed = _failed(identity, settings, now_ms)
    with closing(open_reader(settings)) as reader:
        asked = _Asked(reader, identity, failed, settings)
        instants = _to_come(failed, now_ms) if failed else [None]
        left, late = asked.left(instants, clock)
        if left:
            with Producer(settings, **AT_ONCE) as producer:
                for each in left:
                    producer.send(cancelled(identity, settings, each))
            asked.until_cancelled(left, clock)
        if late:
            raise late[0]


def find_waiting(identity: MessageId, reader: Reader, settings: Settings, now_ms: int) -> Found:
    """The message, also where it waits to be tried again. Raises TooLate, UnknownMessage."""
    found = reader.find(identity, now_ms)
    if found is None and _is_near(identity.due_ms, settings, now_ms):
        instants = _to_come(_failed(identity, settings, now_ms), now_ms)
        retries = (reader.find(identity, now_ms, retry_ms=each) for each in instants)
        found = next((each for each in retries if each), None)
        if found is None and _is_near(instants[-1], settings, now_ms):
            raise _too_late(identity, now_ms, instants[-1])
    if found is None:
        raise not_waiting(identity, settings, now_ms)
    return found


def found_soon(find: Callable[[], Found], clock: Clock) -> Found:
    """What it finds, for a message that may have been sent just now. Raises UnknownMessage."""
    begun_ms = clock.now_ms()
    while True:
        try:
            return find()
        except UnknownMessage:
            if clock.now_ms() - begun_ms >= ARRIVAL_MS:
                raise
        time.sleep(LOOK_S)


def closes_ms(due_ms: int, settings: Settings) -> int:
    """When the window of what is due then is planned, after which no cancel reaches it."""
    window = Slot(0, settings.wheel.number(0, due_ms))
    return settings.wheel.closes_at_ms(window, settings.lead_ms)


def on_its_way(identity: MessageId, now_ms: int) -> str:
    """What is to be said of a message that no cancel reaches any more."""
    if identity.due_ms <= now_ms:
        past = format_duration(now_ms - identity.due_ms)
        return f"{identity} was due {past} ago: it is delivered, will be at once, or cannot be"
    left = format_duration(identity.due_ms - now_ms)
    return f"{identity} is due in {left}, and may be on its way already"


def not_waiting(identity: MessageId, settings: Settings, now_ms: int) -> DuetimeError:
    """The error for an id that is not in the wheel."""
    if _is_near(identity.due_ms, settings, now_ms):
        return TooLate(on_its_way(identity, now_ms))
    due = format_instant(identity.due_ms)
    return UnknownMessage(
        f"unknown: no message {identity} waits, to be due {due}: "
        "see that the id is complete, and that duetime runs"
    )


def _last_ms(due_ms: int, settings: Settings) -> int:
    """Until when a cancel that is seen is certain to be heard."""
    return closes_ms(due_ms, settings) - MARGIN_MS


def _is_near(due_ms: int, settings: Settings, now_ms: int) -> bool:
    return due_ms - now_ms < settings.horizon_ms


def _too_late(identity: MessageId, now_ms: int, retry_ms: int | None) -> TooLate:
    if retry_ms is None:
        return TooLate(f"too late: {on_its_way(identity, now_ms)}")
    if now_ms - retry_ms < ARRIVAL_MS:
        return TooLate(f"too late: {identity} could not be delivered, and is tried again just now")
    # Had it failed again, that would be known.
    past = format_duration(now_ms - retry_ms)
    return TooLate(
        f"too late: {identity} could not be delivered, and was to be tried again {past} ago: it is "
        "delivered, or will be at once"
    )


def _failed(identity: MessageId, settings: Settings, now_ms: int) -> Failed:
    """What became of a message that is due already, and waits for a retry. Raises TooLate."""
    failed = find_failed(identity, settings, now_ms)
    if failed is None:
        raise _too_late(identity, now_ms, None)
    if not failed.retries_ms:
        raise TooLate(f"too late: {identity} could not be delivered, and is a dead letter")
    return failed


def _to_come(failed: Failed, now_ms: int) -> list[int]:
    """Its retries, without those that are over where others are not; in order, and never none."""
    left = [each for each in failed.retries_ms if now_ms - each < ARRIVAL_MS]
    return left or [failed.retries_ms[-1]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be cancelled. An instant is that of a retry; None is the message's own."""

    reader: Reader
    identity: MessageId
    #: What became of it, if it is due already.
    failed: Failed | None
    settings: Settings
    #: By instant: what was read before the cancel was sent is not read again to confirm it.
    searches: dict[int | None, Search] = field(default_factory=dict)

    def left(
        self, retries_ms: Sequence[int | None], clock: Clock
    ) -> tuple[list[int | None], list[TooLate]]:
        """For which of them a cancel is to be sent, and why not for those that are too near."""
        left, late = list[int | None](), list[TooLate]()
        for each in retries_ms:
            try:
                if self._is_left(each, clock):
                    left.append(each)
            except TooLate as error:
                # The others wait all the same.
                late.append(error)
        return left, late

    def _is_left(self, retry_ms: int | None, clock: Clock) -> bool:
        """Whether a cancel is to be sent, because none is there. Raises TooLate."""
        found, now_ms = self._find(retry_ms, clock), clock.now_ms()
        if found and found.cancelled and now_ms < self._last_ms(retry_ms):
            return False
        is_near = _is_near(self._due_ms(retry_ms), self.settings, now_ms)
        if (found is None or retry_ms is not None) and is_near:
            raise _too_late(self.identity, now_ms, retry_ms)
        return True

    def until_cancelled(self, retries_ms: Sequence[int | None], clock: Clock) -> None:
        """Look until it is where its message is. Raises as `cancel_surely` does.

        A look says what was there when it began, however long it takes. So how long the cancel was
        waited for counts up to there.
        """
        begun_ms = clock.now_ms()
        last_ms = min(self._last_ms(each) for each in retries_ms)
        while True:
            look_ms = clock.now_ms()
            looks = [self._find(each, clock) for each in retries_ms]
            now_ms = clock.now_ms()
            if now_ms >= last_ms:
                raise TooLate(f"too late: {on_its_way(self.identity, now_ms)}")
            # Of several, one may not be there yet: its cancel is taken in with the others.
            there = [each for each in looks if each]
            if there and all(each.cancelled for each in there):
                return
            self._check_patience(look_ms - begun_ms, is_there=bool(there))
            time.sleep(LOOK_S)

    def _find(self, retry_ms: int | None, clock: Clock) -> Found | None:
        search = self.searches.get(retry_ms)
        if search is None:
            search = self.reader.search(self.identity, retry_ms=retry_ms)
            self.searches[retry_ms] = search
        return search.find(clock.now_ms())

    def _due_ms(self, retry_ms: int | None) -> int:
        return self.identity.due_ms if retry_ms is None else retry_ms

    def _last_ms(self, retry_ms: int | None) -> int:
        return _last_ms(self._due_ms(retry_ms), self.settings)

    def _check_patience(self, waited_ms: int, *, is_there: bool) -> None:
        # A message that has failed is written down as one that waits some seconds later.
        if not is_there and self.failed is None and waited_ms >= ARRIVAL_MS:
            raise UnknownMessage(
                f"unknown: no message {self.identity} waits; should it come in yet, it is cancelled"
            )
        if waited_ms >= CONFIRM_MS:
            self._check_delivered(is_there=is_there)
            raise KafkaError(
                f"the cancel of {self.identity} is sent, but nobody took it in: see that duetime "
                "runs, then cancel again to be certain"
            )

    def _check_delivered(self, *, is_there: bool) -> None:
        """Raise TooLate where no retry waits because none was needed."""
        if not is_there and self.failed and self.failed.was_unknown:
            raise TooLate(
                f"too late: {self.identity} failed because its topic was missing, and no retry of "
                "it waits: if there was the topic by then, it is delivered; if nobody has looked "
                "yet, its retry is cancelled"
            )
