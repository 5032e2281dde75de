"""What becomes of records when Kafka's client itself fails, or says nothing for long."""

import asyncio
from datetime import timedelta

import httpx
import pytest
from confluent_kafka.admin import AdminClient
from tests.api.conftest import NOWHERE, Running, alike
from tests.api.test_dispatcher import ListedKafka, post
from tests.api.test_spool import await_drained, everything_taken_in
from tests.conftest import configure, eventually

from duetime.admin import create_topics
from duetime.api.address import url
from duetime.api.async_producer import POLL_S, QUIET_LOOKS, SELDOM_S, AsyncProducer, pause_s
from duetime.client import Producer
from duetime.connection import librdkafka_properties
from duetime.errors import ClientFailed
from duetime.local.broker import LocalBroker


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


def test_what_it_had_sent_before_it_failed_is_not_sent_again(serving, kafka):
    client = serving(NOWHERE)
    kafka.arrived.append("a")
    kafka.is_open.set()
    kafka.at_looks = 1

    assert post(client, "a", "b").status_code == 202

    eventually(lambda: kafka.arrived == ["a", "b"])
    eventually(lambda: post(client, "c").status_code == 201)


def test_what_was_spooled_while_it_was_under_way_is_sent_by_the_next_client(serving, kafka):
    client = serving(NOWHERE)
    assert post(client, "a").status_code == 202
    assert post(client, "b").status_code == 202
    kafka.is_open.set()
    kafka.at_looks = 1

    eventually(lambda: kafka.arrived == ["a", "b"])
    eventually(lambda: post(client, "c").status_code == 201)


def test_an_error_that_nobody_thought_of_does_not_end_the_taking_of_reports(
    serving, kafka, monkeypatch, caplog
):
    errors, took = [ValueError("secret")], FailingKafka.poll

    def poll(self):
        if errors:
            raise errors.pop()
        took(self)

    monkeypatch.setattr(FailingKafka, "poll", poll)
    monkeypatch.setattr("duetime.api.async_producer.AFTER_ERROR_S", 0)
    kafka.is_open.set()

    assert post(serving(NOWHERE), "a").status_code == 201
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_reports_are_looked_for_seldom_once_there_were_none_for_a_second():
    assert pause_s(0) == pause_s(QUIET_LOOKS - 1) == POLL_S
    assert pause_s(QUIET_LOOKS) == SELDOM_S


def test_whatever_is_handed_over_is_looked_for_often_again(kafka):  # noqa: ARG001
    async def run():
        producer = AsyncProducer(NOWHERE)
        producer._quiet_looks = QUIET_LOOKS
        producer.hand_over([])
        assert producer._quiet_looks == 0

    asyncio.run(run())


#: How many records the client has room for.
ROOM = 3


def with_room(settings):
    """The same, of a client that has room for so many records alone."""
    few = {"queue.buffering.max.messages": ROOM}
    return settings.model_copy(update={"librdkafka_properties": few})


def test_a_client_without_room_holds_up_nobody(serving):
    client = serving(with_room(NOWHERE))
    names = [f"m{each}" for each in range(9)]
    assert post(client, *names).status_code == 202
    assert client.get("/healthz", timeout=5).status_code == 200
    told = post(client, "last").json()["messages"][0]
    assert client.get(f"/v1/messages/{told['id']}").json()["id"] == told["id"]


def test_what_the_client_has_no_room_for_comes_once_and_behind_what_it_has(
    serving, kafka, monkeypatch
):
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


@pytest.mark.system
@pytest.mark.slow
def test_messages_of_a_small_client_come_in_order_when_the_broker_is_back(tmp_path):
    with LocalBroker(tmp_path / "kafka") as broker:
        at_broker = with_room(NOWHERE.model_copy(update={"bootstrap": broker.bootstrap}))
        settings = alike(at_broker, tmp_path)
        create_topics(settings)
        running = Running(settings)
        with httpx.Client(base_url=url(settings), timeout=30) as client:
            broker.stop()
            # All of one key, and so of one partition.
            assert post(client, *[f"m{each}" for each in range(20)], key="k").status_code == 202
            assert post(client, "last", key="k").status_code == 202
            broker.start()
            await_drained(settings)
        running.stop()
        arrived = everything_taken_in(settings)
    assert arrived == [*(f"m{each}" for each in range(20)), "last"]


@pytest.mark.system
def test_a_real_client_says_that_it_has_failed_for_good(settings, topics):  # noqa: ARG001
    intake = f"{settings.namespace}.in"
    configure(AdminClient(librdkafka_properties(settings)), intake, "max.message.bytes", "2000")
    # It fails where a record is missing among others: the same error as that of a lost sequence.
    producer = Producer(settings, **{"enable.gapless.guarantee": True})
    producer.produce("t", "x" * 5_000, in_=timedelta(hours=1))
    eventually(lambda: has_failed(producer))
    with pytest.raises(ClientFailed):
        producer.produce("t", "x", in_=timedelta(hours=1))


def has_failed(producer):
    try:
        producer.poll(0.05)
    except ClientFailed:
        return True
    return False
