"""Where all work fails, less is read, then nothing, then one message as a test."""

import time
from datetime import timedelta

from prometheus_client import REGISTRY

from duetime.kmq.breaker import Breaker, BreakerPolicy


def breaker(pause_s=3_600, failures=5, topic="jobs"):
    """Which has seen as many failures as it takes, unless the pause is asked for."""
    return Breaker(BreakerPolicy(failures=failures, pause=timedelta(seconds=pause_s)), topic)


def fail(circuit, times):
    for _ in range(times):
        circuit.failed()
    return circuit


def test_with_each_failure_in_a_row_half_as_many_are_read():
    circuit = breaker()
    assert circuit.room(100) == 100
    assert fail(circuit, 2).room(100) == 25
    assert fail(circuit, 2).room(5) == 1
    circuit.worked()
    assert circuit.room(100) == 100


def test_after_so_many_nothing_is_read():
    circuit = fail(breaker(), 5)
    assert (circuit.state, circuit.room(100)) == ("open", 0)
    # What was read before ends now.
    circuit.worked()
    assert (circuit.state, circuit.room(100)) == ("open", 0)


def test_after_the_pause_one_message_is_let_through_at_a_time():
    circuit = fail(breaker(pause_s=0), 5)
    assert circuit.state == "half-open"
    assert (circuit.room(100), circuit.room(100)) == (1, 0)
    circuit.failed()
    assert (circuit.room(100), circuit.room(100)) == (1, 0)
    circuit.worked()
    assert (circuit.state, circuit.room(100)) == ("closed", 100)


def test_where_there_is_no_message_to_test_with_the_next_one_is_the_test():
    circuit = fail(breaker(pause_s=0), 5)
    assert circuit.room(100) == 1
    circuit.cancel_test()
    assert circuit.room(100) == 1


def test_its_changes_are_in_the_log(caplog):
    fail(breaker(), 5)
    assert caplog.messages == ["circuit breaker topic=jobs state=open"]


def told(topic):
    """How many breakers of a topic are in which state, as Prometheus has it."""
    states = ("closed", "open", "half-open")
    labels = [{"queue": topic, "state": state} for state in states]
    return [REGISTRY.get_sample_value("duetime_queue_breaker", each) for each in labels]


def test_its_state_is_a_metric_as_long_as_it_is_in_use():
    circuit = breaker(topic="told")
    other = fail(breaker(topic="told"), 5)
    assert told("told") == [1, 1, 0]
    for each in (circuit, other, other):
        each.close()
    # What was being worked on is acknowledged afterwards.
    circuit.worked()
    assert told("told") == [0, 0, 0]


def test_the_end_of_a_pause_is_told_at_the_next_look(caplog, monkeypatch):
    circuit = fail(breaker(topic="paused", pause_s=100), 5)
    assert told("paused") == [0, 1, 0]
    opened_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: opened_s + 101)
    circuit.room(100)
    monkeypatch.undo()
    assert told("paused") == [0, 0, 1]
    assert caplog.messages[-1] == "circuit breaker topic=paused state=half-open"
