from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from duetime.delayed.partition import GAP
from duetime.kafka.offsets import runs


def test_adjacent_offsets_are_one_fetch():
    assert list(runs([5, 6, 7], GAP)) == [(5, 7)]
    assert list(runs([], GAP)) == []


@given(st.lists(st.integers(0, 20 * GAP), unique=True).map(sorted))
def test_ranges_contain_each_offset_once_and_are_far_apart(offsets):
    ranges = [(first, last + 1) for first, last in runs(offsets, GAP)]
    assert [
        each for each in offsets if any(start <= each < end for start, end in ranges)
    ] == offsets
    assert {start for start, _ in ranges} | {end - 1 for _, end in ranges} <= set(offsets)
    assert all(start - (end - 1) > GAP for (_, end), (start, _) in pairwise(ranges))
