"""What is told of queries before anything happens to them."""

from prometheus_client import REGISTRY

from duetime.pipeline.queries import Queries


def test_a_query_that_has_not_failed_yet_is_told_of_with_0_failures():
    Queries({"never-failed": lambda: None}, lambda: None, lambda _: 0, lambda _: None)
    told = REGISTRY.get_sample_value("duetime_query_failures_total", {"query": "never-failed"})
    assert told == 0
