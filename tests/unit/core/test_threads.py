"""Threads that repeat one step, and waiting for a condition."""

import threading

from duetime.core.threads import PeriodicThread, wait_until


def test_a_step_that_fails_is_logged_and_repeated(caplog):
    steps, repeated = [], threading.Event()

    def step():
        steps.append(len(steps))
        if len(steps) == 1:
            raise ValueError("first")
        repeated.set()

    with PeriodicThread("poller", 0.0, step):
        assert repeated.wait(30)

    assert "step failed, will be repeated thread=poller" in caplog.text


def test_a_stopped_thread_runs_no_further_step():
    begun = threading.Event()
    thread = PeriodicThread("poller", 0.0, begun.set)
    thread.start()
    assert begun.wait(30)

    assert thread.stop(30)
    begun.clear()
    assert not begun.is_set()


def test_stop_reports_a_step_that_does_not_end():
    begun, going_on = threading.Event(), threading.Event()

    def step():
        begun.set()
        going_on.wait(30)

    thread = PeriodicThread("poller", 0.0, step)
    thread.start()
    assert begun.wait(30)

    assert not thread.stop(0)
    going_on.set()
    assert thread.stop(30)


def test_a_thread_that_never_started_can_be_stopped():
    assert PeriodicThread("poller", 0.0, list).stop()


def test_waiting_ends_with_the_value_that_is_true():
    values = iter((0, "", "found"))

    assert wait_until(lambda: next(values), timeout_s=30, interval_s=0) == "found"


def test_waiting_ends_with_the_last_value_when_the_time_is_over():
    assert wait_until(lambda: 0, timeout_s=0) == 0
