"""What becomes of records when Kafka's client itself fails, or says nothing for long."""

import asyncio

import pytest
from tests.support.api import NOWHERE, ROOM, with_room
from tests.support.clocks import eventually
from tests.support.made_kafka import ListedKafka, post

from duetime.api.producer import (
    IDLE_POLL_INTERVAL_S,
    IDLE_POLLS,
    POLL_INTERVAL_S,
    AsyncProducer,
    poll_interval_s,
)
from duetime.core.errors import ClientFailed


class FailingKafka(ListedKafka):
    """Clients that fail for good when they are to; what one held, the next knows nothing of."""

    def __init__(self):
        super().__init__()
        self.made = 0
        #: How many fail when they are looked at, and how many when they are given something.
        self.at_looks = self.at_sends = 0

    def __call__(self, *_, **__):
        self.made += 1
        self._waiting = []
        return self

    def send(self, record, report):
        if self.at_sends:
            self.at_sends -= 1
            raise ClientFailed("out of sequence")
        super().send(record, report)

    def poll(self):
        if self.at_looks and self._waiting:
            self.at_looks -= 1
            raise ClientFailed("out of sequence")
        super().poll()


@pytest.fixture
def kafka(monkeypatch):
    return FailingKafka().installed(monkeypatch)


@pytest.mark.parametrize("failing", ["at_looks", "at_sends"])
def test_a_client_that_fails_for_good_is_replaced_and_nothing_is_lost(serving, kafka, failing):
    client = serving(NOWHERE)
    kafka.is_open.set()
    setattr(kafka, failing, 2)

    assert post(client, "a", "b").status_code == 202
    eventually(lambda: kafka.arrived == ["a", "b"])

    eventually(lambda: post(client, "c").status_code == 201)
    assert kafka.made == 3
    assert client.get("/readyz").status_code == 200


def test_records_that_arrived_before_the_failure_are_not_sent_again(serving, kafka):
    client = serving(NOWHERE)
    kafka.arrived.append("a")
    kafka.is_open.set()
    kafka.at_looks = 1

    assert post(client, "a", "b").status_code == 202

    eventually(lambda: kafka.arrived == ["a", "b"])
    eventually(lambda: post(client, "c").status_code == 201)


def test_records_spooled_under_way_are_sent_by_the_next_client(serving, kafka):
    client = serving(NOWHERE)
    assert post(client, "a").status_code == 202
    assert post(client, "b").status_code == 202
    kafka.is_open.set()
    kafka.at_looks = 1

    eventually(lambda: kafka.arrived == ["a", "b"])
    eventually(lambda: post(client, "c").status_code == 201)


def test_an_unexpected_error_does_not_end_the_polling_of_reports(
    serving, kafka, monkeypatch, caplog
):
    errors, took = [ValueError("secret")], FailingKafka.poll

    def poll(self):
        if errors:
            raise errors.pop()
        took(self)

    monkeypatch.setattr(FailingKafka, "poll", poll)
    monkeypatch.setattr("duetime.api.producer.ERROR_DELAY_S", 0)
    kafka.is_open.set()

    assert post(serving(NOWHERE), "a").status_code == 201
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_reports_are_polled_less_often_after_an_idle_second():
    assert poll_interval_s(0) == poll_interval_s(IDLE_POLLS - 1) == POLL_INTERVAL_S
    assert poll_interval_s(IDLE_POLLS) == IDLE_POLL_INTERVAL_S


def test_new_records_are_polled_often_again(kafka):  # noqa: ARG001
    async def run():
        producer = AsyncProducer(NOWHERE)
        producer._idle_polls = IDLE_POLLS
        producer.hand_over([])
        assert producer._idle_polls == 0

    asyncio.run(run())


def test_a_client_without_room_does_not_block_other_requests(serving):
    client = serving(with_room(NOWHERE))
    names = [f"m{each}" for each in range(9)]
    assert post(client, *names).status_code == 202
    assert client.get("/healthz", timeout=5).status_code == 200
    told = post(client, "last").json()["messages"][0]
    assert client.get(f"/v1/messages/{told['id']}").json()["id"] == told["id"]


def test_records_without_room_arrive_once_and_after_the_others(serving, kafka, monkeypatch):
    offered = FailingKafka.offer
    monkeypatch.setattr(
        FailingKafka,
        "offer",
        lambda self, *record: len(self._waiting) < ROOM and offered(self, *record),
    )
    client = serving(NOWHERE)
    names = [f"m{each}" for each in range(9)]
    assert post(client, *names).status_code == 202
    assert post(client, "last").status_code == 202
    kafka.is_open.set()

    eventually(lambda: kafka.arrived[-1:] == ["last"])
    assert kafka.arrived == [*names, "last"]
