"""The client over HTTP, against a real server; most of it needs no Kafka."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from confluent_kafka import Producer
from tests.api.conftest import NOWHERE, Running, alike, failed
from tests.conftest import dead_letters_of
from tests.leading import leading

from duetime.api.address import url
from duetime.asking import HEARD_S
from duetime.cancelling import ARRIVAL_MS, CONFIRM_MS
from duetime.client import AsyncClient, Client
from duetime.clock import format_instant
from duetime.connection import librdkafka_properties
from duetime.errors import InvalidMessage, KafkaError, TooLate, UnknownMessage
from duetime.http import Rescue, Waiting, answers
from duetime.message import MessageId
from duetime.series import Page, Series
from duetime.topics import TopicNames

#: Nothing listens there.
NOBODY = "http://127.0.0.1:1"

AT = datetime(2020, 1, 1, tzinfo=UTC)

END_MS = 4_102_444_800_000

SOME_ID = "0000000003e8-a"

DAILY = Series(name="daily", since="1-daily", topic="orders", cron="@daily", until=str(END_MS))


def instant(ms):
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


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


def test_a_series_is_scheduled_under_its_name_and_needs_no_start(base_url):
    with Client(base_url) as client:
        taken = client.schedule("reports", cron="0 9 * * 1-5", zone="Europe/Berlin", id="daily")
        assert client.schedule("reports", cron="@daily", until=instant(2**42), at=AT).id
        with pytest.raises(InvalidMessage):
            client.schedule("reports", cron="@daily", misfire="perhaps")
    assert taken.id == "daily"


def test_both_clients_have_the_same_calls():
    calls = {name for name in vars(Client) if not name.startswith("_")}
    assert calls == {name for name in vars(AsyncClient) if not name.startswith("_")}


def test_an_answer_is_waited_for_longer_than_the_api_may_take_to_give_it():
    waits = []

    def answer(request):
        waits.append(request.extensions["timeout"])
        return httpx.Response(204)

    transport = httpx.MockTransport(answer)

    async def cancel():
        async with AsyncClient(NOBODY, transport=transport) as client:
            await client.cancel(SOME_ID)

    with Client(NOBODY, transport=transport) as client:
        client.cancel(SOME_ID)
    asyncio.run(cancel())
    assert waits[0] == waits[1]
    cancel_s = (ARRIVAL_MS + CONFIRM_MS) / 1_000
    assert waits[0]["read"] > max(NOWHERE.api_request_seconds, HEARD_S, cancel_s)
    assert waits[0]["connect"] < waits[0]["read"]
    with Client(NOBODY, transport=transport, timeout=1) as client:
        client.cancel(SOME_ID)
    assert set(waits[2].values()) == {1}


def test_what_an_api_of_another_release_says_is_read_as_far_as_it_goes():
    read = answers.read(Waiting, {"id": "a", "value": "ö", "key_base64": "/w==", "colour": "red"})
    assert (read.id, read.key, read.value, read.headers) == ("a", b"\xff", "ö".encode(), ())
    assert read.cluster is None


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
        Client(NOBODY) as client,
        pytest.raises(KafkaError, match="does not answer"),
    ):
        client.reschedule(str(MessageId(due_ms=1, unique="a")), at=AT)


@pytest.mark.system
def test_what_waits_is_found_and_cancelled_and_rescheduled(
    settings, wheel, now_ms, tmp_path, monkeypatch
):
    monkeypatch.setattr("duetime.cancelling.ARRIVAL_MS", 200)
    headers = [("a", "1"), ("b", None), ("a", b"\xff")]
    parts = {"key": b"\xff", "value": "v", "headers": headers}
    waiting = wheel.message("orders", now_ms + 60_000, unique="w", **parts)
    another = wheel.message("orders", now_ms + 60_000, unique="a:=+@")
    running = Running(alike(settings, tmp_path))
    with Client(url(running.settings)) as client:
        found = client.find(str(waiting))
        assert (found.id, found.key, found.value) == (str(waiting), b"\xff", b"v")
        assert (found.headers, found.due) == (
            (("a", b"1"), ("b", None), ("a", b"\xff")),
            instant(waiting.due_ms),
        )
        assert client.deliver_now(str(another)).endswith("-a:=+@~1")
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
    monkeypatch.setattr("duetime.api.listed.MOST_READ", 2)
    due = [now_ms + 60_000 + each for each in range(5)]
    sent = [str(wheel.message("orders", at, key="k")) for at in due]
    wheel.message("others", due[0])
    retried_ms = now_ms + 600_000
    again = str(failed(wheel, "others", retried_ms))
    since, until = (instant(each) for each in (due[1], due[4]))
    running = Running(alike(settings, tmp_path))

    async def listed():
        async with AsyncClient(url(running.settings)) as client:
            found = [each.id async for each in client.messages(topic="orders", key="k")]
            return found, await client.pending(), await client.status()

    with Client(url(running.settings)) as client:
        assert [each.id for each in client.messages(topic="orders")] == sent
        some = client.messages(topic="orders", from_=since, to=until)
        assert [each.id for each in some] == sent[1:4]
        assert [(each.id, each.attempts) for each in client.messages(failed=True)] == [(again, 3)]
        assert client.find(again, retry_ms=retried_ms).failed_ms < retried_ms
        assert client.pending(to=instant(0)).pending == 0
        assert sum(each.count for each in client.pending().slots) == 7
        assert client.status().leader is None
    found, pending, status = asyncio.run(listed())
    assert (found, pending.pending, status.waiting) == (sent, 7, 7)
    running.stop()


@pytest.mark.system
def test_what_was_rescued_is_told_with_when_it_was_due(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    running = Running(alike(settings, tmp_path))
    with (
        leading(settings, rescued=9, rescues=[(30, 2, 10, 20), (60, 7, 40, 50)]),
        Client(url(running.settings)) as client,
    ):
        told = client.status()
    assert told.rescued == 9
    assert told.rescues == tuple(
        Rescue(at_ms=at_ms, messages=messages, from_ms=from_ms, to_ms=to_ms)
        for at_ms, messages, from_ms, to_ms in [(30, 2, 10, 20), (60, 7, 40, 50)]
    )
    running.stop()


@pytest.mark.system
def test_dead_letters_are_listed_shown_and_redriven(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    die = dead_letters_of(settings)
    for topic in ("one", "two", "two"):
        die(topic)
    running = Running(alike(settings, tmp_path))

    async def redriven():
        async with AsyncClient(url(running.settings)) as client:
            numbers = [each.number for each in await client.dead_letters(topic="two")]
            return numbers, await client.dead_letter(2), await client.redrive(numbers=numbers)

    assert asyncio.run(redriven())[0] == [1, 2]
    with Client(url(running.settings)) as client:
        assert [each.topic for each in client.dead_letters()] == ["one"]
        letter = client.dead_letter(0)
        assert (letter.value, letter.detail) == (b"\xff", "so it is")
        with pytest.raises(InvalidMessage):
            client.redrive()
        assert client.redrive(all=True, reason="unknown-topic") == 1
        with pytest.raises(UnknownMessage):
            client.dead_letter(0)
    running.stop()


@pytest.mark.system
def test_series_and_rejected_records_are_listed_and_shown(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    names = TopicNames(settings)
    write(settings, names.series, b"daily", Page(batch=0, now=DAILY, before=None).encoded())
    said = [("due-error", "bad-topic"), ("due-error-detail", "so"), ("due-error-source", "in/0/7")]
    write(settings, names.rejected, b"k", b"\xff", [("own", b"1"), *said])
    running = Running(alike(settings, tmp_path))

    async def shown():
        async with AsyncClient(url(running.settings)) as client:
            (listed,) = await client.rejected_records()
            return listed, await client.series()

    listed, (series,) = asyncio.run(shown())
    assert (listed.number, listed.reason, listed.source) == (0, "bad-topic", "in/0/7")
    with Client(url(running.settings)) as client:
        assert client.find_series("daily") == series
        record = client.rejected_record(listed.number)
        with pytest.raises(UnknownMessage):
            client.pause_series("weekly")
        with pytest.raises(UnknownMessage):
            client.stop_series("weekly")
    assert (record.key, record.value, record.headers) == (b"k", b"\xff", (("own", b"1"),))
    assert (series.name, series.zone, series.paused) == ("daily", "UTC", False)
    assert series.until == format_instant(END_MS)
    assert series.next_ms % 86_400_000 == 0
    running.stop()


def write(settings, topic, key, value, headers=()):
    """A record as the pipeline writes it."""
    producer = Producer(librdkafka_properties(settings))
    producer.produce(topic, value, key, headers=list(headers))
    assert producer.flush(30) == 0
