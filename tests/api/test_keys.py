"""What is remembered of senders' ids: while a try is under way, and after it has failed."""

import asyncio
import json
import threading
from datetime import UTC, datetime, timedelta

import pytest
from tests.api.conftest import NOWHERE, problem_of
from tests.api.test_dispatcher import kafka as listed
from tests.api.test_dispatcher import post
from tests.api.test_read_back import kafka as reported
from tests.api.test_read_back import until
from tests.api.test_spool import MIB
from tests.api.test_tokens import ALL, SHOP, limited
from tests.conftest import eventually

from duetime.api.dispatcher import Dispatcher
from duetime.api.keys import Keys
from duetime.api.problems import IdTaken, TooMany
from duetime.api.requests import NewMessage
from duetime.api.spool.errors import SpoolFull
from duetime.api.spool.file import Spool
from duetime.clock import SystemClock
from duetime.errors import KafkaError, RecordRefused, TooLate

__all__ = ["listed", "reported"]

#: Deeper than pydantic writes, and not as deep as Python reads.
DEEP = 300


def sent(client, *batch):
    """What is answered to JSON as it stands."""
    messages = [{"topic": "t", "in": "5m"} | each for each in batch]
    headers = {"content-type": "application/json"}
    return client.post("/v1/messages", content=json.dumps(messages), headers=headers)


def test_json_that_nests_deep_is_taken_and_holds_up_no_other_id(alone):
    deep = json.loads("[" * DEEP + "]" * DEEP)
    batch = [{"id": "good"}, {"id": "deep", "value": deep}]
    first = sent(alone, *batch)
    assert first.status_code == 202
    assert sent(alone, *batch).json() == first.json()
    assert sent(alone, batch[0]).json()["messages"] == first.json()["messages"][:1]


@pytest.mark.parametrize("value", ["\ud800", {"a": "\ud800"}])
def test_what_is_no_text_has_its_reason_also_under_an_id_that_is_known(alone, value):
    assert sent(alone, {"id": "text"}).status_code == 202
    assert problem_of(sent(alone, {"id": "text", "value": value})) == (422, "unreadable")


def test_a_series_is_sent_each_time_and_another_takes_its_place(serving, listed):
    listed.is_open.set()
    client = serving(NOWHERE)
    crons = ["@daily", "@daily", "@hourly"]
    answers = [post(client, "report", cron=each) for each in crons]
    assert {each.status_code for each in answers} == {201}
    assert listed.arrived == ["report"] * 3


def test_each_definition_of_a_series_is_spooled_in_order(serving, listed):
    client = serving(NOWHERE)
    post(client, "first")
    # At the same minute they come first.
    for cron in ("0 0 1 1 *", "0 0 1 1 *", "@yearly"):
        parts = {"cron": cron, "headers": {"cron": cron}, "in": None}
        assert post(client, "report", **parts).status_code == 202
    seen = []
    take = listed.send
    listed.send = lambda record, report: (seen.append(record), take(record, report))
    listed.is_open.set()

    eventually(lambda: len(listed.arrived) == 4)
    assert [dict(each.headers)["cron"] for each in seen] == [b"0 0 1 1 *"] * 2 + [b"@yearly"]


def test_a_message_that_was_cancelled_is_not_taken_again(serving, listed):  # noqa: ARG001
    client = serving(NOWHERE)
    post(client, "first")
    told = post(client, "gone").json()["messages"][0]
    assert client.delete(f"/v1/messages/{told['id']}").status_code == 204
    assert problem_of(post(client, "gone")) == (409, "id-taken")
    assert problem_of(post(client, "new", "gone")) == (409, "id-taken")
    assert post(client, "new").status_code == 202


def test_callers_call_their_messages_as_they_like_but_for_those_of_one_instant(serving, listed):
    listed.is_open.set()
    client = serving(limited(NOWHERE))
    due = {"in": None, "at": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}

    def status(token, name, **parts):
        client.headers["Authorization"] = f"Bearer {token}"
        return post(client, name, **parts).status_code

    assert status(SHOP, "x", topic="orders-eu") == 201
    assert status(ALL, "x", topic="invoices", **{"in": "2h"}) == 201
    # Each has its own answer again, and none for another message.
    assert status(SHOP, "x", topic="orders-eu") == 201
    assert status(SHOP, "x", topic="orders-us") == 409
    assert listed.arrived == ["x", "x"]

    assert status(SHOP, "y", topic="orders-eu", **due) == 201
    # The wheel would keep one of the two.
    assert status(ALL, "y", topic="invoices", **due) == 409
    assert status(ALL, "y", topic="orders-eu", **due) == 201


