"""Cancelling with a definite answer: yes, too late, or unknown.

A cancel takes effect if it lies in the message's slot before the slot is taken up, whichever of the
two came first. So it is sent, then looked for there, and what is seen in time is certain.
"""

import time
from collections.abc import Callable
from contextlib import closing

from duetime.client import Producer
from duetime.clock import Clock, format_duration, format_instant
from duetime.config import Settings
from duetime.errors import DuetimeError, TooLate, UnknownMessage
from duetime.message import MessageId
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
    """Cancel; returns when it is certain that the message will not be delivered. Safe to repeat.

    Raises TooLate, UnknownMessage (should the message come in yet, it is cancelled), and
    DuetimeError where nobody took the cancel in.
    """
    last_ms, now_ms = closes_ms(identity, settings) - MARGIN_MS, clock.now_ms()
    if now_ms >= last_ms:
        raise TooLate(f"too late: {on_its_way(identity, now_ms)}")
    with closing(open_reader(settings)) as reader:
        found = reader.find(identity, now_ms)
        if found is None and identity.due_ms - now_ms < settings.horizon_ms:
            raise TooLate(f"too late: {on_its_way(identity, now_ms)}")
        if found is None or not found.cancelled:
            with Producer(settings) as producer:
                producer.cancel(str(identity))
            _await_cancelled(reader, identity, last_ms, clock)


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


def closes_ms(identity: MessageId, settings: Settings) -> int:
    """When the message's window is planned, after which no cancel reaches it."""
    window = Slot(0, settings.wheel.number(0, identity.due_ms))
    return settings.wheel.closes_at_ms(window, settings.lead_ms)


def on_its_way(identity: MessageId, now_ms: int) -> str:
    """What is to be said of a message that no cancel reaches any more."""
    if identity.due_ms <= now_ms:
        past = format_duration(now_ms - identity.due_ms)
        return f"{identity} was due {past} ago: it is delivered, or will be at once"
    left = format_duration(identity.due_ms - now_ms)
    return f"{identity} is due in {left}, and may be on its way already"


def not_waiting(identity: MessageId, settings: Settings, now_ms: int) -> DuetimeError:
    """The error for an id that is not in the wheel."""
    if identity.due_ms - now_ms < settings.horizon_ms:
        return TooLate(on_its_way(identity, now_ms))
    due = format_instant(identity.due_ms)
    return UnknownMessage(
        f"unknown: no message {identity} waits, to be due {due}: "
        "see that the id is complete, and that duetime runs"
    )


def _await_cancelled(reader: Reader, identity: MessageId, last_ms: int, clock: Clock) -> None:
    begun_ms = clock.now_ms()
    while True:
        found, now_ms = reader.find(identity, clock.now_ms()), clock.now_ms()
        if now_ms >= last_ms:
            raise TooLate(f"too late: {on_its_way(identity, now_ms)}")
        if found and found.cancelled:
            return
        _check_patience(identity, found, now_ms - begun_ms)
        time.sleep(LOOK_S)


def _check_patience(identity: MessageId, found: Found | None, waited_ms: int) -> None:
    if found is None and waited_ms >= ARRIVAL_MS:
        raise UnknownMessage(
            f"unknown: no message {identity} waits; should it come in yet, it is cancelled"
        )
    if waited_ms >= CONFIRM_MS:
        raise DuetimeError(
            f"the cancel of {identity} is sent, but nobody took it in: see that duetime runs, "
            "then cancel again to be certain"
        )
