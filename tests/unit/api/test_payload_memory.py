"""How much of what is listed is in memory: these tests need no Kafka."""

import pytest
from tests.support.api import NOWHERE

from duetime.client.dead_letters import DeadLetter, DeadLetters, Rejected


class Payload(bytes):
    """Counts those that are there."""

    there = most = 0

    def __new__(cls):
        Payload.there += 1
        Payload.most = max(Payload.most, Payload.there)
        return super().__new__(cls, b"large")

    def __del__(self):
        Payload.there -= 1


def letters(*_):
    words = {"topic": "t", "partition": None, "cluster": None, "id": "1-a", "reason": "expired"}
    times = {"due_ms": 1, "detail": "d", "attempts": 1, "first_ms": 1, "last_ms": 1}
    for number in range(100):
        yield DeadLetter(**words, **times, offset=number, key=None, value=Payload(), headers=())


def records(*_):
    words = {"at_ms": 1, "reason": "no-topic", "detail": "d", "source": "t/0/0"}
    for number in range(100):
        yield Rejected(**words, offset=number, key=None, value=Payload(), headers=())


@pytest.mark.parametrize(("path", "name"), [("dead-letters", "letters"), ("rejected", "records")])
def test_a_list_without_payloads_has_none_in_memory(serving, monkeypatch, path, name):
    monkeypatch.setattr(DeadLetters, "select", letters)
    monkeypatch.setattr("duetime.client.dead_letters.latest_rejected", records)
    monkeypatch.setattr(Payload, "most", 0)
    listed = serving(NOWHERE).get(f"/v1/{path}", params={"limit": 100}).json()[name]
    assert [each["offset"] for each in listed] == list(range(100))
    assert Payload.most <= 2
