"""Which partitions a scan reads, and how long it waits for a leader."""

import threading

import pytest

from duetime.core.settings import Settings
from duetime.kafka.offsets import TIMEOUT_S, Unreadable
from duetime.pipeline.recovery.read_back import DeliveryLog

DEAD = tuple(f"dead-{number}" for number in range(5))


class Leaderless:
    """Offsets of a cluster where some topics get no leader in time."""

    def __init__(self):
        self.waits, self.dead = [], set(DEAD)
        # Passed only by all at once.
        self._waiting = threading.Barrier(len(DEAD), timeout=10)

    def readable_partitions(self, topic, *, all_led, timeout_s):
        assert all_led
        if topic not in self.dead:
            return [(topic, 0)]
        self.waits.append(timeout_s)
        if timeout_s:
            self._waiting.wait()
        raise Unreadable("a partition has no leader")

    def ends(self, places):
        return dict.fromkeys(places, 7)


@pytest.fixture
def scanner(spark):
    found = DeliveryLog(spark, Settings())
    found.close()
    found._here.offsets = Leaderless()
    return found


def test_destinations_without_a_leader_are_waited_for_at_once_and_once(scanner, caplog):
    here, topics = scanner._here, ["orders", *DEAD]
    for _ in range(2):
        assert scanner._ends(here, topics) == {("orders", 0): 7}
    assert sorted(here.offsets.waits) == [0.0] * len(DEAD) + [TIMEOUT_S] * len(DEAD)
    assert caplog.text.count("messages in flight may be delivered twice") == len(DEAD)


def test_a_destination_that_had_a_leader_again_is_waited_for_again(scanner):
    here = scanner._here
    scanner._ends(here, DEAD)
    here.offsets.dead.clear()
    assert scanner._ends(here, DEAD) == {(topic, 0): 7 for topic in DEAD}
    here.offsets.dead.update(DEAD)
    here.offsets.waits.clear()
    assert scanner._ends(here, DEAD) == {}
    assert here.offsets.waits == [TIMEOUT_S] * len(DEAD)
