"""The member of a group, with a client that rebalances in the middle of a read."""

import confluent_kafka
import pytest

from duetime.kafka import consumer_group
from duetime.kafka.consumer_group import GroupMember

PLACE = ("topic", 0)


class Record:
    def topic(self):
        return PLACE[0]

    def partition(self):
        return PLACE[1]

    def error(self):
        return None


class Client:
    """Returns records one by one, with a rebalance during the second read."""

    def __init__(self, _properties):
        self.records = [Record(), Record()]

    def subscribe(self, _topics, on_assign, on_revoke, on_lost):
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}

    def poll(self, _timeout):
        return self.records.pop(0) if self.records else None

    def consume(self, _count, _timeout):
        # An exception of a callback would lose the records that were read.
        self._callbacks["revoke"](self, [])
        found, self.records = self.records, []
        return found

    def unsubscribe(self):
        self._callbacks["revoke"](self, [])

    def assignment(self):
        return []

    def close(self): ...


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(consumer_group, "Consumer", Client)
    found = GroupMember({})

    def refuse(_):
        raise confluent_kafka.KafkaException("not committed")

    found.subscribe([], assign=refuse, revoke=refuse, lost=refuse, committed=refuse)
    return found


def test_an_exception_in_a_callback_loses_no_record(reader):
    read = []
    with pytest.raises(confluent_kafka.KafkaException, match="not committed"):
        reader.read(0, lambda place, records: read.append((place, len(records))))
    assert read == [(PLACE, 2)]
    # It is raised once.
    assert not reader.read(0, lambda place, records: read.append((place, len(records))))


def test_an_exception_in_a_callback_at_the_end_is_raised(reader):
    with pytest.raises(confluent_kafka.KafkaException, match="not committed"):
        reader.close()
