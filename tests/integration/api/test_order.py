"""In which order the messages of each sender come, also through the spool."""

from contextlib import ExitStack

import pytest
from tests.support.api import RunningServer
from tests.support.clocks import eventually
from tests.support.spooling import Load, everything_taken_in, own_broker

from duetime.api.dispatcher import MAX_DRAINED_RECORDS

SENDERS = 6

CREATED, ACCEPTED = 201, 202


class Sender(Load):
    """One of several: its messages have its name, and all one key, and so one partition."""

    def __init__(self, settings, name):
        super().__init__(settings)
        self._name = name
        self.answers = []

    def message(self):
        unique = f"{self._name}-{next(self._numbers)}"
        return {"topic": "orders", "at": "2020-01-01T00:00:00Z", "id": unique, "key": "k"}

    def note(self, sent, status):
        super().note(sent, status)
        self.answers.append(status)


@pytest.mark.slow
def test_each_sender_keeps_its_order_through_an_outage_of_kafka(tmp_path):
    """More than are drained at a time are spooled, and others come while they are drained."""
    with own_broker(tmp_path) as (broker, settings):
        running = RunningServer(settings)
        senders = [Sender(settings, f"s{each}") for each in range(SENDERS)]
        with ExitStack() as sending:
            for each in senders:
                sending.enter_context(each)
            eventually(lambda: answered(CREATED, senders) > 200)
            broker.stop()
            eventually(lambda: answered(ACCEPTED, senders) > 2 * MAX_DRAINED_RECORDS)
            broker.start()
            eventually(lambda: all(each.answers[-20:] == [CREATED] * 20 for each in senders))
        running.stop()
        arrived = everything_taken_in(settings)
    assert len(arrived) == len(set(arrived))
    for each in senders:
        accepted = set(each.accepted)
        assert [name for name in arrived if name in accepted] == each.accepted


def answered(status, senders):
    return sum(each.answers.count(status) for each in senders)
