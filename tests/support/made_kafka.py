"""Stand-ins for Kafka's clients, for tests of the dispatcher."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.clocks import eventually

from duetime.core.errors import KafkaError, RecordRefused


class MadeKafka:
    """A producer, and what makes one: the dispatcher is given itself."""

    def __init__(self):
        self.arrived = set()
        #: Which cluster it says to be; None is that it does not answer.
        self.cluster = "made"

    def __call__(self, *_, **__):
        return self

    def offer(self, record, report):
        """There is always room."""
        self.send(record, report)
        return True

    def poll(self):
        """Nothing comes in by itself."""

    def flush(self, _):
        return 0

    async def id(self):
        """As a cluster."""
        if self.cluster is None:
            raise KafkaError("it does not answer")
        return self.cluster

    def install(self, monkeypatch, *, name_of=str, acknowledge_s, ask_again_s):
        """In place of Kafka; what has arrived is read back by the names that it is kept by."""
        dispatcher = "duetime.api.dispatcher"
        monkeypatch.setattr("duetime.api.producer.Producer", self)
        monkeypatch.setattr("duetime.api.spool.AsyncSpool._cluster_id", lambda _: self.id())
        monkeypatch.setattr(
            f"{dispatcher}.find_arrived",
            lambda _, taken: {each for each in taken if name_of(each) in self.arrived},
        )
        monkeypatch.setattr(f"{dispatcher}.ACKNOWLEDGE_TIMEOUT_S", acknowledge_s)
        monkeypatch.setattr(f"{dispatcher}.DRAIN_RETRY_S", ask_again_s)


class ListedKafka(MadeKafka):
    """A producer whose records arrive when it is open, but for those that are too large."""

    def __init__(self):
        super().__init__()
        self.arrived = []
        #: The same as they are.
        self.records = []
        self.refused = ()
        self.is_open = threading.Event()
        self._waiting = []

    def send(self, record, report):
        self._waiting.append((record, report))

    def poll(self):
        if not self.is_open.is_set():
            return
        # As librdkafka does: what is sent together is refused together.
        waiting, self._waiting = self._waiting, []
        bad = any(record.id.unique in self.refused for record, _ in waiting)
        for record, report in waiting:
            if not bad:
                self.arrived.append(record.id.unique)
                self.records.append(record)
            report(RecordRefused("too large") if bad else None, str(record.id))

    def installed(self, monkeypatch):
        """Put it in place of Kafka's clients, and return it."""
        self.install(monkeypatch, name_of=unique_of, acknowledge_s=0.1, ask_again_s=0.05)
        return self


def unique_of(name):
    return name.partition("-")[2]


@pytest.fixture
def listed(monkeypatch):
    """A Kafka made of a list, in place of the real one."""
    return ListedKafka().installed(monkeypatch)


@pytest.fixture
def reported(monkeypatch):
    """A Kafka whose reports the test makes."""
    found = Reported()
    found.install(monkeypatch, acknowledge_s=0.01, ask_again_s=0)
    return found


def post(client, *names, **parts):
    batch = [{"topic": "orders", "in": "1h", "id": each, "value": "v"} | parts for each in names]
    return client.post("/v1/messages", json=batch)


class Reported(MadeKafka):
    """A producer that tells what became of a record when the test does."""

    def __init__(self):
        super().__init__()
        self.handed = []
        #: The latest of each name.
        self.records = {}
        self._waiting = {}

    def send(self, record, report):
        self.handed.append(record.id.unique)
        self.records[record.id.unique] = record
        self._waiting.setdefault(str(record.id), []).append(report)

    def report(self, record, error=None):
        name = str(record.id)
        if error is None:
            self.arrived.add(name)
        self._waiting[name].pop(0)(error, name)


async def until(holds):
    await asyncio.to_thread(eventually, holds, within_s=10)


def in_an_hour():
    """Return the same instant for each try."""
    return {"in": None, "at": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}


def accept(sending):
    sending.submission.accepted |= {each.id: True for each in sending.fresh}
