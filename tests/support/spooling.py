"""Spools, a load on the API, and all that Kafka has taken in."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import count

import httpx
import pytest
from tests.support.api import NOWHERE, alike
from tests.support.clocks import eventually

from duetime.api.dispatcher import Dispatcher
from duetime.api.spool import Spool
from duetime.core.clock import SystemClock
from duetime.core.records import MessageSpec, message_record
from duetime.kafka.admin import create_topics
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.kafka.range_reader import RangeReader
from duetime.local.broker import LocalBroker

MIB = 1024 * 1024


def record(number, **parts):
    wanted = MessageSpec(topic="orders", value=f"{number}", **parts)
    unique = f"m{number}"
    return message_record(wanted, NOWHERE, due_ms=1_000, now_ms=2_000, unique=unique)


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool.db", MIB)
    yield made
    made.close()


def message(number):
    return {"topic": "orders", "at": "2020-01-01T00:00:00Z", "id": f"m{number}", "value": "v"}


def spooled(client):
    """What the metric says."""
    lines = client.get("/metrics").text.splitlines()
    (line,) = (each for each in lines if each.startswith("duetime_api_spooled_messages "))
    return float(line.split()[1])


def of(settings, number, value):
    wanted = MessageSpec(topic="orders", value=value)
    return message_record(wanted, settings, due_ms=1_000, now_ms=2_000, unique=f"m{number}")


class Load:
    """Sends messages one after another, each with an id of its own, while the block lasts."""

    def __init__(self, settings):
        self._url = f"{settings.api_url}/v1/messages"
        self._numbers = count(1)
        self.accepted = []

    def __enter__(self):
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def await_more(self, count):
        wanted = len(self.accepted) + count
        eventually(lambda: len(self.accepted) >= wanted)

    def message(self):
        return message(next(self._numbers))

    def note(self, sent, status):
        if status in (201, 202):
            self.accepted.append(sent["id"])

    def _send(self):
        with httpx.Client(timeout=10) as client:
            while not self._ended.is_set():
                sent = self.message()
                try:
                    answer = client.post(self._url, json=sent)
                except httpx.TransportError:
                    self._ended.wait(0.01)
                    continue
                self.note(sent, answer.status_code)


@contextmanager
def own_broker(directory, base=NOWHERE):
    """A broker that a test stops and starts, and the settings of an API on it."""
    with LocalBroker(directory / "kafka") as broker:
        at_broker = base.model_copy(update={"bootstrap": broker.bootstrap})
        settings = alike(at_broker, directory)
        create_topics(settings)
        yield broker, settings


def dispatching(directory, clock=None):
    """A dispatcher without Kafka, with a spool of its own."""
    return Dispatcher(NOWHERE, Spool(directory / "spool.db", MIB), clock or SystemClock())


@contextmanager
def api_process(settings):
    """`duetime api` as its user runs it."""
    names = ("bootstrap", "api_port", "api_spool", "wheel_levels")
    own = {f"DUETIME_{name.upper()}": str(getattr(settings, name)) for name in names}
    process = subprocess.Popen([sys.executable, "-m", "duetime", "api"], env=os.environ | own)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def await_drained(settings):
    with httpx.Client(base_url=settings.api_url) as client:
        eventually(lambda: not spooled(client))


def everything_taken_in(settings):
    """The ids of all records of the intake topic."""
    places = [(f"{settings.namespace}.in", each) for each in range(settings.intake_partitions)]
    offsets = Offsets(settings, settings.namespace)
    ends = offsets.ends(places)
    offsets.close()
    with RangeReader(settings) as reader:
        ranges = [OffsetRange(*place, 0, end) for place, end in ends.items()]
        return [dict(each.headers())["due-id"].decode() for each in reader.records(ranges)]


def put(spool, records, taken_ms=None):
    """Returns the numbers of those that are new."""
    numbers = spool.put([(each, taken_ms) for each in records])
    return [each for each in numbers if each is not None]
