"""`duetime run` over topics, and from a checkpoint, that are not what they were."""

import json
import os
import subprocess
import sys
import uuid
from datetime import timedelta

import pytest
from tests.support.checkpoints import checkpoint, committed, cut, newest
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, with_topics
from tests.support.processes import complete, kill, logs, running, schedule, written

from duetime.core.threads import wait_until
from duetime.kafka.admin import create_topics
from duetime.local.process import GuardedProcess
from duetime.queue import Queue

pytestmark = pytest.mark.timeout(1_200)

QUEUE = f"queue_{uuid.uuid4().hex[:8]}"
QUEUES = {QUEUE: {"partitions": 1}}

#: Something is committed soon.
BRIEF = {"DUETIME_CHECKPOINT_INTERVAL_SECONDS": "5"}


@pytest.fixture
def live(down, tmp_path_factory):
    """A pipeline's topics and checkpoint, for a test alone."""
    found = down(tmp_path_factory.mktemp("checkpoint"), queues=QUEUES)
    with with_topics(found):
        yield found


def create_again(live, *topics):
    """Delete topics, and create them as duetime does."""
    for deleted in live.admin.delete_topics(list(topics)).values():
        deleted.result()
    there = lambda: live.admin.list_topics(timeout=PATIENCE_S).topics  # noqa: E731 (asked again)
    eventually(lambda: not set(topics) & set(there()), "the end of the topics")
    create_topics(live.settings)


def delivered(live, topic, inbox):
    """Some that go the ways of all once it runs; returns the ids of those that have come."""
    ids = schedule(live, topic, 1, over_s=0)
    inbox.until_id(*ids)
    ids |= schedule(live, topic, 400, over_s=8)
    inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, "all of them")
    return ids


def delivered_by_lanes(live, topic, inbox):
    """Return the ids of delivered messages, once intake and lanes have committed some."""
    ids = delivered(live, topic, inbox)
    eventually(lambda: committed(live, "intake") >= 400, "a commit", PATIENCE_S)
    while not wait_until(lambda: committed(live, "lanes"), timeout_s=30):
        # All were due when a slow machine had read them: none took the lanes.
        ids |= delivered(live, topic, inbox)
    return ids


def test_topics_created_again_while_it_is_down_lose_nothing(live, tmp_path):
    """Of intake, of the lanes and of the wheel, with a checkpoint of the old ones."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path, **BRIEF) as process:
        ids = delivered_by_lanes(live, topic, inbox)
        assert process.stop()
    create_again(live, live.names.native, live.names.lanes, live.names.wheel(0))
    ids |= schedule(live, topic, 200, over_s=1)
    with running(live, tmp_path, **BRIEF):
        ids |= schedule(live, topic, 200, over_s=8)
        complete(live, topic, inbox, ids)
    for query, read in (("intake", live.names.native), ("lanes", live.names.lanes)):
        told = f"query={query} reason=topic {read} was created again"
        assert told in logs(tmp_path)
    # Others go on from where they were.
    assert "query=retries reason" not in logs(tmp_path)


def test_a_topic_recreated_while_it_is_read_loses_no_new_record(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path, **BRIEF):
        ids = delivered(live, topic, inbox)
        create_again(live, live.names.native, live.names.wheel(0))
        # More than the first topic had: no offset is out of range.
        ids |= schedule(live, topic, 600, over_s=8)
        inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, "all of the new topic")
        complete(live, topic, inbox, ids)
    assert f"topic {live.names.native} was created again" in logs(tmp_path)


def test_a_checkpoint_torn_by_a_power_cut_loses_and_repeats_nothing(live, tmp_path):
    topic, environment = live.topic(), BRIEF | {"DUETIME_QUEUES": json.dumps(QUEUES)}
    inbox = live.inbox(topic)
    seen = []

    def work(messages, until):
        """Acknowledge what comes again, and drop what is new."""
        while len(seen) < until:
            message = next(messages)
            seen.append(message.value.decode())
            if message.attempt > 1:
                message.ack()

    timeout = timedelta(seconds=1)
    with Queue(QUEUE, group="workers", settings=live.settings, timeout=timeout) as queue:
        messages = iter(queue)
        with running(live, tmp_path, **environment) as process:
            live.send(QUEUE, "first", partition=0)
            ids = delivered_by_lanes(live, topic, inbox)
            work(messages, until=2)
            eventually(lambda: committed(live, "redelivery"), "a commit", PATIENCE_S)
            ids |= schedule(live, topic, 300, over_s=8)
            kill(process)
        cut(newest(live, "intake", "offsets"))
        cut(newest(live, "intake", "commits"), 0.5)
        cut(newest(live, "lanes", "commits"))
        cut(checkpoint(live, "retries") / "metadata")
        state = checkpoint(live, "redelivery") / "state"
        for each in state.rglob("[0-9]*.changelog"):
            cut(each, 0.5)
        live.send(QUEUE, "second", partition=0)
        live.flush()
        with running(live, tmp_path, **environment):
            work(messages, until=4)
            complete(live, topic, inbox, ids)
    assert seen == ["first", "first", "second", "second"]
    for told in (
        "query=intake file=offsets/",
        "query=lanes file=commits/",
        "query=retries reason=its metadata cannot be read",
        "query=redelivery reason=its state cannot be read",
    ):
        assert told in logs(tmp_path)


def test_a_first_start_delivers_no_history_of_another_service_unasked(down, tmp_path):
    """What a service before it has read, and perhaps delivered."""
    publisher = f"publisher_{uuid.uuid4().hex[:8]}"
    live = down(tmp_path, airtel_topic=publisher)
    create_topics(live.settings)
    topic = live.topic()
    inbox = live.inbox(topic)

    def publish(value):
        envelope = {"topic": topic, "value": {"text": value}, "postTime": 1_700_000_000_000}
        live.send(publisher, json.dumps(envelope))
        live.flush()

    publish("delivered long ago")
    command = [sys.executable, "-m", "duetime", "run", "--config", written(live, tmp_path)]
    refused = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert refused.returncode == 1
    assert f"1 records in {publisher}" in refused.stderr
    assert "--from" in refused.stderr
    latest = GuardedProcess.start(
        [*command, "--from", "latest"],
        cwd=tmp_path,
        env=dict(os.environ),
        output=tmp_path / "log-1",
    )
    try:
        eventually(lambda: "recovered query=intake" in logs(tmp_path), "the start", PATIENCE_S)
        publish("new")
        (arrived,) = inbox.take(1)
        assert json.loads(arrived.value) == {"text": "new"}
    finally:
        kill(latest)
    assert f"not delivering records=1 topic={publisher}" in logs(tmp_path)
    live.close()
