"""Query supervisor: metrics before the first failure, and restarts."""

import threading
import time
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from py4j.protocol import Py4JJavaError
from tests.support.clocks import eventually

from duetime.client.status import RUNS
from duetime.pipeline import query_supervisor
from duetime.pipeline.query_supervisor import MAX_QUICK_RESTARTS, QuerySupervisor

#: A broker has refused a record.
ANSWER = "org.apache.kafka.common.errors.InvalidTimestampException"
INVALID = "org.apache.kafka.common.InvalidRecordException: Compacted topic cannot accept message"

#: No broker has answered.
EXPIRED = "org.apache.kafka.common.errors.TimeoutException: Expiring 3 record(s) for orders-0:1 ms"

#: The request may be in a socket of a broker that stands still.
LOST = "org.apache.kafka.common.errors.NetworkException: The server disconnected before a response"

#: What happens to queries that never fail.
LIFE = {"refresh": lambda: None, "given_up": lambda _: 0, "blame": lambda *_: set()}


def test_query_that_has_not_failed_is_published_with_0_failures():
    QuerySupervisor({"never-failed": lambda: None}, **LIFE)
    told = REGISTRY.get_sample_value("duetime_query_failures_total", {"query": "never-failed"})
    assert told == 0


@pytest.mark.parametrize("limit_s", [10.0, 0.0])
def test_first_queries_start_before_the_others(monkeypatch, limit_s):
    monkeypatch.setattr(query_supervisor, "FIRST_S", limit_s)
    monkeypatch.setattr(query_supervisor, "CHECK_INTERVAL_S", 0.01)
    steps, has_started = [], threading.Event()

    def lanes():
        # Until the other has started, or long enough for that.
        has_started.wait(0.2 if limit_s else 10)
        steps.append("lanes")
        return Query([])

    def other():
        steps.append("retries")
        has_started.set()
        return Query([])

    queries = QuerySupervisor({"retries": other, "lanes": lanes}, first=["lanes"], **LIFE)
    queries.start(lambda *_: None, lambda: True)
    assert steps == (["lanes", "retries"] if limit_s else ["retries", "lanes"])
    queries.stop()


def test_first_query_that_fails_restarts_while_another_recovers(monkeypatch):
    monkeypatch.setattr(query_supervisor, "CHECK_INTERVAL_S", 0.01)
    failed, has_restarted, seen = [], threading.Event(), []

    def lanes():
        if failed:
            has_restarted.set()
            return Query([])
        failed.append(SimpleNamespace(exception=lambda: RuntimeError(ANSWER)))
        return failed[0]

    def intake():
        seen.append(has_restarted.wait(10))
        return Query([])

    life = LIFE | {"blame": lambda *_: {"orders"}}
    starts = {"lanes": lanes, "intake": intake}
    queries = QuerySupervisor(starts, first=["lanes", "intake"], **life)
    queries.start(lambda *_: None, lambda: True)
    assert seen == [True]
    queries.stop()


def test_other_queries_start_only_while_this_process_leads():
    started, leads = [], []

    def start(name):
        started.append(name)
        return Query([])

    starts = {name: partial(start, name) for name in ("retries", "lanes")}
    queries = QuerySupervisor(starts, first=["lanes"], **LIFE)
    queries.start(lambda *_: None, lambda: bool(leads))
    assert started == ["lanes"]
    assert queries.status() == {"retries": "starts", "lanes": RUNS}
    leads.append(True)
    queries.supervise(lambda *_: None)
    assert eventually(lambda: queries.status() == {"retries": RUNS, "lanes": RUNS})
    queries.stop()


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
        # Unknown for a moment, and a topic that was created again with fewer.
        ({"in": 4}, {}, False),
        ({"in": 4}, {"in": 1}, False),
        ({}, {"in": 4}, False),
    ],
)
def test_query_restarts_when_a_topic_has_more_partitions(before, after, again):
    steps, now = [], dict(before)
    queries = QuerySupervisor(
        {"intake": lambda: Query(steps)},
        **LIFE,
        partitions=lambda _: dict(now),
        drain=lambda _: steps.append("drained"),
    )
    queries.start(lambda *_: None, lambda: True)
    now.clear()
    now.update(after)
    visited = []
    queries.supervise(lambda *_: visited.append(1))
    assert eventually(lambda: queries.status() == {"intake": RUNS})
    assert steps == (["begun", "stopped", "drained", "begun"] if again else ["begun"])
    assert visited == ([] if again else [1])
    # Once for each that is added.
    queries.supervise(lambda *_: visited.append(1))
    assert visited
    queries.stop()


def test_query_restarts_when_its_topic_was_created_again(caplog):
    stopped, visited, moved = [], [], {}
    query = SimpleNamespace(exception=lambda: None, stop=lambda: stopped.append(True))
    begun = []
    queries = QuerySupervisor(
        {"moved": lambda: begun.append(True) or query, "other": lambda: query},
        **LIFE,
        recreated_topics=lambda: moved,
    )
    queries.start(lambda *_: None, lambda: True)
    moved["moved"] = "orders"
    queries.supervise(lambda name, _: visited.append(name))
    assert stopped == [True]
    assert visited == ["other"]
    assert "failed 1 times" in queries.status()["moved"]
    assert "topic orders was created again while it was read" in caplog.text
    moved.clear()
    (running,) = (each for each in queries._queries if each.name == "moved")
    running.restart_s = 0.0
    queries.supervise(lambda *_: None)
    running.starting.result()
    assert len(begun) == 2
    queries.stop()


