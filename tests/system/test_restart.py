"""`duetime run` as a process of its own: down, stopped, killed, and started again."""

import os
import sys
import time
import uuid
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyspark
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from tests.conftest import FROM_OUTSIDE, configure, eventually
from tests.snippets import SHELL, changed
from tests.system.test_recurring import (
    MINUTE,
    define,
    every_minute,
    of_each_policy,
    wait_for_runs_at,
)

from duetime.admin import create_topics
from duetime.bench import crash
from duetime.clock import SystemClock
from duetime.connection import librdkafka_properties
from duetime.local.process import GuardedProcess
from duetime.message import WAITING_HEADERS, MessageId
from duetime.pipeline.faults import Point
from duetime.recurrence import GRACE_MS, LEAD_MS
from duetime.reschedule import reschedule
from duetime.stores.reader import WheelReader

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

#: How long a stop may take, in seconds: 10 for itself, and something for a busy machine.
STOP_S = 15

#: Where a pipeline is to be killed before the first run of a series, that is due so much later at
#: least, in ms.
SOON_MS = 30_000

#: How long an outage may last in which two runs are missed, in seconds.
OUTAGE_S = 300.0

#: What was in flight is finished in more than one batch.
IN_BATCHES = {"DUETIME_BATCH_RECORDS": "300", "PYSPARK_PYTHON": sys.executable}


@pytest.fixture(scope="module")
def live(down, tmp_path_factory):
    """In place of the running pipeline: one that this module starts and ends."""
    found = down(tmp_path_factory.mktemp("checkpoint"))
    create_topics(found.settings)
    yield found
    found.close()


def spark_submit():
    """What docs/operating.md has for who hands it to Spark, with the programs of these tests.

    It has arguments of its own: any that follow are not looked at.
    """
    (block,) = (each for each in SHELL if "spark-submit" in each.text)
    submit = Path(pyspark.__path__[0]) / "bin" / "spark-submit"
    # `exec`, so that whoever ends the process ends Spark.
    own = {"python -c": f"{sys.executable} -c", "spark-submit": f"exec {submit}", "2g": "1g"}
    return ["/bin/bash", "-euc", changed(block, own)]


@contextmanager
def running(live, directory, program=(sys.executable, "-m", "duetime"), **environment):
    """A started `duetime run`, ended hard unless it has ended before; or when these tests are."""
    command = [*program, "run", "--config", written(live, directory)]
    output = directory / f"log-{uuid.uuid4().hex[:8]}"
    process = GuardedProcess.start(
        command, cwd=directory, env=os.environ | IN_BATCHES | environment, output=output
    )
    try:
        yield process
    finally:
        kill(process)


def written(live, directory):
    """The settings as a file."""
    path = directory / "duetime.toml"
    # Queues and delayed topics are tables, and given in the environment.
    outside = FROM_OUTSIDE | {"queues", "delayed_topics"}
    given = live.settings.model_dump(mode="json", exclude_unset=True, exclude=outside)
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()))
    return path


def kill(process):
    """End Python and its JVM at once, as the kernel or a power cut would."""
    if process.running:
        crash.kill(process.pid)
    process.kill()


def now_ms():
    return SystemClock().now_ms()


def schedule(live, topic, count, over_s, after_s=0):
    """Messages due one after another, the first at once or later; returns their ids."""
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    with Client(live.settings) as client:
        first, step = timedelta(seconds=after_s), timedelta(seconds=over_s) / count
        return {client.produce(topic, "x", in_=first + each * step) for each in range(count)}


def complete(live, topic, inbox, ids):
    """Wait for every id; each has come once, and none early."""
    inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, f"all of {len(ids)}")
    # Whatever comes twice comes with what is overdue, before one that has yet to wait.
    last = schedule(live, topic, 1, over_s=0, after_s=6)
    inbox.until_id(*last)
    assert sorted(each.id for each in inbox.arrived) == sorted(ids | last)
    assert min(each.late_ms for each in inbox.arrived) >= 0
    return inbox.arrived


def test_the_ring_turned_while_nothing_was_released_and_each_message_finds_its_turn(live, tmp_path):
    """Three turns of the ring in one partition: two are over, and one is yet to come."""
    topic, wheel = live.topic(), live.settings.wheel
    second_ms = now_ms() // 1_000 * 1_000
    with aged(live, live.names.wheel(0)) as append:
        for turn, appended_ms in ((-2, -60_000), (-1, -40_000), (0, -2_000)):
            due_ms = second_ms + 19_000 + turn * wheel.ring * wheel.tick_ms
            append(topic, due_ms, second_ms + appended_ms)
    # Also where Spark was started by someone else.
    with running(live, tmp_path, program=spark_submit()):
        arrived = live.inbox(topic).take(3)
    assert min(each.late_ms for each in arrived) >= 0
    assert [each.id for each in arrived] == sorted(each.id for each in arrived)


