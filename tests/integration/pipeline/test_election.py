"""Election: one member leads, the others stand by; no row passes without a lease."""

import os
import time
from contextlib import ExitStack
from threading import Timer
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException
from pyspark.errors import PySparkException
from tests.support.clocks import eventually

from duetime.client.http_models import OverdueRelease
from duetime.client.status import MAX_OVERDUE_RELEASES, status
from duetime.core.clock import SystemClock
from duetime.kafka import heartbeats
from duetime.kafka.heartbeats import Fenced, LeaderHeartbeats
from duetime.kafka.leadership import HEARTBEAT_S, IS_WARM, Heartbeat
from duetime.pipeline.leadership import lease
from duetime.pipeline.leadership.election import MARGIN_S, Election
from duetime.pipeline.leadership.lease import lease_is_held, lease_name
from duetime.spark.session import jvm
from duetime.spark.task_jvms import DriverJvm

pytestmark = pytest.mark.usefixtures("topics")

PATIENCE_S = 150.0

#: The default of takeover_seconds.
TAKEOVER_S = 1.5


@pytest.fixture
def join(settings):
    """Makes a member, which leaves at the end of the test."""
    with ExitStack() as members:

        def joined():
            member = Election(settings, SystemClock())
            member.status = lambda: {IS_WARM: True}
            members.callback(member.close)
            member.start()
            return member

        yield joined


def test_first_member_leads_until_it_leaves_then_the_next(join):
    first = join()
    assert first.wait()
    second = join()
    assert not second.wait()
    assert first.is_leading.is_set()
    first.close()
    assert second.is_leading.wait(PATIENCE_S)


@pytest.mark.slow
def test_leaving_member_settles_before_another_may_lead(join):
    first = join()
    assert first.wait()
    second, seen = join(), []

    def settle():
        seen.append((first.holds_lease(), second.is_leading.wait(2)))

    first.close(settle)
    # Nothing more was sent meanwhile, and no other led.
    assert seen == [(False, False)]
    assert second.is_leading.wait(PATIENCE_S)


def test_status_has_the_leader_since_when_and_the_standbys(settings, join):
    clock = SystemClock()
    assert status(settings, clock).leader is None
    before_ms = clock.now_ms()
    leader = join()
    told = {
        "overdue_released": 3,
        "queries": {"lanes": "begins"},
        "overdue_releases": [(17, 3, 1, 9)],
    }
    leader.status = lambda: told
    assert leader.wait()
    assert not join().wait()
    # Both are of this process. A process that has just come is one that stands by.
    found = eventually(lambda: with_standby(status(settings, clock)))
    assert found.leader.endswith(f":{os.getpid()}")
    assert before_ms <= found.since_ms <= clock.now_ms()
    assert found.standbys == [found.leader]
    assert (found.waiting, found.late, found.lag_ms) == (0, 0, 0)
    assert (found.overdue_released, found.queries) == (3, {"lanes": "begins"})
    assert found.overdue_releases == [OverdueRelease(at_ms=17, messages=3, from_ms=1, to_ms=9)]


def with_standby(found):
    return found if found.standbys else None


@pytest.mark.slow
def test_status_that_is_too_long_is_left_out(settings, join):
    leader = join()
    leader.status = lambda: {"queries": dict.fromkeys(map(str, range(1_000)), "runs")}
    assert leader.wait()
    found = status(settings, SystemClock())
    assert (found.leader is not None, found.queries) == (True, {})


@pytest.mark.slow
def test_last_part_of_a_status_that_is_too_long_is_left_out_first(settings, join):
    leader = join()
    latest = [(clock_ms, 10**9, clock_ms, clock_ms) for clock_ms in [2**41] * MAX_OVERDUE_RELEASES]
    many = dict.fromkeys((f"outbox.cluster-{each:02}" for each in range(100)), "runs")
    leader.status = lambda: {
        "overdue_released": 3,
        "queries": {**many, "lanes": "begins"},
        "overdue_releases": latest,
    }
    assert leader.wait()
    found = status(settings, SystemClock())
    assert (found.overdue_released, len(found.queries), len(found.overdue_releases)) == (
        3,
        101,
        MAX_OVERDUE_RELEASES,
    )

    more = dict.fromkeys(map(str, range(300)), "runs")
    leader.status = lambda: {"overdue_released": 4, "queries": more, "overdue_releases": latest}
    found = eventually(lambda: overdue_released(settings, 4))
    assert (len(found.queries), found.overdue_releases) == (300, [])


