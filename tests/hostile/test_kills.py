"""`duetime run`, killed wherever that is at its worst, and started again."""

from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.clocks import eventually
from tests.support.live import now_ms
from tests.support.processes import complete, kill, running, schedule
from tests.support.schedules import MINUTE, define, every_minute, of_each_policy, wait_for_runs_at

from duetime.client.rescheduling import reschedule
from duetime.core.cron import GRACE_MS, LEAD_MS
from duetime.core.messages import MessageId
from duetime.pipeline.faults import Point
from duetime.stores.wheel_reader import WheelReader

pytestmark = pytest.mark.timeout(1_200)

#: Where a pipeline is to be killed before the first run of a schedule, that is due so much later at
#: least, in ms.
SOON_MS = 30_000

#: How long an outage may last in which two runs are missed, in seconds.
OUTAGE_S = 300.0


@pytest.mark.parametrize("point", [Point.JOB_STARTED, Point.JOB_SENT])
def test_kill_between_two_steps_of_a_job_loses_and_repeats_nothing(live, tmp_path, point):
    topic = live.topic()
    ids = set()
    inbox = live.inbox(topic)
    with running(live, tmp_path, DUETIME_FAULT=point) as process:

        def is_over():
            # What is due before it is ready goes straight on; others wait, and have their turn.
            ids.update(schedule(live, topic, 5, over_s=1, after_s=6))
            return not process.running

        inbox.until(is_over, "the fault")
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


def test_after_a_kill_cancels_hold_and_garbage_stops_nothing(live, tmp_path):
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process, Client(live.settings) as client:
        inbox.until_id(client.produce(topic, "x", in_=timedelta(0)))
        for name in ("t" * 600, "a\0b", "..", "", "\ud800".encode("utf-8", "surrogatepass")):
            live.send(live.names.native, "x", headers=[("due-topic", name), ("due-at-ms", "1")])
        # Cancels are heard in time, also where taking them in lasts seconds.
        cancelled = client.produce(topic, "x", in_=timedelta(seconds=18))
        client.cancel(cancelled)
        inbox.until_id(client.produce(topic, "x", in_=timedelta(seconds=20)))
        kill(process)
    with Client(live.settings) as client:
        # Due in 12 s while no pipeline runs, and overdue when one starts.
        due = datetime.now(UTC) + timedelta(seconds=12)
        twice, gone = ("twice", "gone")
        ids = {
            client.produce(topic, "x", at=due, id=name)
            for name in (twice, gone, *map(str, range(400)), twice)
        }
        unheard = next(each for each in ids if MessageId.parse(each).unique == gone)
        client.cancel(unheard)
    with running(live, tmp_path), Client(live.settings) as client:
        arrived = inbox.until_id(client.produce(topic, "x", in_=timedelta(0)))
        inbox.until(lambda: len(inbox.arrived) >= 3 + len(ids) - 1, "what was sent meanwhile")
    assert len(arrived) == 3 + len(ids) - 1
    assert not {cancelled, unheard} & {each.id for each in arrived}


def test_after_a_kill_what_was_rescheduled_comes_once_at_its_new_time(live, tmp_path):
    """All of it was taken in, and none of that is committed: each record is read once more."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process, closing(WheelReader(live.settings)) as reader:
        inbox.until_id(*schedule(live, topic, 1, over_s=0))
        (old,) = schedule(live, topic, 1, over_s=0, after_s=20)
        found = lambda: reader.find(MessageId.parse(old), now_ms())  # noqa: E731 (asked again)
        eventually(found, "the message in the wheel")
        new = reschedule(old, in_=timedelta(seconds=60), settings=live.settings)
        eventually(lambda: (it := found()) and it.cancelled, "the cancel in the wheel")
        kill(process)
    # No job reads its cancel: the slot of both is emptied at the start.
    over_ms = MessageId.parse(old).due_ms + 1_000
    eventually(lambda: now_ms() > over_ms, "the time that it had")
    with running(live, tmp_path):
        complete(live, topic, inbox, {inbox.arrived[0].id, new})


def test_a_kill_loses_no_run_of_a_schedule_and_sends_none_twice(live, tmp_path):
    """Each schedules the next one: of those that were missed a thousand at a time do."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        ids = every_minute(live, topic, "killed", ago=3_500, for_ms=2 * MINUTE)
        inbox.until(lambda: len(inbox.arrived) >= 1_000, "the first thousand")
        kill(process)
    with running(live, tmp_path, DUETIME_FAULT=Point.SCHEDULES_SENT) as process:
        # It is killed with more of them sent, and not committed.
        inbox.until(lambda: not process.running, "the fault")
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


def test_a_kill_before_the_first_run_of_a_schedule_repeats_and_loses_none(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path, DUETIME_FAULT=Point.SCHEDULES_NOTED) as process:
        ids = every_minute(live, topic, "noted", ago=1_500, for_ms=MINUTE)
        inbox.until(lambda: not process.running, "the fault")
    assert not inbox.arrived
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


def test_a_kill_while_a_run_of_a_schedule_waits_sends_it_once(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        inbox.until_id(*schedule(live, topic, 1, over_s=0))
        begins_ms = now_ms() + SOON_MS
        until_ms = begins_ms + MINUTE - 1
        define(live, topic, "waits", **{"at-ms": begins_ms, "until": until_ms})
        with closing(WheelReader(live.settings)) as reader:
            waits = lambda: list(reader.messages(now_ms(), topic=topic))  # noqa: E731 (asked again)
            (run,) = eventually(waits, "a run that waits", OUTAGE_S)
        kill(process)
    with running(live, tmp_path):
        complete(live, topic, inbox, {str(run.id), inbox.arrived[0].id})


def test_runs_missed_in_an_outage_are_made_up_for_by_the_policy(live, tmp_path):
    """Down for some three minutes: nothing says sooner that a run is missed."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        before = schedule(live, topic, 1, over_s=0)
        inbox.until_id(*before)
        first_ms = -(-(now_ms() + SOON_MS) // MINUTE) * MINUTE
        names, ids, third_ms = of_each_policy(live, topic, first_ms)
        wait_for_runs_at(live, names, first_ms)
        kill(process)
    assert now_ms() < first_ms - LEAD_MS
    missed_ms = first_ms + MINUTE + GRACE_MS
    eventually(lambda: now_ms() > missed_ms, "the end of the outage", OUTAGE_S)
    with running(live, tmp_path):
        wait_for_runs_at(live, names, third_ms)
        complete(live, topic, inbox, ids | before)
