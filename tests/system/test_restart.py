"""`duetime run` as a process of its own: down, stopped, killed, and started again."""

import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from tests.support.live import now_ms, with_topics
from tests.support.processes import complete, kill, running, schedule
from tests.support.snippets import SHELL, changed
from tests.support.topics import configure

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import LogIdentity, Offsets
from duetime.pipeline.faults import Point

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]

#: How long a stop may take, in seconds: 10 for itself, and something for a busy machine.
STOP_S = 15


@pytest.fixture(scope="module")
def live(down, tmp_path_factory):
    """In place of the running pipeline: one that this module starts and ends."""
    found = down(tmp_path_factory.mktemp("checkpoint"))
    with with_topics(found):
        yield found


def spark_submit():
    """What docs/operating.md has for who hands it to Spark, with the programs of these tests.

    It has arguments of its own: any that follow are not looked at.
    """
    (block,) = (each for each in SHELL if "spark-submit" in each.text)
    submit = Path(pyspark.__path__[0]) / "bin" / "spark-submit"
    # `exec`, so that whoever ends the process ends Spark.
    own = {"python -c": f"{sys.executable} -c", "spark-submit": f"exec {submit}", "2g": "1g"}
    return ["/bin/bash", "-euc", changed(block, own)]


@pytest.mark.hostile
def test_messages_of_earlier_turns_of_the_ring_are_delivered(live, tmp_path):
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


@pytest.mark.parametrize("is_same_topic", [True, False])
def test_records_before_the_progress_are_left_out(live, tmp_path, is_same_topic):
    """But none where that offset is of another topic of the same name."""
    topic, intake = live.topic(), live.names.native
    inbox, offsets = live.inbox(topic), Offsets(live.settings, live.names.progress_group)
    with running(live, tmp_path):
        before = schedule(live, topic, 1, over_s=0, after_s=1)
        inbox.until_id(*before)
    (end,) = offsets.ends([(intake, 0)]).values()
    sent = [str(MessageId(due_ms=now_ms(), unique=f"progress{each}")) for each in range(3)]
    for each in sent:
        due_ms, _, unique = each.partition("-")
        values = {H.DUE_TOPIC: topic, H.DUE_AT_MS: str(int(due_ms, 16)), H.DUE_ID: unique}
        live.send(intake, "x", headers=list(values.items()), partition=0)
    live.flush()
    topic_id = offsets.topic_ids([intake])[intake] if is_same_topic else "1" * 32
    note = LogIdentity(topic_id=topic_id).text()
    offsets.commit({(intake, 0): end + 2}, {(intake, 0): note})
    offsets.close()
    with running(live, tmp_path):
        complete(live, topic, inbox, {*before, *(sent[2:] if is_same_topic else sent)})


@contextmanager
def aged(live, topic):
    """Appends to the wheel as of an earlier time, which a broker stamps only if it is told to."""
    admin = AdminClient(librdkafka_properties(live.settings))
    producer = Producer(librdkafka_properties(live.settings))
    shape = live.settings.wheel

    def append(destination, due_ms, appended_ms):
        identity = str(MessageId(due_ms=due_ms, unique="aged"))
        values = {"due-topic": destination, "due-at-ms": str(due_ms), "due-id": identity}
        headers = [(name, values.get(name)) for name in H.SCHEDULED]
        place = shape.number(0, due_ms) % shape.ring
        producer.produce(topic, "x", partition=place, headers=headers, timestamp=appended_ms)

    configure(admin, topic, "message.timestamp.type", "CreateTime")
    yield append
    producer.flush()
    configure(admin, topic, "message.timestamp.type", "LogAppendTime")


@pytest.mark.hostile
def test_what_waits_when_it_is_stopped_comes_after_it_is_started_again(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        ids = schedule(live, topic, 400, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 20, "the first messages")
        started_s = time.monotonic()
        assert process.stop()
        assert time.monotonic() - started_s < STOP_S
    left = ids - {each.id for each in inbox.arrived}
    assert left
    with running(live, tmp_path):
        complete(live, topic, inbox, ids)


@pytest.mark.parametrize(
    "delivery",
    [
        pytest.param({}, id="read back"),
        # Five minutes of the same again.
        pytest.param(
            {"DUETIME_TRANSACTIONAL_DELIVERY": "true"},
            id="in transactions",
            marks=pytest.mark.hostile,
        ),
    ],
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
