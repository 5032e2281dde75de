"""One leads, the others stand by; and no row passes without a lease."""

import os
from contextlib import ExitStack
from threading import Timer
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import TopicPartition
from pyspark.errors import PySparkException
from tests.conftest import eventually

from duetime.clock import SystemClock
from duetime.pipeline import leases
from duetime.pipeline.election import Election, lease_is_held, lease_name
from duetime.pipeline.jvm import jvm
from duetime.standing import RESCUES_TOLD, Rescue
from duetime.status import status

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("topics")]

PATIENCE_S = 60.0


@pytest.fixture
def join(settings):
    """Makes a member of the group, which leaves at the end of the test."""
    with ExitStack() as members:

        def joined():
            member = Election(settings, SystemClock())
            members.callback(member.close)
            member.start()
            return member

        yield joined


def test_the_first_leads_and_keeps_it_when_others_come_and_the_next_leads_when_it_leaves(join):
    first = join()
    assert first.wait()
    second = join()
    assert not second.wait()
    assert first.is_leading.is_set()
    first.close()
    assert second.is_leading.wait(PATIENCE_S)


def test_who_leaves_waits_for_what_it_has_sent_before_another_may_lead(join):
    first = join()
    assert first.wait()
    second, seen = join(), []

    def settle():
        seen.append((first.holds_lease(), second.is_leading.wait(2)))

    first.close(settle)
    # Nothing more was sent meanwhile, and nobody else led.
    assert seen == [(False, False)]
    assert second.is_leading.wait(PATIENCE_S)


def test_status_names_the_leader_its_time_and_who_stands_by(settings, join):
    clock = SystemClock()
    assert status(settings, clock).leader is None
    before_ms = clock.now_ms()
    leader = join()
    told = {"rescued": 3, "queries": {"lanes": "begins"}, "rescues": [(17, 3, 1, 9)]}
    leader.tell = lambda: told
    assert leader.wait()
    assert not join().wait()
    # Both are members of this process.
    found = status(settings, clock)
    assert found.leader.endswith(f":{os.getpid()}")
    assert before_ms <= found.since_ms <= clock.now_ms()
    assert found.standbys == (found.leader,)
    assert (found.waiting, found.late, found.lag_ms) == (0, 0, 0)
    assert (found.rescued, found.queries) == (3, {"lanes": "begins"})
    assert found.rescues == (Rescue(at_ms=17, messages=3, from_ms=1, to_ms=9),)


def test_a_note_that_is_too_long_is_left_out(settings, join):
    leader = join()
    leader.tell = lambda: {"queries": dict.fromkeys(map(str, range(1_000)), "runs")}
    assert leader.wait()
    found = status(settings, SystemClock())
    assert (found.leader is not None, found.queries) == (True, {})


def test_of_a_note_that_is_too_long_the_last_is_left_out_first(settings, join):
    leader = join()
    latest = [(clock_ms, 10**9, clock_ms, clock_ms) for clock_ms in [2**41] * RESCUES_TOLD]
    many = dict.fromkeys((f"outbox.cluster-{each:02}" for each in range(100)), "runs")
    leader.tell = lambda: {"rescued": 3, "queries": {**many, "lanes": "begins"}, "rescues": latest}
    assert leader.wait()
    found = status(settings, SystemClock())
    assert (found.rescued, len(found.queries), len(found.rescues)) == (3, 101, RESCUES_TOLD)

    more = dict.fromkeys(map(str, range(300)), "runs")
    leader.tell = lambda: {"rescued": 4, "queries": more, "rescues": latest}
    found = eventually(lambda: rescued(settings, 4))
    assert (len(found.queries), found.rescues) == (300, ())


def rescued(settings, number):
    """The state, once it has so many."""
    found = status(settings, SystemClock())
    return found if found.rescued == number else None


def test_status_counts_what_waits_and_what_is_late(settings, wheel, now_ms):
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
    leader.guard(jvm(spark))
    assert leader.wait()
    assert leader.term == 1
    return leader


def test_the_rows_of_a_leader_that_steps_down_are_not_sent(settings, spark, join, monkeypatch):
    leader = leading(spark, join)
    rows = spark.range(1).where(lease_is_held(settings.in_term(1)))
    eventually(lambda: rows.count() == 1)
    assert leader.holds_lease()
    monkeypatch.setattr(leader, "_renew", lambda: None)
    leader._step_down()
    assert not leader.is_leading.is_set()
    assert not leader.holds_lease()
    monkeypatch.setattr(leases, "WAITS_MS", (1,))
    with pytest.raises(PySparkException, match="the lead is lost"):
        spark.range(1).where(lease_is_held(settings.in_term(1))).count()


def test_the_rows_of_an_older_term_are_not_sent_when_the_same_process_leads_again(
    settings, spark, join, monkeypatch
):
    """The leader loses the lead and gets it back, while rows of its first term wait for a lease.

    Another has led in between, and may have sent them.
    """
    monkeypatch.setattr(leases, "WAITS_MS", (1,))
    old, new = (spark.range(1).where(lease_is_held(settings.in_term(term))) for term in (1, 2))
    leader = leading(spark, join)
    eventually(lambda: old.count() == 1)
    # The group takes the partition away, and gives it back.
    leader._step_down()
    kept = SimpleNamespace(incremental_assign=list)
    leader._assigned(kept, [TopicPartition(*leader._place)])
    eventually(leader.is_leading.is_set)
    assert new.count() == 1
    with pytest.raises(PySparkException, match="the lead is lost"):
        old.count()


@pytest.mark.parametrize(
    ("answered", "is_renewed"),
    [
        (None, True),
        # A standby stands still between asking to join and being told its assignment.
        (BrokerError.REBALANCE_IN_PROGRESS, True),
        (BrokerError.UNKNOWN_MEMBER_ID, False),
        (BrokerError.ILLEGAL_GENERATION, False),
        (BrokerError._TIMED_OUT, False),
    ],
)
def test_the_lease_is_renewed_by_what_only_members_are_answered(settings, answered, is_renewed):
    leader = Election(settings, SystemClock())
    leader._committed = lambda _: answered and BrokerError(answered)
    leader._renew()
    assert leader.holds_lease() == is_renewed
    leader.close()


def test_a_leader_that_gets_its_jvm_later_holds_up_rows_from_then_on(settings, spark, join):
    leader = join()
    assert leader.wait()
    name = lease_name(settings.in_term(leader.term))
    leader._closing.set()
    leader._thread.join()
    leader.guard(jvm(spark))
    assert int(jvm(spark).java.lang.System.getProperty(name)) > 0


def test_a_row_waits_for_a_lease_that_is_renewed_late(settings, spark, monkeypatch):
    system = jvm(spark).java.lang.System
    name = lease_name(settings)
    # No sleep of ours: the lease begins in the middle of the row's own wait.
    system.setProperty(name, "0")
    monkeypatch.setattr(leases, "WAITS_MS", (1, 2_000))
    rows = spark.range(1).where(lease_is_held(settings))
    renewed = Timer(0.5, system.setProperty, (name, str(system.nanoTime() + 10**12)))
    renewed.start()
    assert rows.count() == 1
    renewed.join()


def test_without_an_election_every_row_passes(settings, spark):
    assert spark.range(3).where(lease_is_held(settings)).count() == 3
