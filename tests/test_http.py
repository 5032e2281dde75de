"""The client over HTTP, against a real server; most of it needs no Kafka."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tests.api.conftest import NOWHERE, Running, alike
from tests.conftest import dead_letters_of

from duetime.api.address import url
from duetime.client import AsyncClient, Client
from duetime.errors import InvalidMessage, KafkaError, TooLate, UnknownMessage
from duetime.message import MessageId

AT = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    """A server without a Kafka: it accepts into its spool."""
    running = Running(alike(NOWHERE, tmp_path_factory.mktemp("api")))
    yield url(running.settings)
    running.stop()


def test_a_message_is_scheduled_with_an_id_that_says_when_and_which(base_url):
    with Client(base_url) as client:
        taken = client.schedule("orders", {"order": 17}, key=b"\xff", at=AT, id="order-17")
        again = client.schedule("orders", {"order": 17}, key=b"\xff", at=AT, id="order-17")
        many = client.schedule_many([("orders", each, {"in_": timedelta(1)}) for each in "ab"])
    assert taken.id == str(MessageId(due_ms=1_577_836_800_000, unique="order-17"))
    assert not taken.in_kafka
    assert again == taken
    assert len({each.id for each in many}) == 2


def test_the_async_client_does_the_same(base_url):
    async def schedule():
        async with AsyncClient(base_url) as client:
            return await client.schedule("orders", "text", at=AT, id="order-18")

    assert asyncio.run(schedule()).id.endswith("-order-18")


def test_a_problem_is_raised_as_the_error_that_it_is(base_url):
    with Client(base_url) as client:
        with pytest.raises(InvalidMessage) as refused:
            client.schedule("bad topic", at=AT)
        with pytest.raises(InvalidMessage):
            client.schedule("orders")
    assert refused.value.reason == "bad-topic"


class Noticing(httpx.HTTPTransport):
    """Notices that nobody is there."""

    def __init__(self):
        super().__init__()
        self.failed = threading.Event()

    def handle_request(self, request):
        try:
            return super().handle_request(request)
        except httpx.ConnectError:
            self.failed.set()
            raise


def test_a_request_is_made_again_until_the_server_is_there(tmp_path):
    settings, transport = alike(NOWHERE, tmp_path), Noticing()
    with Client(url(settings), transport=transport) as client, ThreadPoolExecutor() as threads:
        taken = threads.submit(client.schedule, "orders", at=AT, id="order-19")
        assert transport.failed.wait(10)
        running = Running(settings)
        assert taken.result().id.endswith("-order-19")
        running.stop()


def test_a_server_that_is_not_there_is_told():
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(KafkaError, match="does not answer"),
    ):
        client.reschedule(str(MessageId(due_ms=1, unique="a")), at=AT)


@pytest.mark.system
def test_what_waits_is_found_and_cancelled_and_rescheduled(
    settings, wheel, now_ms, tmp_path, monkeypatch
):
    monkeypatch.setattr("duetime.cancelling.ARRIVAL_MS", 200)
    waiting = wheel.message("orders", now_ms + 60_000, unique="w", value="v")
    running = Running(alike(settings, tmp_path))
    with Client(url(running.settings), timeout=30) as client:
        assert client.find(str(waiting))["value"] == "v"
        assert client.reschedule(str(waiting), in_=timedelta(minutes=5)).endswith("-w~1")
        with pytest.raises(TooLate):
            client.cancel(str(MessageId(due_ms=now_ms - 60_000, unique="gone")))
        with pytest.raises(UnknownMessage):
            client.cancel(str(MessageId(due_ms=now_ms + 60_000, unique="nobody")))
    running.stop()


@pytest.mark.system
def test_what_waits_is_listed_and_counted_page_by_page(
    settings, wheel, now_ms, tmp_path, monkeypatch
):
    monkeypatch.setattr("duetime.api.messages.MOST_READ", 2)
    due = [now_ms + 60_000 + each for each in range(5)]
    sent = [str(wheel.message("orders", at, key="k")) for at in due]
    wheel.message("others", due[0])
    since, until = (datetime.fromtimestamp(each / 1_000, tz=UTC) for each in (due[1], due[4]))
    running = Running(alike(settings, tmp_path))

    async def listed():
        async with AsyncClient(url(running.settings), timeout=30) as client:
            found = [each["id"] async for each in client.messages(topic="orders", key="k")]
            return found, await client.pending(), await client.status()

    with Client(url(running.settings), timeout=30) as client:
        assert [each["id"] for each in client.messages(topic="orders")] == sent
        some = client.messages(topic="orders", from_=since, to=until)
        assert [each["id"] for each in some] == sent[1:4]
        assert client.pending(to=datetime.fromtimestamp(0, tz=UTC))["pending"] == 0
        assert client.status()["leader"] is None
    found, pending, status = asyncio.run(listed())
    assert (found, pending["pending"], status["waiting"]) == (sent, 6, 6)
    running.stop()


@pytest.mark.system
def test_dead_letters_are_listed_shown_and_redriven(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    die = dead_letters_of(settings)
    for topic in ("one", "two", "two"):
        die(topic)
    running = Running(alike(settings, tmp_path))

    async def redriven():
        async with AsyncClient(url(running.settings), timeout=30) as client:
            numbers = [each["number"] for each in await client.dead_letters(topic="two")]
            return numbers, await client.dead_letter(2), await client.redrive(numbers=numbers)

    assert asyncio.run(redriven())[0] == [1, 2]
    with Client(url(running.settings), timeout=30) as client:
        assert [each["topic"] for each in client.dead_letters()] == ["one"]
        assert client.dead_letter(0)["detail"] == "so it is"
        with pytest.raises(InvalidMessage):
            client.redrive()
        assert client.redrive(all=True, reason="unknown-topic") == 1
        with pytest.raises(UnknownMessage):
            client.dead_letter(0)
    running.stop()