def overdue_released(settings, number):
    """Return the status, once it has this number."""
    found = status(settings, SystemClock())
    return found if found.overdue_released == number else None


@pytest.mark.slow
def test_status_counts_pending_and_late_messages(settings, wheel, now_ms):
    wheel.message("to", now_ms + 6_000)
    wheel.message("to", now_ms + 600_000)

    def after(passed_ms):
        clock = SystemClock()
        clock.now_ms = lambda: now_ms + passed_ms
        found = status(settings, clock)
        return found.waiting, found.late, found.lag_ms

    assert after(0) == (2, 0, 0)
    waiting, late, lag_ms = after(10_000)
    assert (waiting, late) == (2, 1)
    assert 2_000 < lag_ms < 5_000


def leading(spark, join):
    """A member that leads in its first term."""
    leader = join()
    leader.attach(DriverJvm(spark))
    assert leader.wait()
    assert leader.term == 1
    return leader


def test_rows_of_a_leader_that_steps_down_are_not_sent(settings, spark, join, monkeypatch):
    leader = leading(spark, join)
    rows = spark.range(1).where(lease_is_held(settings.in_term(1)))
    eventually(lambda: rows.count() == 1)
    assert leader.holds_lease()
    monkeypatch.setattr(leader, "_renew", lambda _: None)
    # Its own thread steps down, after a renewal that is under way.
    monkeypatch.setattr(leader, "_is_superseded", lambda: True)
    eventually(lambda: leader._fence is None)
    assert not leader.is_leading.is_set()
    assert not leader.holds_lease()
    monkeypatch.setattr(lease, "WAITS_MS", (1,))
    with pytest.raises(PySparkException, match="the lead is lost"):
        spark.range(1).where(lease_is_held(settings.in_term(1))).count()


@pytest.mark.slow
def test_rows_of_an_older_term_are_not_sent_in_a_later_one(settings, spark, join, monkeypatch):
    """The leader loses the lead and gets it back, while rows of its first term wait for a lease.

    Another has led in between, and may have sent them.
    """
    monkeypatch.setattr(lease, "WAITS_MS", (1,))
    old, new = (spark.range(1).where(lease_is_held(settings.in_term(term))) for term in (1, 2))
    leader = leading(spark, join)
    eventually(lambda: old.count() == 1)
    assert leader.holds_lease_of(1)
    LeaderHeartbeats(settings)
    eventually(lambda: leader.term == 2 and leader.is_leading.is_set())
    assert new.count() == 1
    assert leader.holds_lease_of(2)
    assert not leader.holds_lease_of(1)
    with pytest.raises(PySparkException, match="the lead is lost"):
        old.count()


def test_a_leader_that_is_fenced_off_steps_down_and_the_other_leads(settings, join):
    first = join()
    assert first.wait()
    second = join()
    assert not second.wait()
    # As if a third had been about to lead, and had died.
    LeaderHeartbeats(settings)
    eventually(lambda: not first.is_leading.is_set())
    # What its producers hold must be gone before another leads.
    assert first.jvm_end_s() == first._granted_s - MARGIN_S
    eventually(lambda: first.is_leading.is_set() != second.is_leading.is_set())
    eventually(lambda: first.holds_lease() != second.holds_lease())


