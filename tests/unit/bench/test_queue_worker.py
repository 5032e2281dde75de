"""The worker of the queue benchmark, and its figures."""

import pytest

from duetime.bench.clients import Task, in_order, is_wrong, pace, work
from duetime.bench.loadgen import LoadPlan, child_process
from duetime.bench.testbed import Arrival
from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.queue.message import REDELIVERY_COUNT

TASK = Task(LoadPlan(messages=3, destinations=("jobs",)), drop_every=3, timeout_ms=1_000)


class RedeliveredRecord:
    """A redelivered record."""

    def __init__(self, number, count=1, topic="drop"):
        self._number, self._count, self._topic = number, count, topic

    def topic(self):
        return self._topic

    def value(self):
        return f"{self._number}   ".encode()

    def headers(self):
        return [(REDELIVERY_COUNT, bytes([self._count]))]


@pytest.mark.parametrize(
    ("again", "wanted"),
    [
        (RedeliveredRecord(100), False),
        (RedeliveredRecord(101), True),
        (RedeliveredRecord(100, count=2), True),
        (RedeliveredRecord(100, topic="pace"), True),
    ],
)
def test_redelivery_of_an_acknowledged_message_is_wrong(again, wanted):
    assert is_wrong(again, "pace", 100) is wanted


def test_the_pace_is_from_the_first_message_to_the_last():
    assert pace([(10 + number / 50, 1) for number in range(1, 101)]) == 51
    assert pace([(10, 50), (12, 50)]) == 50
    assert pace([]) == 0


def test_a_read_behind_a_later_due_time_of_its_partition_is_out_of_order():
    appended_late = Arrival(5, 4, (0, 3), appended_ms=9)
    others = [Arrival(20, 1, (0, 0)), Arrival(10, 12, (0, 1)), Arrival(10, 12, (1, 0))]
    reads = [others[0], appended_late, *others[1:]]
    made = in_order(reads, sent=4)
    assert (made["delivered"], made["out_of_order"], made["appended_late"]) == (4, 1, 1)
    assert (made["lost"], made["early"], made["max_ms"]) == (0, 0, 12)


def test_a_hanging_worker_is_ended():
    with (
        child_process(0.01, work, Settings(), TASK) as working,
        pytest.raises(KafkaError, match="did not end"),
    ):
        working()


def test_a_worker_waits_for_a_minute_after_the_timeout():
    task = Task(LoadPlan(messages=1_000, rate=50), drop_every=2, timeout_ms=5_000)
    assert task.idle_s == 65
    assert task.limit_s > 1_000 / 50 + 65
