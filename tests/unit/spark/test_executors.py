"""The driver's links to executors: leases, clocks, and counts of producers."""

import time

import pytest
from tests.support.clocks import eventually

from duetime.core.errors import SetupError
from duetime.spark import executors
from duetime.spark.executors import (
    END_S,
    LEASE_S,
    READINGS,
    ExecutorLink,
    ExecutorProducers,
    Published,
    is_executor_ended,
)
from duetime.spark.session import DEFAULT_LEASE, ENDED, HELD, STARTED_BEFORE
from duetime.spark.task_jvms import ExecutorReport, bean

#: How far the executor's monotonic clock is ahead, in seconds.
AHEAD_S = 1_000

PRODUCER = "kafka.producer:type=producer-metrics,client-id=d.lanes"


class Executor:
    """An executor that answers exchanges: its properties, and what it is asked."""

    def __init__(self, skew_ms=0.0, takes_s=0.0):
        self.skew_ms, self.takes_s = skew_ms, takes_s
        self.properties, self.requests, self.exchanges = {DEFAULT_LEASE: ENDED}, {}, 0
        self.is_gone = False

    def __call__(self, properties, flags):
        if self.is_gone:
            raise ConnectionError
        started_s = time.monotonic()
        self.properties |= properties
        self.exchanges += 1
        read_s = time.monotonic()
        return ExecutorReport(
            nano_ns=int((read_s + AHEAD_S) * 1e9),
            requests={flag: self.requests.pop(flag, []) for flag in flags},
            beans=[],
            started_s=started_s,
            # The answer takes this long.
            ended_s=read_s + self.takes_s,
            skew_ms=self.skew_ms,
        )

    def lease_s(self, name):
        """Until when it holds the lease, by the driver's clock."""
        return self.lease_ns(name) / 1e9

    def lease_ns(self, name):
        """Return the same instant in nanoseconds, an exact number."""
        return int(self.properties[name]) - AHEAD_S * 10**9


@pytest.fixture
def linked(monkeypatch):
    """Makes links, which exchange when they are woken."""
    monkeypatch.setattr(executors, "EXCHANGE_INTERVAL_S", 600.0)
    links = []

    def link(executor, published):
        links.append(ExecutorLink("1", executor, published, 100.0, lambda _: None))
        links[-1].start()
        return links[-1]

    yield link
    for each in links:
        each.stop()


def test_new_executor_has_everything_before_it_may_send(linked):
    executor, published = Executor(), Published()
    published.properties, published.leases = {"d.to.a": "1"}, {"d.lease.1": time.monotonic() + 2}
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    assert executor.exchanges == 2
    assert list(executor.properties) == [DEFAULT_LEASE, "d.to.a", "d.lease.1"]
    assert executor.properties[DEFAULT_LEASE] == HELD


@pytest.mark.parametrize("takes_s", [0.0, 3.0])
def test_lease_never_ends_later_in_the_executor_than_here(linked, takes_s):
    executor, published, until_s = Executor(takes_s=takes_s), Published(), time.monotonic() + 2
    published.leases["d.lease.1"] = until_s
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    assert executor.lease_s("d.lease.1") == pytest.approx(until_s - takes_s, abs=0.05)
    assert executor.lease_ns("d.lease.1") <= until_s * 1e9


def test_executor_that_is_cut_off_holds_its_lease_for_a_short_time(linked):
    executor, published = Executor(), Published()
    published.leases["d.lease.1"] = time.monotonic() + 60
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    assert executor.lease_s("d.lease.1") <= time.monotonic() + LEASE_S < time.monotonic() + END_S


def test_only_what_has_changed_is_sent(linked):
    executor, published = Executor(), Published()
    published.properties = {"a": "1", "b": "1"}
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    executor.properties = {}
    published.properties["b"] = "2"
    link.refresh()
    assert executor.properties == {"b": "2", DEFAULT_LEASE: HELD}


def test_executor_whose_clock_is_off_holds_no_lease(linked, caplog):
    executor, published = Executor(), Published()
    published.leases["d.lease.1"] = time.monotonic() + 2
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    executor.skew_ms = 101.0
    link.refresh()
    assert not link.is_ready
    link.refresh()
    assert executor.properties == {DEFAULT_LEASE: ENDED, "d.lease.1": ENDED}
    assert "clock is off" in caplog.text
    # A slow exchange shows less of it.
    executor.skew_ms = 0.0
    link.refresh()
    assert not link.is_ready
    for _ in range(READINGS):
        link.refresh()
    assert link.is_ready
    assert executor.properties[DEFAULT_LEASE] == HELD


