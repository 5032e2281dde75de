"""What a program with types does with the clients: read by mypy, run by nobody.

Each `type: ignore` is a mistake that must be noticed: mypy tells those that are of no use.
"""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import assert_type

from confluent_kafka import Message

from duetime import queue
from duetime.client import AsyncClient, Client, Producer, exponential, retry_later
from duetime.client import producer as client
from duetime.client.http_models import (
    MessageSummary,
    PendingCounts,
    Scheduled,
    ScheduledMessage,
    ScheduleSummary,
)
from duetime.core.cron import Recurrence
from duetime.core.errors import KafkaError, UnknownMessage
from duetime.queue import Queue

SOON = timedelta(seconds=10)

URL = "http://127.0.0.1:8080"

TOKEN = os.environ.get("TOKEN")


def notice(error: KafkaError | None, which: str) -> None:
    print(which, error.reason if error else "arrived")


def produce() -> None:
    with Producer(bootstrap="127.0.0.1:9092") as producer:
        assert_type(producer.produce("orders", b"v", key=b"k", in_=SOON), str)
        headers = {"a": "1", "b": None}
        producer.produce("orders", "v", headers=headers, at=datetime.now(UTC), on_delivery=notice)
        producer.produce("reports", recurrence=Recurrence.of("@daily", zone="Europe/Berlin"))
        producer.produce("orders.delayed", "v", deliver_after=datetime.now(UTC) + SOON)
        producer.cancel("019ac9b6e2d4-order-17")
        assert_type(producer.poll(0.1), int)
        assert_type(producer.flush(30), int)
        producer.produce("orders", in_="10s")  # type: ignore[arg-type]
        producer.produce("orders", {"order": 17}, in_=SOON)  # type: ignore[arg-type]


def ask() -> None:
    with Client(URL, token=TOKEN, timeout=10) as api:
        message = api.schedule("orders", {"order": 17}, key="17", in_=SOON)
        assert_type(message, Scheduled)
        several = api.schedule_many([("orders", b"v", {"in_": SOON}), ("orders", None, {})])
        assert_type(several, list[Scheduled])
        api.cancel(message.id)
        assert_type(api.reschedule(message.id, in_=SOON), str)
        for each in api.messages(topic="orders", from_=datetime.now(UTC)):
            assert_type(each, MessageSummary)
        assert_type(api.pending(), PendingCounts)
        assert_type(api.pause_schedule("daily"), ScheduleSummary)
        assert_type(api.redrive(all=True), int)
        api.schedule("orders", "v", at="tomorrow")  # type: ignore[arg-type]
        api.schedule("orders", "v", colour="red")  # type: ignore[call-arg]
        api.messages(topics=["orders"])  # type: ignore[call-arg]


async def ask_and_wait() -> ScheduledMessage | None:
    async with AsyncClient(URL) as api:
        message = await api.schedule("orders", "v", at=datetime.now(UTC))
        async for each in api.messages(failed=True):
            assert_type(each, MessageSummary)
        try:
            return await api.find(message.id)
        except UnknownMessage as error:
            print(error.reason)
            return None


@retry_later(max_attempts=8, min_backoff="1s", max_backoff="1h")
def handle(message: Message) -> None:
    print(message.value())


@retry_later(backoff=lambda attempts: 1_000 * attempts, max_attempts=8)
def handle_once_a_second(message: Message) -> bool:
    return message.value() is not None


assert_type(handle, Callable[[Message], object])


@retry_later(backoff=exponential("1s", max="1h"), max_attempts=8)
def handle_with_a_backoff(message: Message) -> None: ...


@retry_later(backoff="1s", max_attempts=8)  # type: ignore[arg-type]
def never(message: Message) -> None: ...


def work() -> None:
    for message in Queue("jobs", group="workers", timeout=timedelta(seconds=30)):
        with message:
            assert_type(message.value, bytes | None)


def misspell() -> None:
    client.Clent(URL)  # type: ignore[attr-defined]
    queue.Queu("jobs", group="workers", timeout=SOON)  # type: ignore[attr-defined]
