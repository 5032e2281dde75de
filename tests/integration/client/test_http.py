"""The client over HTTP, against a real server; most of it needs no Kafka."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from confluent_kafka import Producer
from tests.support.api import NOWHERE, RunningServer, alike, failed
from tests.support.leading import leading
from tests.support.topics import dead_letters_of

from duetime.client import AsyncClient, Client
from duetime.client.cancellation import ARRIVAL_MS, CONFIRM_MS
from duetime.client.http_models import OverdueRelease, ScheduledMessage
from duetime.client.schedules import CONFIRM_TIMEOUT_S
from duetime.core.clock import format_instant
from duetime.core.errors import InvalidMessage, KafkaError, TooLate, UnknownMessage
from duetime.core.messages import MessageId
from duetime.core.schedules import Schedule, ScheduleEntry
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties

#: Nothing listens there.
NOBODY = "http://127.0.0.1:1"

AT = datetime(2020, 1, 1, tzinfo=UTC)

END_MS = 4_102_444_800_000

SOME_ID = "0000000003e8-a"

DAILY = Schedule(name="daily", since="1-daily", topic="orders", cron="@daily", until=str(END_MS))


def instant(ms):
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    """A server without a Kafka: it accepts into its spool."""
    running = RunningServer(alike(NOWHERE, tmp_path_factory.mktemp("api")))
    yield running.settings.api_url
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


def test_a_schedule_is_scheduled_under_its_name_and_needs_no_start(base_url):
    with Client(base_url) as client:
        taken = client.schedule("reports", cron="0 9 * * 1-5", zone="Europe/Berlin", id="daily")
        assert client.schedule("reports", cron="@daily", until=instant(2**42), at=AT).id
        with pytest.raises(InvalidMessage):
            client.schedule("reports", cron="@daily", misfire="perhaps")
    assert taken.id == "daily"


def test_both_clients_have_the_same_calls():
    calls = {name for name in vars(Client) if not name.startswith("_")}
    assert calls == {name for name in vars(AsyncClient) if not name.startswith("_")}


def test_the_time_limit_is_longer_than_that_of_the_api():
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
    longest_s = max(NOWHERE.api_request_timeout_seconds, CONFIRM_TIMEOUT_S, cancel_s)
    assert waits[0]["read"] > longest_s
    assert waits[0]["connect"] < waits[0]["read"]
    with Client(NOBODY, transport=transport, timeout=1) as client:
        client.cancel(SOME_ID)
    assert set(waits[2].values()) == {1}


def test_unknown_fields_are_ignored_and_nullable_ones_may_be_missing():
    required = {"topic": "t", "due": "", "due_at_ms": 1, "cancelled": False}
    payload = {"value": "ö", "key_base64": "/w=="}
    read = ScheduledMessage.model_validate({"id": "a", "colour": "red"} | required | payload)
    assert (read.id, read.key, read.value, read.headers) == ("a", b"\xff", "ö".encode(), ())
    assert read.cluster is None


def test_a_problem_is_raised_as_its_error(base_url):
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


@pytest.mark.slow
def test_a_request_is_made_again_until_the_server_is_there(tmp_path):
    settings, transport = alike(NOWHERE, tmp_path), Noticing()
    with Client(settings.api_url, transport=transport) as client, ThreadPoolExecutor() as threads:
        taken = threads.submit(client.schedule, "orders", at=AT, id="order-19")
        assert transport.failed.wait(10)
        running = RunningServer(settings)
        assert taken.result().id.endswith("-order-19")
        running.stop()


def test_an_unreachable_server_is_a_kafka_error():
    with (
        Client(NOBODY) as client,
        pytest.raises(KafkaError, match="does not answer"),
    ):
        client.reschedule(str(MessageId(due_ms=1, unique="a")), at=AT)


@pytest.mark.slow
def test_what_waits_is_found_and_cancelled_and_rescheduled(
    settings, wheel, now_ms, tmp_path, monkeypatch
):
    monkeypatch.setattr("duetime.client.cancellation.ARRIVAL_MS", 200)
    headers = [("a", "1"), ("b", None), ("a", b"\xff")]
    parts = {"key": b"\xff", "value": "v", "headers": headers}
    waiting = wheel.message("orders", now_ms + 60_000, unique="w", **parts)
    another = wheel.message("orders", now_ms + 60_000, unique="a:=+@")
    running = RunningServer(alike(settings, tmp_path))
    with Client(running.settings.api_url) as client:
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


def test_pending_messages_are_listed_page_by_page_and_counted(
    settings, wheel, now_ms, tmp_path, monkeypatch
):
    monkeypatch.setattr("duetime.api.routes.messages.MAX_READ", 2)
    due = [now_ms + 60_000 + each for each in range(5)]
    sent = [str(wheel.message("orders", at, key="k")) for at in due]
    wheel.message("others", due[0])
    retried_ms = now_ms + 600_000
    again = str(failed(wheel, "others", retried_ms))
    since, until = (instant(each) for each in (due[1], due[4]))
    running = RunningServer(alike(settings, tmp_path))

    async def listed():
        async with AsyncClient(running.settings.api_url) as client:
            found = [each.id async for each in client.messages(topic="orders", key="k")]
            return found, await client.pending(), await client.status()

    with Client(running.settings.api_url) as client:
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


def test_overdue_releases_have_their_due_times(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    running = RunningServer(alike(settings, tmp_path))
    with (
        leading(settings, overdue_released=9, overdue_releases=[(30, 2, 10, 20), (60, 7, 40, 50)]),
        Client(running.settings.api_url) as client,
    ):
        told = client.status()
    assert told.overdue_released == 9
    assert told.overdue_releases == [
        OverdueRelease(at_ms=at_ms, messages=messages, from_ms=from_ms, to_ms=to_ms)
        for at_ms, messages, from_ms, to_ms in [(30, 2, 10, 20), (60, 7, 40, 50)]
    ]
    running.stop()


def test_dead_letters_are_listed_shown_and_redriven(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    die = dead_letters_of(settings)
    for topic in ("one", "two", "two"):
        die(topic)
    running = RunningServer(alike(settings, tmp_path))

    async def redriven():
        async with AsyncClient(running.settings.api_url) as client:
            offsets = [each.offset for each in await client.dead_letters(topic="two")]
            return offsets, await client.dead_letter(2), await client.redrive(offsets=offsets)

    assert asyncio.run(redriven())[0] == [1, 2]
    with Client(running.settings.api_url) as client:
        assert [each.topic for each in client.dead_letters()] == ["one"]
        letter = client.dead_letter(0)
        assert (letter.value, letter.detail) == (b"\xff", "so it is")
        with pytest.raises(InvalidMessage):
            client.redrive()
        assert client.redrive(all=True, reason="unknown-topic") == 1
        with pytest.raises(UnknownMessage):
            client.dead_letter(0)
    running.stop()


def test_schedules_and_rejected_records_are_listed_and_shown(settings, topics, tmp_path):  # noqa: ARG001 (the topics must be there)
    names = TopicNames(settings)
    write(
        settings,
        names.schedules,
        b"daily",
        ScheduleEntry(batch=0, now=DAILY, before=None).encoded(),
    )
    said = [("due-error", "bad-topic"), ("due-error-detail", "so"), ("due-error-source", "in/0/7")]
    write(settings, names.rejected, b"k", b"\xff", [("own", b"1"), *said])
    running = RunningServer(alike(settings, tmp_path))

    async def shown():
        async with AsyncClient(running.settings.api_url) as client:
            (listed,) = await client.rejected_records()
            return listed, await client.schedules()

    listed, (schedule,) = asyncio.run(shown())
    assert (listed.offset, listed.reason, listed.source) == (0, "bad-topic", "in/0/7")
    with Client(running.settings.api_url) as client:
        assert client.find_schedule("daily") == schedule
        record = client.rejected_record(listed.offset)
        with pytest.raises(UnknownMessage):
            client.pause_schedule("weekly")
        with pytest.raises(UnknownMessage):
            client.stop_schedule("weekly")
    assert (record.key, record.value, record.headers) == (b"k", b"\xff", (("own", b"1"),))
    assert (schedule.name, schedule.zone, schedule.paused) == ("daily", "UTC", False)
    assert schedule.until == format_instant(END_MS)
    assert schedule.next_ms % 86_400_000 == 0
    running.stop()


def write(settings, topic, key, value, headers=()):
    """A record as the pipeline writes it."""
    producer = Producer(librdkafka_properties(settings))
    producer.produce(topic, value, key, headers=list(headers))
    assert producer.flush(30) == 0
