"""Slots to count by."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from duetime.core.messages import LATEST_MS
from duetime.core.timer_wheel import Wheel
from duetime.stores.row_store import empty_slots

NOW_MS, YEAR = 1_800_000_000_000, 366 * 86_400_000


@given(st.integers(0, NOW_MS + YEAR), st.integers(NOW_MS, NOW_MS + YEAR))
def test_slots_to_count_by_have_no_gap(oldest_ms, now_ms):
    wheel = Wheel()
    slots = empty_slots(wheel, oldest_ms, now_ms)
    assert slots[0].start_ms <= max(oldest_ms, 0)
    assert slots[-1].end_ms > LATEST_MS
    for one, following in pairwise(slots):
        assert one.start_ms < one.end_ms == following.start_ms
        assert one.slot.number == wheel.number(one.slot.level, one.start_ms)