class Tries:
    """Tries of messages that are called so, each a ms later than the last."""

    def __init__(self):
        self.keys = Keys()
        self._now_ms = 0

    def sending(self, *names, topic="t", **parts):
        due = {"in": "5m"} | parts
        messages = [NewMessage(topic=topic, id=each, **due) for each in names]
        return self.keys.sending(messages, lambda: self._records(messages))

    def _records(self, messages):
        self._now_ms += 1
        return [each.record(NOWHERE, self._now_ms, self.keys.due_ms(each)) for each in messages]


async def one(sending, over, sent):
    async with sending as begun:
        sent.append([each.id.unique for each in begun.fresh])
        await over.wait()
        begun.took(begun.fresh, in_kafka=True)
    return [each.id.due_ms for each in begun.records]


async def three(**parts):
    """Of x, then of both, then of y with these parts, while the first is under way."""
    tries, over, sent = Tries(), asyncio.Event(), []
    begun = []
    for sending in (tries.sending("x"), tries.sending("x", "y"), tries.sending("y", **parts)):
        begun.append(asyncio.create_task(one(sending, over, sent)))
        await asyncio.sleep(0)
    over.set()
    return await asyncio.gather(*begun, return_exceptions=True), sent


def test_what_others_have_sent_meanwhile_is_no_message_of_ones_own():
    (_, waited, _), sent = asyncio.run(three(topic="other"))
    assert isinstance(waited, IdTaken)
    assert sent == [["x"], ["y"]]


def test_what_was_sent_meanwhile_has_the_time_of_its_first_try():
    due_ms, sent = asyncio.run(three())
    assert due_ms == [[300_001], [300_001, 300_002], [300_002]]
    assert sent == [["x"], ["y"], []]


def test_what_never_left_takes_no_id():
    async def run():
        tries = Tries()
        with pytest.raises(TooMany):
            async with tries.sending("x"):
                raise TooMany("not now", 1)
        async with tries.sending("x", topic="other") as sending:
            assert len(sending.fresh) == 1
            sending.took(sending.fresh, in_kafka=True)
        # One that was sent is remembered, also if another try of it comes to nothing.
        with pytest.raises(TooMany):
            async with tries.sending("x", topic="other"):
                raise TooMany("not now", 1)
        with pytest.raises(IdTaken):
            async with tries.sending("x"):
                pass

    asyncio.run(run())


def test_of_several_that_a_full_spool_does_not_take_each_waits_for_its_own(reported, tmp_path):
    async def run():
        spool, tries, busy = Spool(tmp_path / "spool.db", MIB), Tries(), threading.Event()
        async with Dispatcher(NOWHERE, spool, SystemClock()) as dispatcher:

            async def send(name):
                async with tries.sending(name, value="x" * 600_000) as sending:
                    await sending.by(dispatcher)
                return sending.fresh

            # Both come during one write to the disk, and so are in the next.
            writing = asyncio.create_task(dispatcher._thread.ask(busy.wait))
            sending = [asyncio.create_task(send(each)) for each in "ab"]
            await until(lambda: len(dispatcher._thread._puts) == 2)
            busy.set()
            failed = await asyncio.gather(*sending, return_exceptions=True)
            assert [type(each) for each in failed] == [SpoolFull] * 2
            again = [asyncio.create_task(send(each)) for each in "ab"]
            await writing
            reported.report(reported.records["b"], RecordRefused("too large"))
            assert [each.id.unique for each in await again[1]] == ["b"]
            assert not again[0].done()
            reported.report(reported.records["a"])
            assert await again[0] == []
            await until(lambda: reported.handed == ["a", "b", "b"])
            reported.report(reported.records["b"])
            await until(lambda: not dispatcher._spooling)

    asyncio.run(run())


def test_a_try_that_is_given_up_is_waited_for_by_the_next_one(reported, tmp_path, monkeypatch):
    monkeypatch.setattr("duetime.api.dispatcher.ACKNOWLEDGE_S", 60)

    async def run():
        tries = Tries()
        async with Dispatcher(
            NOWHERE, Spool(tmp_path / "spool.db", MIB), SystemClock()
        ) as dispatcher:
            given_up = asyncio.create_task(sent_by(dispatcher, tries, "a"))
            await asyncio.sleep(0)
            given_up.cancel()
            again = asyncio.create_task(sent_by(dispatcher, tries, "a"))
            await asyncio.gather(given_up, return_exceptions=True)
            assert not again.done()
            reported.report(reported.records["a"])
            assert await again == []
        assert reported.handed == ["a"]

    asyncio.run(run())


