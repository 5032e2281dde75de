"""Asking about series, with a definite answer: which there are; pause, resume and stop."""

import re
import time

from duetime.client import Producer
from duetime.config import Settings
from duetime.errors import InvalidMessage, KafkaError, Reason, UnknownMessage
from duetime.message import PAUSE, RESUME, SERIES_PATTERN, STOP
from duetime.recurring import asked_of_series
from duetime.series import Series, Watched, read_book

#: How long a pipeline may take to hear what is asked, in seconds.
HEARD_S = 15.0

#: How long a series that was sent just now may take to be known, in seconds.
KNOWN_S = 5.0

#: How often is looked, in seconds.
LOOK_S = 0.2


def all_series(settings: Settings) -> list[Series]:
    """All of them, by name. Raises KafkaError."""
    return read_book(settings).all()


def find_series(name: str, settings: Settings) -> Series:
    """The one with this name. Raises UnknownMessage, KafkaError, InvalidMessage (bad-id)."""
    return _found(name, settings, within_s=0.0)


def find_series_soon(name: str, settings: Settings) -> Series:
    """The same; one that may have been sent just now is waited for. Raises as `find_series`."""
    return _found(name, settings, within_s=KNOWN_S)


def unknown_series(name: str) -> UnknownMessage:
    """What is to be said of a series that is none, or not for who asks."""
    return UnknownMessage(f"no series is called {name}, or it is over, or it was stopped")


def ask(series: Series, operation: str, settings: Settings) -> Series | None:
    """Have a series paused, resumed or stopped: one of OF_SERIES. Safe to repeat.

    Returns once that is so, with what it is then. Runs that are due in less than some 10 s are on
    their way, and come all the same. Raises KafkaError where no pipeline has heard of it.
    """
    name = series.name
    with Producer(settings) as producer:
        producer.send(asked_of_series(name, operation, settings))
    until_s = time.monotonic() + HEARD_S
    with Watched(settings) as watched:
        while time.monotonic() < until_s:
            now = watched.now().find(name)
            if _is_so(now, operation):
                return now
            time.sleep(LOOK_S)
    raise KafkaError(
        f"it was sent, but no pipeline has heard to {operation} {name} within {HEARD_S:.0f} s: is "
        "one running? duetime status tells"
    )


def _found(name: str, settings: Settings, within_s: float) -> Series:
    if not re.match(SERIES_PATTERN, name):
        raise InvalidMessage(Reason.BAD_ID, f"{name!r} is no name of a series, its due-id")
    until_s = time.monotonic() + within_s
    with Watched(settings) as watched:
        while (series := watched.now().find(name)) is None:
            if time.monotonic() >= until_s:
                raise unknown_series(name)
            time.sleep(LOOK_S)
    return series


def _is_so(series: Series | None, operation: str) -> bool:
    if series is None:
        return operation == STOP
    return {PAUSE: series.is_paused, RESUME: not series.is_paused, STOP: False}[operation]
