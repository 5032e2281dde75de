"""Kafka's answers to requests for offsets, and its errors."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaException
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka.admin import AdminClient

from duetime.core.errors import KafkaError
from duetime.core.topics import TopicNames
from duetime.kafka import offsets
from duetime.kafka.offsets import Offsets, Unreadable

pytestmark = pytest.mark.usefixtures("topics")


class Answer:
    """The answer of a broker that is starting."""

    offset = OFFSET_INVALID

    def result(self):
        return self


def refusing(code):
    """Return a client whose requests for offsets all fail with this error."""
    answer = Future()
    answer.set_exception(KafkaException(BrokerError(code)))
    return SimpleNamespace(list_offsets=lambda wanted, **_options: dict.fromkeys(wanted, answer))


def test_an_invalid_offset_is_requested_again(settings, monkeypatch):
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)
    real, calls = asked._admin.list_offsets, []

    def list_offsets(wanted, **options):
        calls.append(wanted)
        return dict.fromkeys(wanted, Answer()) if len(calls) < 3 else real(wanted, **options)

    admin = SimpleNamespace(list_offsets=list_offsets)
    monkeypatch.setattr(asked, "_admin", admin)
    monkeypatch.setattr(offsets, "RETRY_INTERVAL_S", 0.01)
    assert asked.ends([place]) == {place: 0}
    assert len(calls) == 3
    asked.close()


def test_an_unavailable_topic_is_not_called_missing(settings, monkeypatch):
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)

    monkeypatch.setattr(asked, "_admin", refusing(BrokerError._NOENT))
    with pytest.raises(KafkaError, match="brokers are down, or topics are missing"):
        asked.ends([place])
    asked.close()


def test_the_new_partition_leader_is_asked(settings, monkeypatch):
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)

    monkeypatch.setattr(asked, "_admin", refusing(BrokerError.FENCED_LEADER_EPOCH))
    assert asked.ends([place]) == {place: 0}
    asked.close()


def test_a_request_is_answered_though_another_thread_gets_a_new_client(settings, monkeypatch):
    """librdkafka answers no request of a client that has ended: a planner waited for ever."""
    asked, place = Offsets(settings, "any"), (TopicNames(settings).rejected, 0)

    class Client(AdminClient):
        def list_offsets(self, *given, **options):
            answers = super().list_offsets(*given, **options)
            asked._admin = None
            return answers

    monkeypatch.setattr(asked, "_admin", Client(asked._properties))
    thread = threading.Thread(target=asked.ends, args=([place],), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    asked.close()


def test_a_topic_without_a_leader_is_unreadable(settings, monkeypatch):
    partitions = [SimpleNamespace(id=0, leader="a node"), SimpleNamespace(id=1, leader=None)]
    topic = SimpleNamespace(partitions=partitions, authorized_operations=None)
    answer = Future()
    answer.set_result(topic)
    asked = Offsets(settings, "any")
    admin = SimpleNamespace(describe_topics=lambda *_, **_options: {"orders": answer})
    monkeypatch.setattr(asked, "_admin", admin)
    monkeypatch.setattr(offsets, "TIMEOUT_S", 0.1)
    assert asked.readable_partitions("orders") == [("orders", 0), ("orders", 1)]
    with pytest.raises(Unreadable, match="no leader"):
        asked.readable_partitions("orders", all_led=True)
    asked.close()
