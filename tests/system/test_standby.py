"""Two pipelines on one cluster: one delivers when the other cannot, and nothing comes twice."""

import signal
import time

import pytest
from tests.system.test_restart import live, running, schedule

from duetime.bench.crash import send_signal
from duetime.clock import SystemClock
from duetime.pipeline.kafka import DELIVERY_TIMEOUT_S
from duetime.status import status

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["live"]

PATIENCE_S = 120.0

#: How long a leader is stopped at least, in seconds: longer than a sink tries to deliver.
PAUSE_S = DELIVERY_TIMEOUT_S + 5

#: What the producer of a leader was writing at the instant of its pause may come twice: see
#: docs/guarantees.md.
JUST_WRITTEN = 5

#: The session of a leader that died, and some seconds for a standby that is not warm here.
TAKEOVER_S = 40.0


def leader_of(live, standbys):
    """The process id of the leader, once so many stand by."""
    found = await_leader(live, lambda found: len(found.standbys) == standbys)
    return int(found.leader.rpartition(":")[2])


def another_leads(live, gone):
    await_leader(live, lambda found: not found.leader.endswith(f":{gone}"))


def await_leader(live, is_it):
    """Wait until there is a leader and the status is as it should be."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        found = status(live.settings, SystemClock())
        if found.leader and is_it(found):
            return found
        assert time.monotonic() < until_s, found
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_takes_over_and_each_message_comes_once(live, tmp_path, how):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path), running(live, tmp_path):
        first = leader_of(live, standbys=1)
        ids = schedule(live, topic, 1_500, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 100, "the first messages")
        send_signal(first, how)
        gone_s = time.monotonic()
        another_leads(live, first)
        before = len(inbox.arrived)
        inbox.until(lambda: len(inbox.arrived) > before + 50, "messages from the standby")
        assert time.monotonic() - gone_s < TAKEOVER_S
        # What was stopped goes on, in the middle of what it did, and must not send it: not even
        # what it has handed to its producer, which is too old by then.
        over_s = gone_s + PAUSE_S
        inbox.until(lambda: time.monotonic() > over_s, "the end of the pause")
        send_signal(first, signal.SIGCONT)
        ids |= schedule(live, topic, 100, over_s=10)
        inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, f"all of {len(ids)}")
        arrived = [each.id for each in inbox.arrived]
        assert set(arrived) == ids
        assert min(each.late_ms for each in inbox.arrived) >= 0
        assert len(arrived) - len(ids) <= (JUST_WRITTEN if how is signal.SIGSTOP else 0)
        if how is signal.SIGSTOP:
            assert leader_of(live, standbys=1) != first
