"""The tracker in a process of its own, which is down, killed, and started again."""

import json
import uuid
from datetime import timedelta

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, now_ms, with_topics
from tests.support.processes import running

from duetime.kafka.connection import librdkafka_properties
from duetime.pipeline.faults import Point
from duetime.queue import Queue
from duetime.queue.message import END_VALUE, MarkerKey, start_value

pytestmark = pytest.mark.timeout(1_200)

QUEUE = f"queue_{uuid.uuid4().hex[:8]}"

#: Its tracker was down for an hour, as far as its markers' times tell.
OLD = f"old_{uuid.uuid4().hex[:8]}"
QUEUES = {QUEUE: {"partitions": 4}, OLD: {"partitions": 1}}

HOUR_MS = 3_600_000

TIMEOUT = timedelta(seconds=1)


@pytest.fixture(scope="module")
def live(down, tmp_path_factory):
    """In place of the running pipeline: one that this module starts and ends."""
    found = down(tmp_path_factory.mktemp("checkpoint"), queues=QUEUES)
    as_sent = {"message.timestamp.type": "CreateTime"}
    markers = NewTopic(f"{OLD}__markers", num_partitions=1, config=as_sent)
    found.admin.create_topics([markers])[markers.topic].result()
    with with_topics(found):
        yield found


def send(live, *values):
    for number, value in enumerate(values):
        live.send(QUEUE, value, partition=number % 4)
    live.flush()


def worked_on_an_hour_ago(live):
    """A second's work on 2,000 messages, done up to 50 minutes later or, 10 of them, never."""
    producer, began_ms = Producer(librdkafka_properties(live.settings)), now_ms() - HOUR_MS
    markers, offsets = f"{OLD}__markers", range(2_000)
    for offset in offsets:
        key, at_ms = MarkerKey(0, offset).encoded(), began_ms + offset // 2
        producer.produce(OLD, str(offset), partition=0)
        producer.produce(markers, start_value(1_000), key, partition=0, timestamp=at_ms)
    for offset in offsets:
        if offset % 200 != 199:
            key, at_ms = MarkerKey(0, offset).encoded(), began_ms + 1_000 + offset * 1_500
            producer.produce(markers, END_VALUE, key, partition=0, timestamp=at_ms)
    assert producer.flush(30) == 0
    return {str(offset).encode() for offset in offsets if offset % 200 == 199}


def test_a_killed_tracker_redelivers_open_messages_once(live, tmp_path):
    environment = {"DUETIME_QUEUES": json.dumps(QUEUES)}
    wanted = [f"{what}-{number}" for number in range(20) for what in ("done", "late", "dropped")]
    send(live, *wanted)
    never_done = worked_on_an_hour_ago(live)
    seen, late = [], []

    def work(message):
        value = message.value.decode()
        seen.append(value)
        if message.attempt > 1 or value.startswith("done"):
            message.ack()
        elif value.startswith("late"):
            late.append(message)

    with Queue(QUEUE, group="workers", settings=live.settings, timeout=TIMEOUT) as queue:
        messages = iter(queue)
        while len(seen) < len(wanted):
            work(next(messages))
        # Acknowledged after its time-out, and before a tracker looks.
        over_ms = now_ms() + 1_500
        eventually(lambda: now_ms() >= over_ms)
        for message in late:
            message.ack()
        # Killed between delivering again and writing it down.
        with running(live, tmp_path, DUETIME_FAULT=Point.REDELIVERED, **environment) as process:
            eventually(lambda: not process.running, "the fault", PATIENCE_S)
        with running(live, tmp_path, **environment):
            send(live, "dropped-last")
            while seen.count("dropped-last") < 2:
                work(next(messages))
    dropped = [each for each in wanted if each.startswith("dropped")]
    assert sorted(seen) == sorted([*wanted, *dropped, "dropped-last", "dropped-last"])
    # All of that came out in its first batch.
    again = live.inbox(OLD).take(2_000 + len(never_done))[2_000:]
    assert {each.value for each in again} == never_done
