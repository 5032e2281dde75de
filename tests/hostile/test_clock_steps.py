"""The clock is set by 30 s, forth and back: nothing is early by the corrected one, or lost."""

import os
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.live import with_topics

from duetime.bench.chaos import environment
from duetime.client.producer import Producer
from duetime.core.clock import SystemClock

pytestmark = pytest.mark.timeout(1_200)

STEP_MS = 30_000


@pytest.fixture
def live(down, tmp_path):
    """In place of the running pipeline: one whose clock can be set."""
    found = down(tmp_path)
    with with_topics(found):
        yield found


@contextmanager
def running(settings):
    """The process; gives the function that sets its clock, and returns when it is set, epoch ms."""
    command = [sys.executable, "-m", "tests.support.clock_that_is_set"]
    with subprocess.Popen(
        command,
        env=os.environ | environment(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def set_ahead(ms):
            print(ms, file=process.stdin, flush=True)
            assert process.stdout.readline() == "set\n"
            return SystemClock().now_ms()

        assert process.stdout.readline() == "ready\n"
        yield set_ahead
        process.stdin.close()


def send(client, topic, delays_ms):
    """Messages due so long from now, by the true clock; returns their ids."""
    now = datetime.now(UTC)
    delays = [timedelta(milliseconds=each) for each in delays_ms]
    return {client.produce(topic, "x", at=now + delay) for delay in delays}


def test_clock_step_makes_no_message_early_and_loses_none(live):
    topic = live.topic()
    inbox = live.inbox(topic)

    def arrived(ids):
        inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, "all")
        return [each for each in inbox.arrived if each.id in ids]

    with running(live.settings) as set_ahead, Producer(live.settings) as client:
        first = send(client, topic, range(500, 25_000, 250))
        inbox.until(lambda: inbox.arrived, "the first")
        forth_ms = set_ahead(STEP_MS)
        # What is due by the new clock comes at once.
        assert all(each.appended_ms - forth_ms < STEP_MS / 2 for each in arrived(first))

        # By the wrong clock: at once, soon, and a little later.
        fast = send(client, topic, range(STEP_MS - 1_000, STEP_MS + 10_000, 250))
        inbox.until(lambda: {each.id for each in inbox.arrived} & fast, "the first of these")
        back_ms = set_ahead(0)
        new = send(client, topic, range(500, 10_000, 250))
        assert min(each.late_ms for each in arrived(new)) >= 0
        assert all(each.late_ms < STEP_MS / 2 for each in arrived(new))
        late = arrived(fast)

    assert all(each.late_ms >= 0 for each in late if each.appended_ms > back_ms)
    assert len([each for each in late if each.appended_ms > back_ms]) > len(fast) / 2
    assert len(inbox.arrived) == len(first | fast | new)
