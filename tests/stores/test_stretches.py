"""Stretches of time to count by."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from duetime.message import LATEST_MS
from duetime.stores.stretches import stretches_of
from duetime.wheel import Wheel

NOW_MS, YEAR = 1_800_000_000_000, 366 * 86_400_000


@given(st.integers(0, NOW_MS + YEAR), st.integers(NOW_MS, NOW_MS + YEAR))
def test_stretches_cover_all_time_from_the_oldest_on_without_a_gap(oldest_ms, now_ms):
    wheel = Wheel()
    stretches = stretches_of(wheel, oldest_ms, now_ms)
    assert stretches[0].start_ms <= max(oldest_ms, 0)
    assert stretches[-1].end_ms > LATEST_MS
    for one, following in pairwise(stretches):
        assert one.start_ms < one.end_ms == following.start_ms
        assert one.slot.number == wheel.number(one.slot.level, one.start_ms)
