from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from duetime.bench.throughput import YEAR_MS, walk
from duetime.core.timer_wheel import Wheel

NOW_MS = 1_800_000_000_000


def test_a_message_due_in_five_years_walks_every_level():
    slots = walk(Wheel(), NOW_MS + 5 * YEAR_MS, NOW_MS)
    assert [slot.level for slot in slots] == [4, 3, 2, 1, 0]


@given(st.integers(min_value=0, max_value=33 * YEAR_MS))
def test_no_walk_has_more_hops_than_the_wheel_has_levels(delay_ms):
    wheel, due_ms = Wheel(), NOW_MS + delay_ms
    slots = walk(wheel, due_ms, NOW_MS)
    assert len(slots) <= wheel.levels
    assert all(after.level < before.level for before, after in pairwise(slots))
    assert all(wheel.start_ms(slot) <= due_ms < wheel.end_ms(slot) for slot in slots)
