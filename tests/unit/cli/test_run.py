"""The ends of a pipeline in the foreground, with a fake one."""

import logging
import signal
import threading

import pytest

from duetime.cli import run
from duetime.cli.logs import begin_log
from duetime.cli.run import PipelineThread, interruptible
from duetime.core.errors import ConfigError, DuetimeError, LeaderStuck


class Waiting:
    """A pipeline that only waits."""

    def __init__(self, *, fails=None, gives_way=None, stuck=False, stop_s=0):
        self.calls = []
        self._fails = fails
        self._gives_way = gives_way
        self._stuck = stuck
        self._stop_s = stop_s
        self._stopping = threading.Event()

    def start(self):
        self.calls.append("start")
        if self._fails:
            raise self._fails

    def watch(self):
        if self._gives_way:
            raise self._gives_way
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
    """The ends of Spark: that of these tests goes on."""
    ways = []
    monkeypatch.setattr(run, "end_spark", lambda *, kill: ways.append(kill))
    return ways


def test_leaving_the_block_stops_the_pipeline(ended):
    pipeline = Waiting()

    with PipelineThread(pipeline) as running:
        running.wait_until_ready()

    assert pipeline.calls == ["start", "stop"]
    assert ended == [False]


def test_a_leader_that_gives_way_ends_as_by_a_crash(ended):
    """A graceful stop waits for deliveries, and this leader makes none."""
    pipeline = Waiting(gives_way=LeaderStuck("not delivered"))

    with pytest.raises(LeaderStuck, match="not delivered"), PipelineThread(pipeline) as running:
        running.wait()

    assert pipeline.calls == ["start"]
    assert ended == [False]


def test_a_signal_while_waiting_stops_the_pipeline(ended):
    main, pipeline = threading.get_ident(), Waiting(stop_s=0.2)
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt), interruptible(), PipelineThread(pipeline) as running:
        running.wait()

    assert pipeline.calls == ["start", "stop"]
    assert ended == [False]


def test_a_pipeline_that_does_not_stop_is_ended(ended, monkeypatch):
    monkeypatch.setattr(run, "STOP_TIMEOUT_S", 0.1)

    with PipelineThread(Waiting(stuck=True)) as running:
        running.wait_until_ready()

    assert ended == [True]


def test_an_error_at_start_is_raised():
    with (
        pytest.raises(ConfigError, match="wheel_slots"),
        PipelineThread(Waiting(fails=ConfigError("wheel_slots"))) as running,
    ):
        running.wait_until_ready()


def test_an_error_of_javas_is_raised_without_its_trace():
    error = RuntimeError("An error occurred.\n: no room\n\tat java.lang.Thread")

    with (
        pytest.raises(DuetimeError, match=r"\(An error occurred. : no room\)"),
        PipelineThread(Waiting(fails=error)) as running,
    ):
        running.wait_until_ready()


def test_a_failing_check_ends_the_wait(monkeypatch):
    monkeypatch.setattr(run, "CHECK_INTERVAL_S", 0.01)

    def look():
        raise DuetimeError("the broker has ended")

    with pytest.raises(DuetimeError, match="broker"), PipelineThread(Waiting(), look) as running:
        running.wait()


@pytest.fixture
def logging_to_stderr(monkeypatch, capsys):  # noqa: ARG001 (the stream that is read)
    monkeypatch.setattr(logging.root, "handlers", [])
    begin_log(logging.INFO)


@pytest.mark.usefixtures("logging_to_stderr")
@pytest.mark.parametrize("why", [KeyboardInterrupt, DuetimeError("the broker has ended")])
def test_consequences_of_an_interrupted_start_are_not_logged(capsys, why):
    pipeline = Waiting()
    pipeline.start = pipeline.watch
    pipeline.stop = lambda: logging.getLogger("duetime.x").error("query failed")

    with pytest.raises((KeyboardInterrupt, DuetimeError)), PipelineThread(pipeline):
        raise why

    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("logging_to_stderr")
def test_an_error_while_a_ready_pipeline_stops_is_logged(capsys):
    pipeline = Waiting()
    pipeline.stop = lambda: logging.getLogger("duetime.x").error("query failed")

    with PipelineThread(pipeline) as running:
        running.wait_until_ready()

    assert "query failed" in capsys.readouterr().err


@pytest.fixture
def at_a_terminal():
    """Do not ignore SIGHUP, also if the tests run with nohup."""
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