def test_lease_counts_as_held_until_the_executor_has_answered(linked):
    executor, published = Executor(), Published()
    until_s = published.leases["d.lease.1"] = time.monotonic() + 2
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    executor.is_gone = True
    published.leases["d.lease.1"] = 0
    link.wake()
    eventually(lambda: not link._is_wanted)
    assert link.granted["d.lease.1"] == until_s
    executor.is_gone = False
    link.refresh()
    assert link.granted["d.lease.1"] == 0
    assert executor.properties["d.lease.1"] == ENDED


def test_requests_of_rows_are_gathered(linked):
    executor, published = Executor(), Published()
    published.flags.add("d.asked")
    link = linked(executor, published)
    eventually(lambda: link.is_ready)
    executor.requests["d.asked"] = ["a", "b"]
    link.refresh()
    assert published.requests == {"d.asked": {"a", "b"}}


def test_executor_that_does_not_answer_is_named(linked, monkeypatch):
    monkeypatch.setattr(executors, "ANSWER_TIMEOUT_S", 0.1)
    executor = Executor()
    link = linked(executor, Published())
    eventually(lambda: link.is_ready)
    executor.is_gone = True
    with pytest.raises(SetupError, match="executor 1 does not answer"):
        link.refresh()


def report(sent, held=0, client="d.lanes"):
    """A report with one producer's numbers."""
    name = PRODUCER.replace("d.lanes", client)
    text = f"{name} [record-error-total = 0.0, record-send-total = {sent}, "
    text += f"buffer-total-bytes = 100.0, buffer-available-bytes = {100 - held}]"
    return ExecutorReport(0, {}, [bean(text)], 0, 0, 0)


def test_counts_of_producers_never_become_less():
    producers = ExecutorProducers(list)
    for each in "012":
        producers.add(each)
    note = producers.update
    note("0", report(5.0))
    note("1", report(7.0, client="d.intake"))
    note("1", report(3.0))
    assert producers.sent("d.lanes") == 8
    # Opened again, gone, and another in its place.
    note("0", report(2.0))
    producers.remove("1")
    note("2", report(1.0))
    assert producers.sent("d.lanes") == 11
    assert producers.sent("d.intake") == 7
    assert producers.sent("d.other") == 0


def test_bytes_held_are_those_of_executors_that_are_there():
    producers = ExecutorProducers(list)
    for each in "01":
        producers.add(each)
    producers.update("0", report(1.0, held=4))
    producers.update("1", report(1.0, held=2))
    assert producers.unacknowledged_bytes("d.lanes") == 6
    producers.remove("0")
    # Its last report, which was under way.
    producers.update("0", report(1.0, held=4))
    assert producers.unacknowledged_bytes() == 2


@pytest.mark.parametrize(
    ("reason", "has_ended"),
    [
        ("Remote RPC client disassociated. Likely due to containers exceeding thresholds", True),
        ("Command exited with code 137", True),
        (
            "The executor with id 1 exited with exit code 137(SIGKILL, possible container OOM).",
            True,
        ),
        # It may go on to send.
        ("Executor heartbeat timed out after 130000 ms", False),
    ],
)
def test_executor_that_is_only_silent_has_not_ended(reason, has_ended):
    text = (
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 1 times, most recent failure:"
        " Lost task 0.0 (TID 9): ExecutorLostFailure (executor 1 exited caused by one of the "
        f"running tasks) Reason: {reason}"
    )
    assert is_executor_ended(RuntimeError(text)) == has_ended


def test_the_plan_of_a_query_that_failed_says_nothing_of_executors():
    """It has the error that a repeated task would raise."""
    text = (
        "Job aborted due to stage failure: Task 4 in stage 2.0 failed 1 times, most recent failure:"
        " Lost task 4.0 in stage 2.0 (TID 6) (host executor driver): TimeoutException: Expiring 1 "
        "record(s)\n=== Streaming Query ===\nIdentifier: lanes\nLogical Plan:\n"
        f"Filter CASE WHEN (attempt = 0) THEN held ELSE raise_error({STARTED_BEFORE}: the pipeline "
    )
    assert not is_executor_ended(RuntimeError(text))
    assert is_executor_ended(RuntimeError(f"[USER_RAISED_EXCEPTION] {STARTED_BEFORE}\n{text}"))
