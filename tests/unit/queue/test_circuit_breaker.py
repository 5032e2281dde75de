"""The circuit breaker of a queue."""

import time
from datetime import timedelta

from prometheus_client import REGISTRY

from duetime.queue.circuit_breaker import BreakerPolicy, CircuitBreaker


def breaker(pause_s=3_600, failures=5, topic="jobs"):
    """Return a circuit breaker."""
    return CircuitBreaker(BreakerPolicy(failures=failures, pause=timedelta(seconds=pause_s)), topic)


def fail(circuit, times):
    for _ in range(times):
        circuit.failed()
    return circuit


def test_each_failure_in_a_row_halves_the_room():
    circuit = breaker()
    assert circuit.room(100) == 100
    assert fail(circuit, 2).room(100) == 25
    assert fail(circuit, 2).room(5) == 1
    circuit.worked()
    assert circuit.room(100) == 100


def test_the_circuit_opens_after_enough_failures():
    circuit = fail(breaker(), 5)
    assert (circuit.state, circuit.room(100)) == ("open", 0)
    # A message that was read before succeeds now.
    circuit.worked()
    assert (circuit.state, circuit.room(100)) == ("open", 0)


def test_one_message_at_a_time_is_the_test_after_the_pause():
    circuit = fail(breaker(pause_s=0), 5)
    assert circuit.state == "half-open"
    assert (circuit.room(100), circuit.room(100)) == (1, 0)
    circuit.failed()
    assert (circuit.room(100), circuit.room(100)) == (1, 0)
    circuit.worked()
    assert (circuit.state, circuit.room(100)) == ("closed", 100)


def test_a_cancelled_test_lets_the_next_message_through():
    circuit = fail(breaker(pause_s=0), 5)
    assert circuit.room(100) == 1
    circuit.cancel_test()
    assert circuit.room(100) == 1


def test_state_changes_are_logged(caplog):
    fail(breaker(), 5)
    assert caplog.messages == ["circuit breaker topic=jobs state=open"]


def told(topic):
    """Return the number of breakers of a topic in each state, from the metrics."""
    states = ("closed", "open", "half-open")
    labels = [{"queue": topic, "state": state} for state in states]
    return [
        REGISTRY.get_sample_value("duetime_queue_circuit_breaker_state", each) for each in labels
    ]


def test_the_state_is_a_metric_until_close():
    circuit = breaker(topic="told")
    other = fail(breaker(topic="told"), 5)
    assert told("told") == [1, 1, 0]
    for each in (circuit, other, other):
        each.close()
    # A message in flight is acknowledged afterwards.
    circuit.worked()
    assert told("told") == [0, 0, 0]


def test_the_end_of_a_pause_is_reported_by_the_next_poll(caplog, monkeypatch):
    circuit = fail(breaker(topic="paused", pause_s=100), 5)
    assert told("paused") == [0, 1, 0]
    opened_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: opened_s + 101)
    circuit.room(100)
    monkeypatch.undo()
    assert told("paused") == [0, 0, 1]
    assert caplog.messages[-1] == "circuit breaker topic=paused state=half-open"
