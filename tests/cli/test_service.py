"""How a pipeline in the foreground ends, told by one that only waits."""

import logging
import signal
import threading

import pytest

from duetime.cli import service
from duetime.cli.logs import begin_log
from duetime.cli.service import Service, interruptible
from duetime.errors import ConfigError, DuetimeError


class Waiting:
    """Starts and stops as a pipeline does, and moves nothing."""

    def __init__(self, *, fails=None, stuck=False, stop_s=0):
        self.calls = []
        self._fails = fails
        self._stuck = stuck
        self._stop_s = stop_s
        self._stopping = threading.Event()

    def start(self):
        self.calls.append("start")
        if self._fails:
            raise self._fails

    def watch(self):
        self._stopping.wait()
        if self._stuck:
            threading.Event().wait()

    def ask_to_stop(self):
        self._stopping.set()

    def stop(self):
        threading.Event().wait(self._stop_s)
        self.calls.append("stop")


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """How Spark was ended, in place of ending the one of these tests."""
    ways = []
    monkeypatch.setattr(service, "end_spark", lambda *, kill: ways.append(kill))
    return ways


def test_leaving_the_block_stops_the_pipeline(ended):
    pipeline = Waiting()

    with Service(pipeline) as running:
        running.wait_until_ready()

    assert pipeline.calls == ["start", "stop"]
    assert ended == [False]


def test_a_signal_in_the_middle_of_the_wait_lets_the_pipeline_stop(ended):
    main, pipeline = threading.get_ident(), Waiting(stop_s=0.2)
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt), interruptible(), Service(pipeline) as running:
        running.wait()

    assert pipeline.calls == ["start", "stop"]
    assert ended == [False]


def test_a_pipeline_that_does_not_stop_is_ended(ended, monkeypatch):
    monkeypatch.setattr(service, "STOP_S", 0.1)

    with Service(Waiting(stuck=True)) as running:
        running.wait_until_ready()

    assert ended == [True]


def test_what_keeps_the_pipeline_from_starting_is_raised():
    with (
        pytest.raises(ConfigError, match="wheel_slots"),
        Service(Waiting(fails=ConfigError("wheel_slots"))) as running,
    ):
        running.wait_until_ready()


def test_an_error_of_javas_is_raised_without_its_trace():
    error = RuntimeError("An error occurred.\n: no room\n\tat java.lang.Thread")

    with (
        pytest.raises(DuetimeError, match=r"\(An error occurred. : no room\)"),
        Service(Waiting(fails=error)) as running,
    ):
        running.wait_until_ready()


def test_whoever_looks_may_end_the_wait(monkeypatch):
    monkeypatch.setattr(service, "LOOK_S", 0.01)

    def look():
        raise DuetimeError("the broker has ended")

    with pytest.raises(DuetimeError, match="broker"), Service(Waiting(), look) as running:
        running.wait()


@pytest.fixture
def logging_to_stderr(monkeypatch, capsys):  # noqa: ARG001 (the stream that is read)
    monkeypatch.setattr(logging.root, "handlers", [])
    begin_log(logging.INFO)


@pytest.mark.usefixtures("logging_to_stderr")
@pytest.mark.parametrize("why", [KeyboardInterrupt, DuetimeError("the broker has ended")])
def test_what_comes_of_the_end_of_a_start_is_not_told(capsys, why):
    pipeline = Waiting()
    pipeline.start = pipeline.watch
    pipeline.stop = lambda: logging.getLogger("duetime.x").error("query failed")

    with pytest.raises((KeyboardInterrupt, DuetimeError)), Service(pipeline):
        raise why

    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("logging_to_stderr")
def test_what_ails_a_pipeline_that_ran_is_told_when_it_is_stopped(capsys):
    pipeline = Waiting()
    pipeline.stop = lambda: logging.getLogger("duetime.x").error("query failed")

    with Service(pipeline) as running:
        running.wait_until_ready()

    assert "query failed" in capsys.readouterr().err


@pytest.fixture
def at_a_terminal():
    """Also where the tests themselves were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_interrupts_and_is_given_back(number):
    before = signal.getsignal(number)

    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)

    assert signal.getsignal(number) is before
