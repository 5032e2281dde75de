"""Two pipelines on one cluster: one delivers when the other cannot, and nothing comes twice."""

import resource
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.clocks import eventually
from tests.support.live import scraped
from tests.support.processes import complete, running, schedule
from tests.support.schedules import MINUTE, every_minute

from duetime.bench.chaos import children, send_signal
from duetime.client.status import status
from duetime.core.clock import SystemClock
from duetime.kafka.heartbeats import LeaderHeartbeats
from duetime.local.process import free_port

pytestmark = pytest.mark.timeout(1_200)

PATIENCE_S = 120.0

#: The lease of a leader that died, and some seconds for a standby that is not warm here.
TAKEOVER_S = 40.0

#: A pipeline that soon misses its probes, and often writes to its checkpoint.
PROBED = {
    "DUETIME_PROBES": "true",
    "DUETIME_PROBE_TIMEOUT_SECONDS": "20",
    "DUETIME_CHECKPOINT_INTERVAL_SECONDS": "5",
}


def leader_of(live, standbys):
    """The process id of the leader, once so many stand by.

    Those that an earlier test has killed are members for some seconds.
    """
    found = await_leader(
        live,
        lambda found: (
            len(found.standbys) == standbys
            and all(is_alive(pid_of(each)) for each in (found.leader, *found.standbys))
        ),
    )
    return pid_of(found.leader)


def pid_of(member):
    return int(member.rpartition(":")[2])


def another_leads(live, gone):
    await_leader(live, lambda found: not found.leader.endswith(f":{gone}"))


def await_leader(live, is_it):
    """Wait until there is a leader and the status is as it should be."""

    def found():
        told = status(live.settings, SystemClock())
        return told.leader and is_it(told) and told

    return eventually(found, lambda: status(live.settings, SystemClock()), PATIENCE_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_takes_over_and_each_message_comes_once(live, tmp_path, how):
    topic = live.topic()
    inbox = live.inbox(topic)
    with leader_and_standby(live, tmp_path) as (leader, standby):
        assert not standby.leads()
        assert standby.told("duetime_recovery_seconds", "intake") == 0
        jvms = children(leader.pid)
        ids = schedule(live, topic, 1_500, over_s=30)
        # A thousand at a time of what was missed, and the last at its minute.
        ids |= every_minute(live, topic, f"standby.{how.name}", ago=3_500, for_ms=MINUTE)
        inbox.until(lambda: len(inbox.arrived) > 100, "the first messages")
        send_signal(leader.pid, how)
        gone_s = time.monotonic()
        another_leads(live, leader.pid)
        eventually(standby.leads)
        # What its producer was sending is not sent when it goes on: it does not.
        assert jvms
        assert not any(map(is_alive, jvms))
        before = len(inbox.arrived)
        inbox.until(lambda: len(inbox.arrived) > before + 50, "messages from the standby")
        assert time.monotonic() - gone_s < TAKEOVER_S
        # What was in flight there was finished here first.
        eventually(lambda: standby.told("duetime_recovery_seconds", "intake") > 0)
        send_signal(leader.pid, signal.SIGCONT)
        ids |= schedule(live, topic, 100, over_s=10)
        complete(live, topic, inbox, ids)
        if how is signal.SIGSTOP:
            # It starts again in its process.
            assert leader_of(live, standbys=1) != leader.pid


def test_a_leader_that_is_fenced_off_sends_nothing_more_and_stands_by(live, tmp_path):
    """As if a third process had been about to lead, and had died."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with leader_and_standby(live, tmp_path) as (leader, standby):
        ids = schedule(live, topic, 600, over_s=20)
        inbox.until(lambda: len(inbox.arrived) > 100, "the first messages")
        LeaderHeartbeats(live.settings)
        another_leads(live, leader.pid)
        eventually(standby.leads)
        ids |= schedule(live, topic, 100, over_s=10)
        complete(live, topic, inbox, ids)
        # Its JVM may have ended, and it has started again in its process.
        assert leader_of(live, standbys=1) != leader.pid


def test_a_leader_whose_disk_is_full_gives_way_to_the_standby(live, tmp_path):
    """It holds its lease, and its lanes fail each time that they write to the checkpoint."""
    topic = live.topic()
    inbox = live.inbox(topic)
    with leader_and_standby(live, tmp_path, **PROBED) as (leader, standby):
        ids = schedule(live, topic, 600, over_s=20)
        inbox.until(lambda: len(inbox.arrived) > 100, "the first messages")
        eventually(lambda: leader.told("duetime_lateness_seconds_count", "", "lanes") > 0)
        for jvm in children(leader.pid):
            resource.prlimit(jvm, resource.RLIMIT_FSIZE, (0, 0))
        another_leads(live, leader.pid)
        eventually(standby.leads)
        ids |= schedule(live, topic, 100, over_s=10)
        complete(live, topic, inbox, ids)
        # It has started again in its process.
        assert leader_of(live, standbys=1) != leader.pid


@contextmanager
def leader_and_standby(live, directory, **environment):
    """Two pipelines: the one that leads, and the other."""
    with (
        told(live, directory, **environment) as one,
        told(live, directory, **environment) as other,
    ):
        first = leader_of(live, standbys=1)
        leader, standby = sorted((one, other), key=lambda each: each.pid != first)
        eventually(leader.leads)
        yield leader, standby


@contextmanager
def told(live, directory, **environment):
    """A pipeline that tells Prometheus whether it leads."""
    port = free_port()
    given = {"DUETIME_PROBES": "false", "DUETIME_METRICS_PORT": str(port)} | environment
    with running(live, directory, **given) as found:
        yield Told(found.pid, port)


class Told(NamedTuple):
    """Such a pipeline."""

    pid: int
    port: int

    def leads(self):
        return self.told("duetime_is_leader") == 1

    def told(self, name, *labels):
        return scraped(self.port).get((name, *labels) if labels else name, 0)


def is_alive(pid):
    """Whether the process is anything but dead, and waited for perhaps."""
    with suppress(FileNotFoundError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False
