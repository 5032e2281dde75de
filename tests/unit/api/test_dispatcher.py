"""What becomes of accepted messages when disk or Kafka misbehave. A Kafka made of a list."""

import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import REGISTRY
from tests.support.api import NOWHERE, problem_of
from tests.support.clocks import eventually
from tests.support.made_kafka import ListedKafka, in_an_hour, post

from duetime.api.spool import Spool
from duetime.core.errors import KafkaError
from duetime.core.metrics import API_REFUSED
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames


@pytest.fixture
def kafka(listed):
    return listed


def test_a_disk_that_fails_once_does_not_end_the_draining(serving, kafka, monkeypatch, caplog):
    failing, took = threading.Event(), Spool.take

    def take(self, *arguments):
        if failing.is_set():
            raise sqlite3.OperationalError("disk I/O error")
        return took(self, *arguments)

    monkeypatch.setattr(Spool, "take", take)
    failing.set()
    client = serving(NOWHERE)
    assert post(client, "a").status_code == 202
    assert post(client, "b").status_code == 202
    assert client.get("/readyz").status_code == 200
    kafka.is_open.set()

    eventually(lambda: client.get("/readyz").status_code == 503)
    assert problem_of(client.get("/readyz")) == (503, "spool-failed")
    assert "disk I/O error" in caplog.text
    failing.clear()

    eventually(lambda: client.get("/readyz").status_code == 200)
    eventually(lambda: kafka.arrived == ["a", "b"])


def test_an_unexpected_error_does_not_end_the_draining(serving, kafka, monkeypatch):
    errors, took = [ValueError("secret")], Spool.take

    def take(self, *arguments):
        if errors:
            raise errors.pop()
        return took(self, *arguments)

    monkeypatch.setattr(Spool, "take", take)
    client = serving(NOWHERE)
    post(client, "a")
    post(client, "b")
    kafka.is_open.set()

    eventually(lambda: kafka.arrived == ["a", "b"])


def test_a_disk_that_takes_nothing_says_when_to_try_again(serving, kafka, monkeypatch):  # noqa: ARG001
    client = serving(NOWHERE.model_copy(update={"api_max_spool_bytes": 1024 * 1024}))
    monkeypatch.setattr(Spool, "_insert", failing_put)
    answer = post(client, "a")
    assert problem_of(answer) == (503, "spool-failed")
    assert int(answer.headers["retry-after"]) > 0


def test_a_retry_waits_for_records_that_no_disk_took(serving, kafka, monkeypatch):
    client = serving(NOWHERE)
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "_insert", failing_put)
        assert post(client, "a").status_code == 503
        # Nothing more is handed over: it is known that Kafka does not answer.
        assert post(client, "b").status_code == 503
    with ThreadPoolExecutor() as pool:
        again = pool.submit(post, client, "a")
        assert post(client, "b", "c").status_code == 202
        assert not again.done()
        kafka.is_open.set()
        assert again.result().status_code == 201

    eventually(lambda: len(kafka.arrived) == 3)
    assert kafka.arrived == ["a", "b", "c"]


def counted():
    """How many messages the API says that it took, by what had them."""
    return [
        REGISTRY.get_sample_value("duetime_api_messages_total", {"to": each}) or 0
        for each in ("kafka", "spool")
    ]


def test_accepted_messages_are_counted_by_what_has_them(serving, kafka):
    client, (to_kafka, to_spool) = serving(NOWHERE), counted()
    kafka.is_open.set()
    assert post(client, "early").status_code == 201
    kafka.is_open.clear()
    assert post(client, "late").status_code == 202
    kafka.is_open.set()
    eventually(lambda: kafka.arrived == ["early", "late"])
    assert post(client, "new").status_code == 201
    assert counted() == [to_kafka + 2, to_spool + 1]


def failing_put(*_):
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    raise error


def test_a_refused_record_is_set_aside_and_the_rest_is_sent_once(serving, kafka, caplog):
    client, before = serving(NOWHERE), refused()
    kafka.refused = ("bad",)
    post(client, "first")
    post(client, "a", "bad", "b", value="secret")
    kafka.is_open.set()

    with caplog.at_level(logging.INFO):
        eventually(lambda: "the spool is empty" in caplog.text)

    assert sorted(kafka.arrived) == ["a", "b", "first"]
    assert refused() - before == 1
    assert "-bad" in caplog.text
    assert "secret" not in caplog.text
    assert post(client, "c").status_code == 201


def refused():
    return API_REFUSED._value.get()


def test_a_direct_refusal_of_kafka_is_the_senders_mistake(serving, kafka):
    kafka.is_open.set()
    kafka.refused = ("bad",)
    client = serving(NOWHERE)

    assert problem_of(post(client, "a", "bad")) == (422, "refused")

    assert kafka.arrived == ["a"]
    assert post(client, "b").status_code == 201