def test_a_standby_leads_within_seconds_of_a_leader_that_is_silent(join):
    first = join()
    assert first.wait()
    second = join()
    assert not second.wait()
    # Since it has a standby it takes short leases. The last long one has to end.
    eventually(lambda: second._view._leases_end_s - time.monotonic() < TAKEOVER_S)
    first._step = lambda: first._closing.wait(HEARTBEAT_S)
    silent_s = time.monotonic()
    assert second.is_leading.wait(TAKEOVER_S + 3)
    assert not first.holds_lease()
    assert time.monotonic() - silent_s > TAKEOVER_S - HEARTBEAT_S - 0.1


def test_a_heartbeat_that_is_slow_counts_from_its_begin(settings, monkeypatch):
    beats = LeaderHeartbeats(settings)
    written, later = heartbeat(1, lease_ms=5_000), heartbeat(2, lease_ms=9_000)
    monkeypatch.setattr(heartbeats, "STEP_S", 0.0)
    before_s = time.monotonic()
    assert beats.write(written) is None
    monkeypatch.setattr(heartbeats, "STEP_S", 10.0)
    after_s = time.monotonic()
    # The later one is not begun: the lease is that of the one that others read.
    begun_s, done = beats.write(later)
    assert done == written
    assert before_s <= begun_s <= after_s
    assert beats.write(later).heartbeat == later


def test_a_transaction_that_cannot_be_aborted_yet_is_no_lost_lead(settings, monkeypatch):
    """The broker that coordinates it has died, and another one does so some seconds later."""
    beats, calls = LeaderHeartbeats(settings), []
    answers = {
        "commit_transaction": [BrokerError(BrokerError._TIMED_OUT, "", False, False, True), None],
        "abort_transaction": [BrokerError(BrokerError._TIMED_OUT, "", False, True), None],
    }

    class Producer:
        def __getattr__(self, name):
            def call(*_, **__):
                calls.append(name)
                if error := answers[name].pop(0) if name in answers else None:
                    raise KafkaException(error)

            return call

    monkeypatch.setattr(beats, "_producer", Producer())
    assert [beats.write(heartbeat(each, lease_ms=5_000)) for each in (1, 2)] == [None, None]
    assert beats.write(later := heartbeat(3, lease_ms=5_000)).heartbeat == later
    begun = ["begin_transaction", "produce", "commit_transaction"]
    assert calls == [*begun, "abort_transaction", "abort_transaction", *begun]


def test_a_transaction_that_cannot_be_aborted_at_all_is_a_lost_lead(settings, monkeypatch):
    beats = LeaderHeartbeats(settings)

    def refuse(_timeout_s):
        raise KafkaException(BrokerError(BrokerError._STATE))

    monkeypatch.setattr(beats, "_producer", SimpleNamespace(abort_transaction=refuse))
    monkeypatch.setattr(beats, "_is_failed", True)
    with pytest.raises(Fenced):
        beats.write(heartbeat(1, lease_ms=5_000))


def heartbeat(number, lease_ms=None):
    return Heartbeat(member="m", name="host:1", number=number, lease_ms=lease_ms)


@pytest.mark.slow
def test_lease_is_published_to_a_jvm_that_is_attached_later(settings, spark, join):
    leader = join()
    assert leader.wait()
    name = lease_name(settings.in_term(leader.term))
    leader._closing.set()
    leader._thread.join()
    leader.attach(DriverJvm(spark))
    assert int(jvm(spark).java.lang.System.getProperty(name)) > 0


@pytest.mark.slow
def test_row_waits_for_a_lease_that_is_renewed_late(settings, spark, monkeypatch):
    system = jvm(spark).java.lang.System
    name = lease_name(settings)
    # No sleep of ours: the lease begins in the middle of the row's own wait.
    system.setProperty(name, "0")
    monkeypatch.setattr(lease, "WAITS_MS", (1, 2_000))
    rows = spark.range(1).where(lease_is_held(settings))
    renewed = Timer(0.5, system.setProperty, (name, str(system.nanoTime() + 10**12)))
    renewed.start()
    assert rows.count() == 1
    renewed.join()


def test_without_an_election_every_row_passes(settings, spark):
    assert spark.range(3).where(lease_is_held(settings)).count() == 3
