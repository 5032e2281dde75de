"""The member of a group, with a client that rebalances in the middle of a read."""

import confluent_kafka
import pytest

from duetime.delayed import member
from duetime.delayed.member import Member

PLACE = ("topic", 0)


class Record:
    def topic(self):
        return PLACE[0]

    def partition(self):
        return PLACE[1]

    def error(self):
        return None


class Client:
    """Gives records one by one; a rebalance comes while the second read is on its way."""

    def __init__(self, _properties):
        self.records = [Record(), Record()]

    def subscribe(self, _topics, on_assign, on_revoke, on_lost):
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}

    def poll(self, _timeout):
        return self.records.pop(0) if self.records else None

    def consume(self, _count, _timeout):
        # What a callback raises out of here, takes with it what was read.
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
    monkeypatch.setattr(member, "Consumer", Client)
    found = Member({})

    def refuse(_):
        raise confluent_kafka.KafkaException("not committed")

    found.subscribe([], assign=refuse, revoke=refuse, lost=refuse, committed=refuse)
    return found


def test_what_a_callback_raises_takes_no_record_with_it(reader):
    read = []
    with pytest.raises(confluent_kafka.KafkaException, match="not committed"):
        reader.read(0, lambda place, records: read.append((place, len(records))))
    assert read == [(PLACE, 2)]
    # It is told once.
    assert not reader.read(0, lambda place, records: read.append((place, len(records))))


def test_what_a_callback_raises_at_the_end_is_told(reader):
    with pytest.raises(confluent_kafka.KafkaException, match="not committed"):
        reader.close()