def test_what_is_refused_in_a_batch_does_not_have_the_others_sent_again(serving, listed):
    listed.is_open.set()
    listed.refused = ("bad",)
    client = serving(NOWHERE)
    assert problem_of(post(client, "good", "bad")) == (422, "refused")
    assert post(client, "good").status_code == 201
    listed.refused = ()
    assert post(client, "good", "bad").status_code == 201
    assert listed.arrived == ["good", "bad"]


def test_what_fails_in_a_batch_does_not_have_the_others_sent_again(reported, tmp_path, monkeypatch):
    monkeypatch.setattr("duetime.api.dispatcher.ACKNOWLEDGE_S", 60)

    async def run():
        tries = Tries()
        async with Dispatcher(
            NOWHERE, Spool(tmp_path / "spool.db", MIB), SystemClock()
        ) as dispatcher:
            first = asyncio.create_task(sent_by(dispatcher, tries, "a", "b"))
            await until(lambda: reported.handed == ["a", "b"])
            reported.report(reported.records["a"])
            reported.report(reported.records["b"], KafkaError("the local queue is gone"))
            with pytest.raises(KafkaError):
                await first
            again = asyncio.create_task(sent_by(dispatcher, tries, "a", "b"))
            await until(lambda: reported.handed == ["a", "b", "b"])
            reported.report(reported.records["b"])
            assert await again == ["b"]

    asyncio.run(run())


def test_what_is_given_up_on_its_way_to_the_spool_is_there_for_the_next_try(reported, tmp_path):
    async def run():
        spool, tries, busy = Spool(tmp_path / "spool.db", MIB), Tries(), threading.Event()
        async with Dispatcher(NOWHERE, spool, SystemClock()) as dispatcher:
            writing = asyncio.create_task(dispatcher._thread.ask(busy.wait))
            given_up = asyncio.create_task(sent_by(dispatcher, tries, "a"))
            await until(lambda: len(dispatcher._thread._puts) == 1)
            given_up.cancel()
            again = asyncio.create_task(sent_by(dispatcher, tries, "a"))
            await asyncio.gather(given_up, return_exceptions=True)
            assert not again.done()
            busy.set()
            assert await again == []
            await writing
            reported.report(reported.records["a"])
            await until(lambda: not dispatcher._spooling)
        assert reported.handed == ["a"]

    asyncio.run(run())


async def sent_by(dispatcher, tries, *names):
    """Those of them that nobody had taken."""
    async with tries.sending(*names) as sending:
        await sending.by(dispatcher)
    return [each.id.unique for each in sending.fresh]


#: Long enough for what is spooled, and given up soon.
HASTY = NOWHERE.model_copy(update={"api_request_seconds": 0.5})


def test_a_cancel_that_was_given_up_while_it_left_the_spool_is_known(serving, listed, monkeypatch):  # noqa: ARG001
    over, took = threading.Event(), Spool.withdraw
    client = serving(HASTY)
    post(client, "first")
    told = post(client, "gone").json()["messages"][0]
    monkeypatch.setattr(Spool, "withdraw", lambda *asked: over.wait() and took(*asked))
    assert problem_of(client.delete(f"/v1/messages/{told['id']}")) == (503, "timeout")
    over.set()
    eventually(lambda: post(client, "gone").status_code == 409)


def test_a_cancel_that_was_given_up_while_kafka_took_it_is_told_the_next_time(serving, monkeypatch):
    over, client = threading.Event(), serving(HASTY)
    monkeypatch.setattr("duetime.api.messages.cancel_surely", lambda *_: over.wait())
    path = "/v1/messages/00e8d4a51000-gone"
    assert problem_of(client.delete(path)) == (503, "timeout")
    over.set()
    # Nothing in Kafka says so any more.
    monkeypatch.setattr("duetime.api.messages.cancel_surely", too_late)
    eventually(lambda: client.delete(path).status_code == 204)


@pytest.mark.parametrize(("method", "work"), [("DELETE", "cancel_surely"), ("GET", "find_waiting")])
def test_tries_of_one_request_share_the_look_that_takes_too_long(
    serving, monkeypatch, method, work
):
    over, calls, client = threading.Event(), [], serving(HASTY)

    def slow(*_):
        calls.append(over.wait())
        raise TooLate("it is delivered or about to be")

    monkeypatch.setattr(f"duetime.api.messages.{work}", slow)
    path = "/v1/messages/00e8d4a51000-slow"
    for _ in range(3):
        assert problem_of(client.request(method, path)) == (503, "timeout")
    over.set()
    eventually(lambda: problem_of(client.request(method, path)) == (409, "too-late"))
    assert len(calls) <= 2


def too_late(*_):
    raise TooLate("it is delivered or about to be")