class Failing:
    """Starts a query that has failed each time, of which a destination may be the cause."""

    def __init__(self, blamed, error):
        self.error, self.begun = error, 0
        self.queries = QuerySupervisor({"lanes": self.start}, **LIFE | {"blame": lambda *_: blamed})
        self.queries.start(lambda *_: None, lambda: True)

    def start(self):
        self.begun += 1
        return SimpleNamespace(exception=lambda: self.error, stop=lambda: None)

    def restarts(self):
        """Return how often it is started again without a rest."""
        (query,) = self.queries._queries
        while query.restart_s is None or query.restart_s <= time.monotonic():
            self.queries.supervise(lambda *_: None)
            query.starting.result()
        self.queries.stop()
        return self.begun - 1


@pytest.mark.parametrize(
    ("blamed", "error", "restarts"),
    [
        ({"orders"}, ANSWER, MAX_QUICK_RESTARTS),
        ({"orders"}, INVALID, MAX_QUICK_RESTARTS),
        # It may be written later: what restarts now would not find it.
        ({"orders"}, EXPIRED, 0),
        ({"orders"}, LOST, 0),
        (set(), "an unknown cause", 0),
        # Its cause is another one.
        ({"orders"}, "java.io.IOException", 0),
    ],
)
def test_query_rests_unless_a_destination_has_refused_a_record(blamed, error, restarts):
    assert Failing(blamed, Exception(error)).restarts() == restarts


def test_query_does_not_rest_for_one_more_destination_that_refuses():
    query = Failing(set(), Exception(ANSWER))
    topics = ["a", "b", "c", "d", "e", "e", "e"]
    blamed = iter(topics)
    query.queries._blame = lambda *_: {next(blamed)}
    # The last one is isolated, and its records fail the query all the same.
    assert query.restarts() == 5


def test_query_runs_on_until_what_was_given_up_cannot_be_written(monkeypatch):
    """It delivers to others meanwhile, and needs no rest then."""
    query = Failing(set(), None)
    # One in each run.
    query.queries._given_up = lambda _: query.begun
    query.queries.supervise(lambda *_: None)
    assert query.queries.status() == {"lanes": RUNS}

    monkeypatch.setattr(query_supervisor, "UNANSWERED_S", 0.0)
    assert query.restarts() == MAX_QUICK_RESTARTS


def test_query_rests_when_ever_more_records_are_given_up(monkeypatch):
    query, given_up = Failing({"orders"}, None), count(1)
    query.queries._given_up = lambda _: next(given_up)
    monkeypatch.setattr(query_supervisor, "MAX_UNANSWERED_S", 0.0)
    assert query.restarts() == 0


@pytest.mark.parametrize(
    ("refusing", "error", "is_quick"),
    [
        ("orders", ANSWER, True),
        # What orders was not answered for may still be written.
        ("bills", ANSWER, False),
        ("orders", "java.io.IOException", False),
    ],
)
def test_failure_after_given_up_records_rests_unless_its_cause_is_known(refusing, error, is_quick):
    """Their destination was isolated when they were given up."""
    query, blamed = Failing(set(), None), iter([{"orders"}, {refusing}])
    query.queries._given_up = lambda _: 1
    query.queries._blame = lambda *_: next(blamed)
    query.queries.supervise(lambda *_: None)
    query.error = Exception(error)
    query.queries.supervise(lambda *_: None)
    rest = "restarts in 0 s" if is_quick else "restarts in 16 s"
    assert query.queries.status() == {"lanes": f"failed 1 times, {rest}"}
    query.queries.stop()


def test_query_that_fails_with_another_record_just_given_up_rests(monkeypatch):
    """The earlier ones can no longer be written; this one can."""
    monkeypatch.setattr(query_supervisor, "UNANSWERED_S", 3_600.0)
    query, given_up = Failing(set(), None), iter([1, 2])
    query.queries._given_up = lambda _: next(given_up)
    query.queries.supervise(lambda *_: None)
    monkeypatch.setattr(query_supervisor, "UNANSWERED_S", 0.0)
    query.error = Exception(EXPIRED)
    query.queries.supervise(lambda *_: None)
    assert query.queries.status() == {"lanes": "failed 1 times, restarts in 16 s"}
    query.queries.stop()


def test_query_that_gives_up_records_while_it_is_stopped_waits_for_them():
    """They were handed over just before."""
    query, given_up, waited = Failing({"orders"}, Exception(ANSWER)), iter([0, 1, 1]), []
    query.queries._given_up = lambda _: next(given_up)
    query.queries._stopping = SimpleNamespace(wait=waited.append, is_set=bool, set=bool)
    query.queries.supervise(lambda *_: None)
    query.queries.supervise(lambda *_: None)
    (failed,) = query.queries._queries
    failed.starting.result()
    assert waited == [query_supervisor.UNANSWERED_S]
    query.queries.stop()


class StopTimedOut(Py4JJavaError):
    """Java's TimeoutException, as PySpark raises it."""

    def __init__(self):
        Exception.__init__(self, "the query did not stop")

    __str__ = Exception.__str__


def test_query_that_does_not_stop_in_time_holds_up_no_other(caplog):
    def stop():
        raise StopTimedOut

    running = SimpleNamespace(name="isolated", exception=lambda: None, stop=stop)
    queries = QuerySupervisor({"isolated": lambda: running}, **LIFE)
    queries.start(lambda *_: None, lambda: True)
    queries.stop()
    assert "query did not stop in time query=isolated" in caplog.text