def test_all_records_of_a_partly_failed_batch_are_reported(serving, kafka, monkeypatch):
    sent = ListedKafka.send

    def send(self, record, report):
        if record.id.unique == "b" and not self.arrived:
            raise KafkaError("the local queue is gone")
        sent(self, record, report)

    monkeypatch.setattr(ListedKafka, "send", send)
    kafka.is_open.set()
    client = serving(NOWHERE)

    assert problem_of(post(client, "a", "b")) == (503, "kafka")
    assert kafka.arrived == ["a"]


def test_two_tries_at_once_of_one_message_are_sent_once(serving, kafka):
    client, due = serving(NOWHERE), in_an_hour()
    with ThreadPoolExecutor(8) as pool:
        tries = [pool.submit(post, client, "once", **due) for _ in range(8)]
        answers = [each.result() for each in tries]
    kafka.is_open.set()
    post(client, "last")

    eventually(lambda: "last" in kafka.arrived)
    assert kafka.arrived == ["once", "last"]
    assert len({each.text for each in answers}) == 1


def test_a_message_in_the_spool_is_shown_and_can_be_cancelled(serving, kafka):
    client = serving(NOWHERE)
    post(client, "first")
    parts = {"key": "k", "headers": {"a": "1", "due-expires-ms": "9999999999999"}, "partition": 3}
    told = post(client, "gone", **parts).json()["messages"][0]
    post(client, "stays")

    shown = client.get(f"/v1/messages/{told['id']}").json()
    assert (shown["id"], shown["topic"], shown["due"]) == (told["id"], "orders", told["due"])
    assert (shown["key"], shown["value"], shown["partition"]) == ("k", "v", 3)
    assert shown["expires_ms"] == 9_999_999_999_999
    assert [each["name"] for each in shown["headers"]] == ["a"]
    assert client.delete(f"/v1/messages/{told['id']}").status_code == 204
    kafka.is_open.set()

    eventually(lambda: len(kafka.arrived) == 3)
    assert kafka.arrived[:2] == ["first", "stays"]
    # An earlier try, of which this process knows nothing, may have left it in Kafka.
    assert cancels(kafka) == [told["id"]]


def cancels(kafka):
    return [
        each.key.decode()
        for each in kafka.records
        if each.topic == TopicNames(NOWHERE).control and each.headers == (("due-op", b"cancel"),)
    ]


def test_no_cancel_is_sent_that_would_come_too_late(serving, kafka):
    client = serving(NOWHERE)
    post(client, "first")
    told = post(client, "gone", **{"in": "1s"}).json()["messages"][0]
    assert client.delete(f"/v1/messages/{told['id']}").status_code == 204
    post(client, "last")
    kafka.is_open.set()

    eventually(lambda: kafka.arrived == ["first", "last"])


def test_a_record_set_aside_is_sent_when_it_is_posted_again(serving, kafka, caplog):
    client = serving(NOWHERE)
    kafka.refused = ("bad",)
    post(client, "first")
    post(client, "bad")
    kafka.is_open.set()
    eventually(lambda: "set aside" in caplog.text)
    kafka.refused = ()

    eventually(lambda: post(client, "new").status_code == 201)
    assert post(client, "bad").status_code == 201
    assert kafka.arrived == ["first", "new", "bad"]


def test_a_refused_record_sent_alone_is_not_waited_for(serving, kafka, monkeypatch):
    took = ListedKafka.poll

    def poll(self):
        if self.is_open.is_set() and self._waiting:
            took(self)
            self.is_open.clear()

    monkeypatch.setattr(ListedKafka, "poll", poll)
    kafka.refused = ("bad",)
    kafka.is_open.set()
    client = serving(NOWHERE)
    assert post(client, "a", "bad", "b").status_code == 202
    assert kafka.arrived == []

    monkeypatch.setattr(ListedKafka, "poll", took)
    kafka.is_open.set()
    eventually(lambda: sorted(kafka.arrived) == ["a", "b"])
    eventually(lambda: post(client, "c").status_code == 201)


def test_a_token_neither_sees_nor_cancels_others_messages_in_the_spool(serving, kafka, monkeypatch):
    monkeypatch.setattr("duetime.api.routes.messages.cancel_and_confirm", no_kafka)
    monkeypatch.setattr("duetime.api.routes.messages._find", no_kafka)
    tokens = {
        "shop": {"token": "0123456789abcdef", "topics": ["goods"]},
        "all": {"token": "fedcba9876543210"},
    }
    client = serving(Settings(**NOWHERE.model_dump() | {"api_tokens": tokens}))
    client.headers["Authorization"] = "Bearer fedcba9876543210"
    post(client, "first")
    told = post(client, "others").json()["messages"][0]
    client.headers["Authorization"] = "Bearer 0123456789abcdef"

    for call in (client.get, client.delete):
        assert problem_of(call(f"/v1/messages/{told['id']}")) == (503, "kafka")
    kafka.is_open.set()

    eventually(lambda: kafka.arrived == ["first", "others"])


def no_kafka(*_):
    raise KafkaError("it does not answer")
