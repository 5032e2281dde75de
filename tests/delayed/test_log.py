from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.delayed.log import GAP, LogReader, merged


def test_adjacent_offsets_are_one_fetch():
    assert list(merged([5, 6, 7])) == [(5, 8)]
    assert list(merged([])) == []


@given(st.lists(st.integers(0, 20 * GAP), unique=True).map(sorted))
def test_ranges_hold_each_offset_once_and_are_worth_a_fetch_of_their_own(offsets):
    ranges = list(merged(offsets))
    assert [
        each for each in offsets if any(start <= each < end for start, end in ranges)
    ] == offsets
    assert {start for start, _ in ranges} | {end - 1 for _, end in ranges} <= set(offsets)
    assert all(start - (end - 1) > GAP for (_, end), (start, _) in pairwise(ranges))


@pytest.mark.system
def test_stretches_of_several_partitions_are_read_together_and_others_after_them(two_partitions):
    topic = two_partitions
    for number in range(4_000):
        topic.send(None, str(number), partition=number % 2)
    topic.flush()
    first, second = ((topic.name, partition) for partition in (0, 1))
    with LogReader(topic.properties()) as reader:
        assert reader.all_bounds([first, second]) == {first: (0, 2_000), second: (0, 2_000)}
        for stretches in (
            {first: (0, 5), second: (0, 2_000)},
            {first: (5, 2_000), second: (7, 8)},
            {first: (2_000, 2_000), second: (0, 1)},
        ):
            assert offsets(reader, stretches) == {
                place: list(range(*stretch)) for place, stretch in stretches.items()
            }


def offsets(reader, stretches):
    found = {place: [] for place in stretches}
    for place, records in reader.all_batches(stretches):
        found[place] += [each.offset() for each in records]
    return found
