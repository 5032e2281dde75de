"""Plans of Spark's source on a real broker; no Spark is needed."""

from itertools import pairwise

import pytest

from duetime.delayed.batch_planner import BatchPlanner
from duetime.delayed.spark_source import NO_CACHE


@pytest.fixture
def planners(topic):
    """Create planners: each process of a query has one."""
    made = []

    def make(**properties):
        made.append(BatchPlanner(topic.properties(**properties) | NO_CACHE, [topic.name]))
        return made[-1]

    yield make
    for each in made:
        each.close()


def offsets(stretches):
    return {each.place[1]: each.entries["offset"].tolist() for each in stretches}


def test_another_process_plans_the_same_batch(planners, topic, now_ms):
    for number in range(100):
        topic.send(now_ms - number, str(number))
    topic.flush()
    planner = planners()
    start = planner.first()
    middle = planner.latest(start, 30)
    topic.send(now_ms - 5_000, "late")
    topic.flush()
    end = planner.latest(middle, 30)
    told = [offsets(planner.between(*each)) for each in ((start, middle), (middle, end))]
    assert told == [{0: list(range(99, 69, -1))}, {0: [100, *range(69, 40, -1)]}]
    again = planners()
    assert [offsets(again.between(*each)) for each in ((start, middle), (middle, end))] == told


def test_a_batch_is_filled_from_any_partition(planners, topic, now_ms):
    topic.add_partition(2)
    for number in range(10):
        topic.send(now_ms, str(number), partition=1)
    topic.send(now_ms, "0", partition=0)
    topic.flush()
    planner = planners()
    positions = [planner.first()]
    for most in (6, 1, 1, 10):
        positions.append(planner.latest(positions[-1], most))
    batches = [offsets(planner.between(*pair)) for pair in pairwise(positions)]
    assert batches[0] == {0: [0], 1: [0, 1, 2, 3, 4]}
    assert batches[1:] == [{1: [5]}, {1: [6]}, {1: [7, 8, 9]}]


def test_an_added_partition_is_read_from_its_beginning(planners, topic, now_ms):
    topic.send(now_ms, "before the query")
    topic.flush()
    start = planners(auto_offset_reset="latest").first()
    topic.add_partition(2)
    topic.send(now_ms, "first of its partition", partition=1)
    topic.flush()
    planner = planners(auto_offset_reset="latest")
    end = planner.latest(start, None)
    assert offsets(planner.between(start, end)) == {1: [0]}


def test_removed_records_are_counted_in_the_offset(planners, topic, now_ms):
    for number in range(100):
        topic.send(now_ms + number // 60 * 1_000, str(number))
    topic.flush()
    planner = planners()
    start = planner.first()
    (place,) = start
    while not (half := planner.latest(start, 20))[place].note:
        pass
    assert half[place].note == "0"
    topic.remove_before(70)
    after = half
    found = []
    while len(found) < 30:
        start, after = after, planner.latest(after, None)
        found += offsets(planner.between(start, after)).get(0, [])
    assert found == list(range(70, 100))
    assert after[place].note == "50"
