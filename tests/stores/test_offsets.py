"""Kafka's answers about offsets, and those that are none."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaException
from confluent_kafka import KafkaError as BrokerError

from duetime.errors import KafkaError
from duetime.stores import offsets
from duetime.stores.offsets import Offsets, Unreadable
from duetime.topics import TopicNames

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("topics")]


class Answer:
    """What a broker that is just starting says of a partition."""

    offset = OFFSET_INVALID

    def result(self):
        return self


def refusing(code):
    """A client to which each question about offsets is answered with this error."""
    answer = Future()
    answer.set_exception(KafkaException(BrokerError(code)))
    return SimpleNamespace(list_offsets=lambda wanted, **_options: dict.fromkeys(wanted, answer))


def test_an_offset_that_is_none_is_asked_for_again(settings, monkeypatch):
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)
    real, calls = asked._admin.list_offsets, []

    def list_offsets(wanted, **options):
        calls.append(wanted)
        return dict.fromkeys(wanted, Answer()) if len(calls) < 3 else real(wanted, **options)

    admin = SimpleNamespace(list_offsets=list_offsets)
    monkeypatch.setattr(asked, "_admin", admin)
    monkeypatch.setattr(offsets, "ASK_AGAIN_S", 0.01)
    assert asked.ends([place]) == {place: 0}
    assert len(calls) == 3
    asked.close()


def test_topics_are_not_called_missing_where_only_their_brokers_may_be(settings, monkeypatch):
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)

    monkeypatch.setattr(asked, "_admin", refusing(BrokerError._NOENT))
    with pytest.raises(KafkaError, match="brokers are down, or topics are missing"):
        asked.ends([place])
    asked.close()


def test_who_leads_now_is_asked_when_the_one_that_was_known_does_no_more(settings, monkeypatch):
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)

    monkeypatch.setattr(asked, "_admin", refusing(BrokerError.FENCED_LEADER_EPOCH))
    assert asked.ends([place]) == {place: 0}
    asked.close()


def test_a_destination_without_a_leader_is_unreadable_and_holds_up_no_other(settings, monkeypatch):
    partitions = [SimpleNamespace(id=0, leader="a node"), SimpleNamespace(id=1, leader=None)]
    topic = SimpleNamespace(partitions=partitions, authorized_operations=None)
    answer = Future()
    answer.set_result(topic)
    asked = Offsets(settings, "any")
    admin = SimpleNamespace(describe_topics=lambda *_, **_options: {"orders": answer})
    monkeypatch.setattr(asked, "_admin", admin)
    monkeypatch.setattr(offsets, "TIMEOUT_S", 0.1)
    assert asked.readable_places("orders") == [("orders", 0), ("orders", 1)]
    with pytest.raises(Unreadable, match="no leader"):
        asked.readable_places("orders", all_led=True)
    asked.close()
