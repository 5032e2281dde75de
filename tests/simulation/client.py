"""The client's cancels in a simulated world: the real ones, on simulated logs."""

from contextlib import nullcontext
from types import SimpleNamespace

from tests.simulation.kafka import Offsets, Record
from tests.simulation.spark import INTAKE

from duetime.client import cancellation
from duetime.core import threads
from duetime.core.errors import KafkaError
from duetime.stores import wheel_reader
from duetime.stores.wheel_reader import WheelReader


class Reader:
    """In place of RangeReader, for the client's look-ups."""

    def __init__(self, kafka):
        self._kafka = kafka

    def entries_of(self, identity, ranges):
        for each in ranges:
            for record in self._kafka.read(each.place, each.start, each.end):
                if record.id == int(identity.unique):
                    yield entry(each, record)


def entry(at, record):
    """Return a record as `Entry` is."""
    return SimpleNamespace(
        topic=None if record.is_cancel else "orders",
        due_ms=record.due_ms,
        offset=record.offset,
        record=SimpleNamespace(topic=lambda: at.topic, partition=lambda: at.partition),
        to_message=lambda cancelled=False: SimpleNamespace(cancelled=cancelled),
    )


class Sender:
    """In place of the client's Producer."""

    def __init__(self, kafka):
        self._kafka = kafka

    def send(self, record):
        kafka, (place,) = self._kafka, INTAKE
        offset = kafka.ask(lambda: kafka.append(place, record))
        if not threads.wait_until(lambda: kafka.logs[place].high_watermark > offset, 10.0):
            raise KafkaError("not acknowledged")


def patch_client(monkeypatch, world, kafka):
    """Have the client's cancels run in this world."""
    monkeypatch.setattr(cancellation, "time", world.time)
    monkeypatch.setattr(cancellation, "Offsets", lambda _: Offsets(kafka, None))
    monkeypatch.setattr(cancellation, "open_reader", WheelReader)
    monkeypatch.setattr(cancellation, "Producer", lambda *_, **__: nullcontext(Sender(kafka)))
    monkeypatch.setattr(
        cancellation,
        "cancel_record",
        lambda identity, *_: Record(int(identity.unique), identity.due_ms, 0, is_cancel=True),
    )
    monkeypatch.setattr(wheel_reader, "Offsets", lambda _, group: Offsets(kafka, group))
    monkeypatch.setattr(wheel_reader, "RangeReader", lambda *_: nullcontext(Reader(kafka)))
