"""Time cut into stretches to count by, as the wheel cuts it, for stores that have no slots."""

from collections.abc import Iterator
from typing import NamedTuple

from duetime.message import LATEST_MS
from duetime.wheel import Slot, Wheel

#: How many seconds back what is overdue is counted second by second, in slots.
BACK = 64


class Stretch(NamedTuple):
    """A slot, or the part of one, that is counted by itself."""

    slot: Slot
    start_ms: int
    end_ms: int


def stretches_of(wheel: Wheel, oldest_ms: int, now_ms: int) -> list[Stretch]:
    """All of time from the oldest message on, cut as finely as the wheel would have it at `now_ms`.

    First what is overdue: its first slot, then as one what is long ago, then slot by slot.
    """
    number = wheel.number(0, now_ms)
    edges = {each * wheel.tick_ms for each in range(number - BACK, number)}
    first = wheel.number(0, oldest_ms) * wheel.tick_ms
    past = sorted(each for each in edges | {first, first + wheel.tick_ms} if each >= first)
    starts = [(each, 0) for each in past if each < number * wheel.tick_ms]
    starts += _ahead(wheel, number)
    ends = [*(start for start, _ in starts[1:]), LATEST_MS + 1]
    return [
        Stretch(Slot(level, wheel.number(level, start_ms)), start_ms, end_ms)
        for (start_ms, level), end_ms in zip(starts, ends, strict=True)
    ]


def _ahead(wheel: Wheel, number: int) -> Iterator[tuple[int, int]]:
    """Where each slot from now on begins, and its level."""
    start_ms = number * wheel.tick_ms
    for level in range(wheel.levels):
        end_ms = (wheel.number(level, start_ms) + wheel.slots) * wheel.width_ms(level)
        while start_ms < end_ms:
            yield start_ms, level
            start_ms = (wheel.number(level, start_ms) + 1) * wheel.width_ms(level)
