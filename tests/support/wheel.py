"""A writer into the wheel."""

from contextlib import closing, contextmanager
from itertools import count

import pytest
from confluent_kafka import Producer

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.core.records import MessageSpec, message_record
from duetime.core.timer_wheel import Slot
from duetime.kafka.producer import producer_properties
from duetime.kafka.range_reader import RangeReader
from duetime.stores.wheel_reader import WheelReader


@pytest.fixture
def wheel(settings, topics, now_ms):  # noqa: ARG001 (the topics must be there)
    """Writes what waits, as the intake would."""
    return WheelWriter(settings, now_ms)


@pytest.fixture
def wheel_reader(settings):
    with closing(WheelReader(settings)) as reader:
        yield reader


@pytest.fixture
def reads(monkeypatch):
    """The number of records of each read of a topic."""
    counts, records = [], RangeReader.records

    def counted(self, ranges):
        counts.append(sum(each.count for each in ranges))
        return records(self, ranges)

    monkeypatch.setattr(RangeReader, "records", counted)
    return counts


class WheelWriter:
    """Writes records into the slots where they belong at `now_ms`, or on a level of choice."""

    def __init__(self, settings, now_ms):
        self._settings = settings
        self._now_ms = now_ms
        self._numbers = count()
        self._producer = Producer(producer_properties(settings))
        self._waits = True

    def message(  # noqa: PLR0913 (all that a message may have)
        self,
        topic,
        due_ms,
        *,
        unique=None,
        level=None,
        partition=None,
        state=None,
        passed_on=(),
        **parts,
    ):
        """Write a message; returns its id. What is `passed_on` no client would send."""
        identity = MessageId(due_ms=due_ms, unique=unique or f"m{next(self._numbers)}")
        wanted = MessageSpec(topic=topic, partition=partition, **parts)
        record = message_record(
            wanted, self._settings, due_ms=due_ms, now_ms=due_ms, unique=identity.unique
        )
        address = topic, None if partition is None else str(partition)
        own = [pair for pair in record.headers if pair[0] not in H.SCHEDULED]
        headers = _waiting(address, identity, state) + own + list(passed_on)
        self._write(identity, level, headers, (record.key, record.value))
        return identity

    def cancel(self, identity, *, level=None):
        """Write a cancel."""
        headers = _waiting((None, None), identity)
        self._write(identity, level, headers, (str(identity), None))

    def foreign(self, due_ms, headers, *, level=None):
        """Write a record that is none of duetime's."""
        topic, partition = self.partition(due_ms, level)
        self._producer.produce(topic, b"foreign", partition=partition, headers=headers)
        self._producer.flush()

    def partition(self, due_ms, level=None, message_id=""):
        """Return the (topic, partition) in which a message waits."""
        shape = self._settings.wheel
        if level is None:
            level = shape.place(due_ms, self._now_ms).level
        slot = Slot(level, shape.number(level, due_ms))
        return f"{self._settings.namespace}.wheel.{level}", shape.partition(slot, message_id)

    @contextmanager
    def at_once(self):
        """What is written in this block is waited for at its end."""
        self._waits = False
        yield
        self._waits = True
        self._producer.flush()

    def _write(self, identity, level, headers, key_and_value):
        topic, partition = self.partition(identity.due_ms, level, str(identity))
        key, value = key_and_value
        self._producer.produce(topic, value, key, partition=partition, headers=headers)
        if self._waits:
            self._producer.flush()


def _waiting(address, identity, state=None):
    values = (*address, state, str(identity.due_ms), str(identity))
    return list(zip(H.SCHEDULED, values, strict=True))
