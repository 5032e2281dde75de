"""What is told of queries before anything happens to them, and how one is begun once more."""

from types import SimpleNamespace

from prometheus_client import REGISTRY

from duetime.pipeline.queries import Queries


def test_a_query_that_has_not_failed_yet_is_told_of_with_0_failures():
    Queries({"never-failed": lambda: None}, lambda: None, lambda _: 0)
    told = REGISTRY.get_sample_value("duetime_query_failures_total", {"query": "never-failed"})
    assert told == 0


def test_a_query_whose_topic_was_created_again_is_stopped_and_begun_once_more(caplog):
    stopped, visited, moved = [], [], {}
    query = SimpleNamespace(exception=lambda: None, stop=lambda: stopped.append(True))
    begun = []
    queries = Queries(
        {"moved": lambda: begun.append(True) or query, "other": lambda: query},
        lambda: None,
        lambda _: 0,
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
