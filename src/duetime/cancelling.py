"""Cancelling with a definite answer: yes, too late, or unknown.

A cancel takes effect if it lies in the message's slot before the slot is taken up, whichever of the
two came first. So it is sent, then looked for there, and what is seen in time is certain.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from duetime.client import Producer
from duetime.clock import Clock, format_duration, format_instant
from duetime.config import Settings
from duetime.errors import DuetimeError, KafkaError, TooLate, UnknownMessage
from duetime.failed import last_failure
from duetime.message import MessageId
from duetime.outgoing import cancelled
from duetime.stores import Found, Reader
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
    be delivered, and waits for a retry, is cancelled there.

    Raises TooLate, UnknownMessage (should the message come in yet, it is cancelled), and
    KafkaError where nobody took the cancel in: it is not known what becomes of it then.
    """
    now_ms, retry_ms = clock.now_ms(), None
    if now_ms >= _last_ms(identity.due_ms, settings):
        retry_ms = _retry_ms(identity, settings, now_ms)
    due_ms = identity.due_ms if retry_ms is None else retry_ms
    with closing(open_reader(settings)) as reader:
        found = reader.find(identity, now_ms, retry_ms=retry_ms)
        if found and found.cancelled and clock.now_ms() < _last_ms(due_ms, settings):
            return
        if (found is None or retry_ms is not None) and _is_near(due_ms, settings, now_ms):
            raise _too_late(identity, now_ms, retry_ms)
        with Producer(settings) as producer:
            producer.send(cancelled(identity, settings, retry_ms))
        _Awaited(reader, identity, retry_ms, settings).until_cancelled(clock)


def find_waiting(identity: MessageId, reader: Reader, settings: Settings, now_ms: int) -> Found:
    """The message, also where it waits to be tried again. Raises TooLate, UnknownMessage."""
    found = reader.find(identity, now_ms)
    if found is None and _is_near(identity.due_ms, settings, now_ms):
        retry_ms = _retry_ms(identity, settings, now_ms)
        found = reader.find(identity, now_ms, retry_ms=retry_ms)
        if found is None and _is_near(retry_ms, settings, now_ms):
            raise _too_late(identity, now_ms, retry_ms)
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
    return TooLate(f"too late: {identity} could not be delivered, and is tried again just now")


def _retry_ms(identity: MessageId, settings: Settings, now_ms: int) -> int:
    """When a message is tried again that is due already. Raises TooLate."""
    failure = last_failure(identity, settings, now_ms)
    if failure is None:
        raise _too_late(identity, now_ms, None)
    if failure.retry_ms is None:
        raise TooLate(f"too late: {identity} could not be delivered, and is a dead letter")
    return failure.retry_ms


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A cancel that was sent."""

    reader: Reader
    identity: MessageId
    #: When the message is tried again, if it waits for that.
    retry_ms: int | None
    settings: Settings

    def until_cancelled(self, clock: Clock) -> None:
        """Look until it is where its message is. Raises as `cancel_surely` does."""
        begun_ms = clock.now_ms()
        last_ms = _last_ms(self.retry_ms or self.identity.due_ms, self.settings)
        while True:
            found = self.reader.find(self.identity, clock.now_ms(), retry_ms=self.retry_ms)
            now_ms = clock.now_ms()
            if now_ms >= last_ms:
                raise TooLate(f"too late: {on_its_way(self.identity, now_ms)}")
            if found and found.cancelled:
                return
            self._check_patience(found, now_ms - begun_ms)
            time.sleep(LOOK_S)

    def _check_patience(self, found: Found | None, waited_ms: int) -> None:
        # A message that has failed is written down as one that waits some seconds later.
        if found is None and self.retry_ms is None and waited_ms >= ARRIVAL_MS:
            raise UnknownMessage(
                f"unknown: no message {self.identity} waits; should it come in yet, it is cancelled"
            )
        if waited_ms >= CONFIRM_MS:
            raise KafkaError(
                f"the cancel of {self.identity} is sent, but nobody took it in: see that duetime "
                "runs, then cancel again to be certain"
            )
