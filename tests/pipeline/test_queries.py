"""What is told of queries before anything happens to them, and how one is begun once more."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from tests.conftest import eventually

from duetime.pipeline.queries import Growth, Queries
from duetime.standing import RUNS

#: What happens to queries that never fail.
LIFE = {"refresh": lambda: None, "given_up": lambda _: 0, "blame": lambda _: None}


def test_a_query_that_has_not_failed_yet_is_told_of_with_0_failures():
    Queries({"never-failed": lambda: None}, **LIFE)
    told = REGISTRY.get_sample_value("duetime_query_failures_total", {"query": "never-failed"})
    assert told == 0


class Query:
    """A streaming query that runs until it is stopped."""

    name = "intake"

    def __init__(self, steps):
        self._steps = steps
        steps.append("begun")

    def exception(self):
        return None

    def stop(self):
        self._steps.append("stopped")


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        ({"in": 1}, {"in": 4}, True),
        ({"in": 1, "other": 2}, {"in": 1, "other": 3}, True),
        ({"in": 4}, {"in": 4}, False),
        # What is not known for a moment, and a topic that is made anew with fewer.
        ({"in": 4}, {}, False),
        ({"in": 4}, {"in": 1}, False),
        ({}, {"in": 4}, False),
    ],
)
def test_a_query_begins_again_when_a_topic_of_its_has_more_partitions(before, after, again):
    steps, now = [], dict(before)
    queries = Queries(
        {"intake": lambda: Query(steps)},
        **LIFE,
        growth=Growth(partitions=lambda _: dict(now), drain=lambda _: steps.append("drained")),
    )
    queries.start(lambda *_: None, lambda: True)
    now.clear()
    now.update(after)
    visited = []
    queries.look_around(lambda *_: visited.append(1))
    assert eventually(lambda: queries.told() == {"intake": RUNS})
    assert steps == (["begun", "stopped", "drained", "begun"] if again else ["begun"])
    assert visited == ([] if again else [1])
    # Once for each that is added.
    queries.look_around(lambda *_: visited.append(1))
    assert visited
    queries.stop()


def test_a_query_whose_topic_was_created_again_is_stopped_and_begun_once_more(caplog):
    stopped, visited, moved = [], [], {}
    query = SimpleNamespace(exception=lambda: None, stop=lambda: stopped.append(True))
    begun = []
    queries = Queries(
        {"moved": lambda: begun.append(True) or query, "other": lambda: query},
        **LIFE,
        moved=lambda: moved,
    )
    queries.start(lambda *_: None, lambda: True)
    moved["moved"] = "orders"
    queries.look_around(lambda name, _: visited.append(name))
    assert stopped == [True]
    assert visited == ["other"]
    assert "failed 1 times" in queries.told()["moved"]
    assert "topic orders was created again while it was read" in caplog.text
    moved.clear()
    (running,) = (each for each in queries._running if each.name == "moved")
    running.restart_s = 0.0
    queries.look_around(lambda *_: None)
    running.beginning.result()
    assert len(begun) == 2
    queries.stop()
