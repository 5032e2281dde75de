"""What is under way while the spool reads back what has arrived. A Kafka whose reports are ours."""

import asyncio
from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer
from tests.api.conftest import NOWHERE
from tests.api.made_kafka import MadeKafka
from tests.api.test_spool import MIB, record
from tests.conftest import eventually

from duetime.api.dispatcher import Dispatcher
from duetime.api.spool.file import Spool
from duetime.api.spool.readback import arrived
from duetime.api.submission import Submission
from duetime.client import Producer as Client
from duetime.clock import SystemClock
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError


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


@pytest.fixture
def kafka(monkeypatch):
    reported = Reported()
    reported.install(monkeypatch, acknowledge_s=0.01, ask_again_s=0)
    return reported


def test_what_is_spooled_meanwhile_and_arrives_is_not_sent_again(kafka, tmp_path, caplog):
    failing, arriving, late = (record(each) for each in range(3))

    async def run():
        clock = SystemClock()
        async with Dispatcher(NOWHERE, Spool(tmp_path / "spool.db", MIB), clock) as dispatcher:
            sent = await asyncio.gather(dispatcher.send([failing]), dispatcher.send([arriving]))
            assert sent == [False, False]
            kafka.report(failing, KafkaError("the local queue is gone"))
            await until(lambda: "the spool waits" in caplog.text)
            # Handed over before the others were spooled, and spooled after them.
            under_way = dispatcher._producer.hand_over([late])
            await dispatcher._spooled_by(Submission(), [late], clock.now_ms(), under_way)
            kafka.report(arriving)
            await until(lambda: len(dispatcher._arriving) < 2)
            # It is still waited for, before anything is read back and sent again.
            assert under_way.arrived in dispatcher._arriving
            assert "m2" not in kafka.handed[3:]
            kafka.report(late)
            await until(lambda: kafka.handed.count("m0") == 2)
            kafka.report(failing)
            await until(lambda: not dispatcher._spooling)

    asyncio.run(run())
    assert kafka.handed == ["m0", "m1", "m2", "m0"]


async def until(holds):
    await asyncio.to_thread(eventually, holds, within_s=10)


@pytest.mark.system
def test_what_has_arrived_behind_an_open_transaction_is_found(settings, topics, now_ms):  # noqa: ARG001
    intake = f"{settings.namespace}.in"
    other = Producer(librdkafka_properties(settings) | {"transactional.id": settings.namespace})
    other.init_transactions()
    other.begin_transaction()
    for partition in range(settings.intake_partitions):
        other.produce(intake, b"not committed yet", partition=partition)
    assert other.flush(30) == 0
    with Client(settings) as client:
        sent = client.produce("orders", "v", at=datetime.now(UTC), id="m0")

    assert arrived(settings, {sent: now_ms, "000000000001-m1": now_ms}) == {sent}
    other.abort_transaction()