@contextmanager
def aged(live, topic):
    """Appends to the wheel as of an earlier time, which a broker stamps only if it is told to."""
    admin = AdminClient(librdkafka_properties(live.settings))
    producer = Producer(librdkafka_properties(live.settings))
    shape = live.settings.wheel

    def append(destination, due_ms, appended_ms):
        identity = str(MessageId(due_ms=due_ms, unique="aged"))
        values = {"due-topic": destination, "due-at-ms": str(due_ms), "due-id": identity}
        headers = [(name, values.get(name)) for name in WAITING_HEADERS]
        place = shape.number(0, due_ms) % shape.ring
        producer.produce(topic, "x", partition=place, headers=headers, timestamp=appended_ms)

    configure(admin, topic, "message.timestamp.type", "CreateTime")
    yield append
    producer.flush()
    configure(admin, topic, "message.timestamp.type", "LogAppendTime")


def test_what_waits_when_it_is_stopped_comes_after_it_is_started_again(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        ids = schedule(live, topic, 400, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 20, "the first messages")
        began_s = time.monotonic()
        assert process.stop()
        assert time.monotonic() - began_s < STOP_S
    left = ids - {each.id for each in inbox.arrived}
    assert left
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


@pytest.mark.parametrize(
    "delivery",
    [{}, {"DUETIME_TRANSACTIONAL_DELIVERY": "true"}],
    ids=["read back", "in transactions"],
)
def test_a_kill_loses_nothing_and_sends_nothing_twice(live, tmp_path, delivery):
    """In every stage at once: at the intake, in lanes, in windows, and on far levels."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path, **delivery) as process:
        ids = schedule(live, topic, 300, over_s=3) | schedule(live, topic, 600, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 100, "the first messages")
        ids |= schedule(live, topic, 300, over_s=3)
        kill(process)
    ids |= schedule(live, topic, 50, over_s=1)
    with running(live, tmp_path, DUETIME_FAULT=Point.RECOVER_SENT, **delivery) as process:
        # It is killed in the middle of recovering.
        inbox.until(lambda: not process.running, "the fault")
    with running(live, tmp_path, **delivery):
        complete(live, topic, inbox, ids)


@pytest.mark.hostile
@pytest.mark.parametrize("point", [Point.TURN_BEGUN, Point.TURN_SENT])
def test_a_kill_between_two_steps_of_a_turn_loses_nothing_and_sends_nothing_twice(
    live, tmp_path, point
):
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


@pytest.mark.hostile
def test_after_a_kill_what_was_cancelled_stays_so_and_garbage_stops_nothing(live, tmp_path):
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
        # Far from due while nobody listens, and overdue when somebody does.
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


@pytest.mark.hostile
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
    # Nobody meets its cancel any more: the slot of the two is emptied at the start.
    over_ms = MessageId.parse(old).due_ms + 1_000
    eventually(lambda: now_ms() > over_ms, "the time that it had")
    with running(live, tmp_path):
        complete(live, topic, inbox, {inbox.arrived[0].id, new})


@pytest.mark.hostile
def test_a_kill_loses_no_run_of_a_series_and_sends_none_twice(live, tmp_path):
    """Each schedules the next one: of those that were missed a thousand at a time do."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        ids = every_minute(live, topic, "killed", ago=3_500, for_ms=2 * MINUTE)
        inbox.until(lambda: len(inbox.arrived) >= 1_000, "the first thousand")
        kill(process)
    with running(live, tmp_path, DUETIME_FAULT=Point.RECURRING_SENT) as process:
        # It is killed with more of them sent, and not committed.
        inbox.until(lambda: not process.running, "the fault")
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


@pytest.mark.hostile
def test_a_kill_before_the_first_run_of_a_series_loses_none_and_sends_none_twice(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path, DUETIME_FAULT=Point.RECURRING_NOTED) as process:
        ids = every_minute(live, topic, "noted", ago=1_500, for_ms=MINUTE)
        inbox.until(lambda: not process.running, "the fault")
    assert not inbox.arrived
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


@pytest.mark.hostile
def test_a_kill_while_a_run_of_a_series_waits_sends_it_once(live, tmp_path):
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


@pytest.mark.hostile
def test_runs_missed_while_no_pipeline_runs_are_made_up_for_as_the_policy_says(live, tmp_path):
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
