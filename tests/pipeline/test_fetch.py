"""Which ranges are read for single records."""

from hypothesis import given
from hypothesis import strategies as st

from duetime.pipeline.fetch import GAP, MOST_READS, reads

OFFSETS = st.sets(st.integers(min_value=0, max_value=10**7), min_size=1, max_size=60)


def test_records_near_each_other_are_one_read_and_far_ones_are_two():
    wanted = {("jobs", 0): [5, 2, 9 * GAP], ("jobs", 1): [7]}
    first, second = (
        [(each.partition, each.start, each.end) for each in one] for one in reads(wanted)
    )
    assert first == [(0, 2, 6), (1, 7, 8)]
    assert second == [(0, 9 * GAP, 9 * GAP + 1)]


def test_nothing_is_no_read():
    assert reads({}) == []


@given(st.dictionaries(st.tuples(st.just("jobs"), st.integers(0, 3)), OFFSETS, max_size=3))
def test_every_record_is_read_once_in_few_reads(wanted):
    found = reads(wanted)
    assert len(found) <= MOST_READS
    for one in found:
        assert len({each.partition for each in one}) == len(one)
    for place, offsets in wanted.items():
        ranges = [each for one in found for each in one if (each.topic, each.partition) == place]
        for offset in offsets:
            assert sum(each.start <= offset < each.end for each in ranges) == 1
