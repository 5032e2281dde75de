"""When synthetic messages count as punctual."""

from dataclasses import dataclass

import pytest

from duetime.core import headers as H
from duetime.pipeline.monitoring.synthetic_messages import (
    PUNCTUAL_MS,
    PUNCTUAL_S,
    RATE,
    Punctuality,
)

#: The warm-up begins.
SINCE_MS = 1_800_000_000_000

#: The first moment at which so many whole seconds are over.
THEN_MS = SINCE_MS + PUNCTUAL_S * 1_000


@dataclass(frozen=True)
class Arrival:
    """The parts of a record that count."""

    due_ms: int | None
    late_ms: int = 0

    def headers(self):
        return None if self.due_ms is None else [(H.DUE_AT_MS, str(self.due_ms).encode())]

    def timestamp(self):
        return 2, (self.due_ms or 0) + self.late_ms

    def error(self):
        return None


def arrivals(second, late_ms=(0,), share=1.0):
    """What is due in that second of the warm-up, so late in turn."""
    for number in range(int(RATE * share)):
        due_ms = SINCE_MS + second * 1_000 + number * 1_000 // RATE
        yield Arrival(due_ms, late_ms[number % len(late_ms)])


def is_reached(*seconds, now_ms=THEN_MS):
    punctuality = Punctuality(SINCE_MS)
    for second in seconds:
        for one in second:
            punctuality.count(one)
    return punctuality.is_reached(now_ms)


def punctual(*but):
    return [arrivals(second) for second in range(PUNCTUAL_S) if second not in but]


def test_it_is_reached_after_enough_punctual_seconds_in_a_row():
    assert is_reached(*punctual())
    assert not is_reached(*punctual(), now_ms=THEN_MS - 1)


@pytest.mark.parametrize("second", range(PUNCTUAL_S))
def test_a_second_with_too_few_messages_is_not_punctual(second):
    assert not is_reached(*punctual(second))
    assert not is_reached(*punctual(second), arrivals(second, share=0.4))
    assert is_reached(*punctual(second), arrivals(second, share=0.6))


@pytest.mark.parametrize("second", range(PUNCTUAL_S))
def test_a_second_with_two_of_a_hundred_messages_late_is_not_punctual(second):
    fewer = [PUNCTUAL_MS] * 199 + [9_000]
    assert is_reached(*punctual(second), arrivals(second, fewer))
    more = [0] * 98 + [PUNCTUAL_MS + 1] * 2
    assert not is_reached(*punctual(second), arrivals(second, more))


def test_messages_of_an_earlier_warm_up_are_not_counted():
    before = [Arrival(one.due_ms - 10_000, 9_000) for one in arrivals(0)]
    assert is_reached(*punctual(), before, [Arrival(None)])
