"""Where all work fails, less is read, then nothing, then one message as a test."""

from datetime import timedelta

from duetime.kmq.breaker import Breaker, BreakerPolicy


def breaker(pause_s=3_600, failures=5):
    """Which has seen as many failures as it takes, unless the pause is asked for."""
    return Breaker(BreakerPolicy(failures=failures, pause=timedelta(seconds=pause_s)), "jobs")


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
