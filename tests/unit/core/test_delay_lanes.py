import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core.errors import ConfigError
from duetime.core.timer_wheel import DelayLanes

ladders = st.builds(
    DelayLanes, unit_ms=st.integers(1, 20), base=st.integers(2, 10), rungs=st.integers(1, 4)
)
remainders = st.integers(0, 20_000)


def descent(ladder: DelayLanes, remaining_ms: int) -> list[int]:
    """The lanes that a message takes, one after another."""
    taken = []
    while (lane := ladder.lane(remaining_ms)) is not None:
        taken.append(lane)
        remaining_ms -= ladder.wait_ms(lane)
    return taken


@given(ladders, remainders)
def test_no_lane_waits_longer_than_what_remains(ladder, remaining_ms):
    lane = ladder.lane(remaining_ms)
    if lane is None:
        assert remaining_ms < ladder.step_ms(0)
    else:
        assert 0 <= lane < ladder.lanes
        assert 0 < ladder.wait_ms(lane) <= remaining_ms


@given(ladders, remainders)
def test_the_lane_is_the_longest_that_fits(ladder, remaining_ms):
    lane = ladder.lane(remaining_ms)
    waits = [ladder.wait_ms(each) for each in range(ladder.lanes)]
    fitting = [wait_ms for wait_ms in waits if wait_ms <= remaining_ms]
    assert (None if lane is None else ladder.wait_ms(lane)) == max(fitting, default=None)


@given(ladders, remainders)
def test_after_the_last_lane_less_than_the_shortest_wait_is_left(ladder, remaining_ms):
    waited_ms = sum(ladder.wait_ms(lane) for lane in descent(ladder, remaining_ms))
    assert 0 <= remaining_ms - waited_ms < ladder.step_ms(0)


@given(ladders, st.data())
def test_wait_within_the_rungs_takes_at_most_one_lane_a_rung(ladder, data):
    whole_ms = ladder.step_ms(ladder.rungs) - 1
    assert len(descent(ladder, data.draw(st.integers(0, whole_ms)))) <= ladder.rungs


@given(ladders, remainders)
def test_the_longest_lane_alone_is_taken_more_than_once(ladder, remaining_ms):
    longest_ms = ladder.wait_ms(ladder.lanes - 1)
    again = remaining_ms // longest_ms
    assert len(descent(ladder, remaining_ms)) <= again + ladder.rungs


@given(ladders)
def test_every_lane_is_of_use(ladder):
    waits = [ladder.wait_ms(lane) for lane in range(ladder.lanes)]
    assert [ladder.lane(wait_ms) for wait_ms in waits] == list(range(ladder.lanes))


def test_the_worked_example_of_the_module():
    ladder = DelayLanes()
    assert [ladder.wait_ms(lane) for lane in descent(ladder, 1_000)] == [768, 224, 8]
    assert max(ladder.wait_ms(lane) for lane in range(ladder.lanes)) == 1_792


def test_short_delay_takes_at_most_five_lanes():
    assert max(len(descent(DelayLanes(), remaining_ms)) for remaining_ms in range(4_000)) == 5


@pytest.mark.parametrize("shape", [{"unit_ms": 0}, {"base": 1}, {"rungs": 0}], ids=str)
def test_a_ladder_without_steps_is_refused(shape):
    with pytest.raises(ConfigError):
        DelayLanes(**shape)
