"""Repeated requests: those that come while the first is in flight have its answer."""

import asyncio
import json
import threading

import pytest
from tests.support.api import NOWHERE, problem_of
from tests.support.clocks import eventually
from tests.support.made_kafka import accept, in_an_hour, post, until
from tests.support.spooling import dispatching
from tests.support.tokens import ALL, SHOP, limited

from duetime.api.errors import IdTaken, RateLimited, SpoolFull
from duetime.api.idempotency import IdempotencyKeys
from duetime.api.requests import NewMessage
from duetime.api.spool import Spool
from duetime.core.errors import KafkaError, RecordRefused, TooLate

#: Deeper than pydantic writes, and not as deep as Python reads.
DEEP = 300


def sent(client, *batch):
    """What is answered to JSON as it stands."""
    messages = [{"topic": "t", "in": "5m"} | each for each in batch]
    headers = {"content-type": "application/json"}
    return client.post("/v1/messages", content=json.dumps(messages), headers=headers)


def test_json_that_nests_deep_is_taken_and_holds_up_no_other_id(alone):
    deep = json.loads("[" * DEEP + "]" * DEEP)
    due = in_an_hour()
    batch = [due | {"id": "good"}, due | {"id": "deep", "value": deep}]
    first = sent(alone, *batch)
    assert first.status_code == 202
    assert sent(alone, *batch).json() == first.json()
    assert sent(alone, batch[0]).json()["messages"] == first.json()["messages"][:1]


@pytest.mark.parametrize("value", ["\ud800", {"a": "\ud800"}])
def test_invalid_text_has_its_reason_also_under_a_known_id(alone, value):
    assert sent(alone, {"id": "text"}).status_code == 202
    assert problem_of(sent(alone, {"id": "text", "value": value})) == (422, "malformed")


def test_a_schedule_is_sent_each_time_and_another_takes_its_place(serving, listed):
    listed.is_open.set()
    client = serving(NOWHERE)
    crons = ["@daily", "@daily", "@hourly"]
    answers = [post(client, "report", cron=each) for each in crons]
    assert {each.status_code for each in answers} == {201}
    assert listed.arrived == ["report"] * 3


def test_each_definition_of_a_schedule_is_spooled_in_order(serving, listed):
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


def test_callers_have_ids_of_their_own(serving, listed):
    listed.is_open.set()
    client = serving(limited(NOWHERE))
    for token, topic in ((SHOP, "orders-eu"), (ALL, "invoices")):
        client.headers["Authorization"] = f"Bearer {token}"
        assert post(client, "x", topic=topic).status_code == 201
    assert listed.arrived == ["x", "x"]


class Tries:
    """Tries of messages that are called so, each a ms later than the last."""

    def __init__(self):
        self.keys = IdempotencyKeys()
        self._now_ms = 0

    def sending(self, *names, topic="t", **parts):
        due = {"in": "5m"} | parts
        messages = [NewMessage(topic=topic, id=each, **due) for each in names]
        return self.keys.begin(messages, lambda due_ms: self._records(messages, due_ms))

    def _records(self, messages, due_ms):
        self._now_ms += 1
        return [each.record(NOWHERE, self._now_ms, due_ms.get(each.id)) for each in messages]


async def one(sending, over, sent):
    async with sending as begun:
        sent.append([each.id.unique for each in begun.fresh])
        await over.wait()
        accept(begun)
    return [each.id.due_ms for each in begun.records]


async def three(**parts):
    """Of x, then of both, then of y with these parts, while the first is under way."""
    tries, over, last_over, sent = Tries(), asyncio.Event(), asyncio.Event(), []
    begun = []
    for sending, end in (
        (tries.sending("x"), over),
        (tries.sending("x", "y"), over),
        (tries.sending("y", **parts), last_over),
    ):
        begun.append(asyncio.create_task(one(sending, end, sent)))
        await asyncio.sleep(0)
    over.set()
    await begun[0]
    # The second waits for the third then.
    for _ in range(3):
        await asyncio.sleep(0)
    last_over.set()
    return await asyncio.gather(*begun, return_exceptions=True), sent


def test_an_id_that_another_request_took_meanwhile_is_refused():
    (_, waited, _), sent = asyncio.run(three(topic="other"))
    assert isinstance(waited, IdTaken)
    assert sent == [["x"], ["y"]]


def test_a_repeat_has_the_due_time_of_the_first_try():
    due_ms, sent = asyncio.run(three())
    assert due_ms == [[300_001], [300_001, 300_002], [300_002]]
    assert sent == [["x"], ["y"], []]


def test_a_message_that_never_left_takes_no_id():
    async def run():
        tries = Tries()
        with pytest.raises(RateLimited):
            async with tries.sending("x"):
                raise RateLimited("not now", 1)
        async with tries.sending("x", topic="other") as sending:
            assert len(sending.fresh) == 1

    asyncio.run(run())


def test_each_message_that_a_full_spool_refuses_waits_for_its_own(reported, tmp_path):
    async def run():
        tries = Tries()
        async with dispatching(tmp_path) as dispatcher:

            async def send(name):
                async with tries.sending(name, value="x" * 600_000) as sending:
                    await sending.send(dispatcher)
                return sending.fresh

            # Both come during one write to the disk, and so are in the next.
            async with dispatcher._spool._is_writing:
                sending = [asyncio.create_task(send(each)) for each in "ab"]
                await until(lambda: len(dispatcher._spool._waiting) == 2)
            failed = await asyncio.gather(*sending, return_exceptions=True)
            assert [type(each) for each in failed] == [SpoolFull] * 2
            again = [asyncio.create_task(send(each)) for each in "ab"]
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
    monkeypatch.setattr("duetime.api.dispatcher.ACKNOWLEDGE_TIMEOUT_S", 60)

    async def run():
        tries = Tries()
        async with dispatching(tmp_path) as dispatcher:
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


def test_a_failed_message_does_not_repeat_its_batch(reported, tmp_path, monkeypatch):
    monkeypatch.setattr("duetime.api.dispatcher.ACKNOWLEDGE_TIMEOUT_S", 60)

    async def run():
        tries = Tries()
        async with dispatching(tmp_path) as dispatcher:
            first = asyncio.create_task(sent_by(dispatcher, tries, "a", "b"))
            await until(lambda: reported.handed == ["a", "b"])
            again = asyncio.create_task(sent_by(dispatcher, tries, "a", "b"))
            reported.report(reported.records["a"])
            reported.report(reported.records["b"], KafkaError("the local queue is gone"))
            with pytest.raises(KafkaError):
                await first
            await until(lambda: reported.handed == ["a", "b", "b"])
            reported.report(reported.records["b"])
            assert await again == ["b"]

    asyncio.run(run())


def test_a_timed_out_put_into_the_spool_answers_the_next_try(reported, tmp_path):
    async def run():
        tries, busy = Tries(), threading.Event()
        async with dispatching(tmp_path) as dispatcher:
            writing = asyncio.create_task(dispatcher._spool.run(busy.wait))
            given_up = asyncio.create_task(sent_by(dispatcher, tries, "a"))
            await until(lambda: dispatcher._putting == 1)
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
        await sending.send(dispatcher)
    return [each.id.unique for each in sending.fresh]


#: Long enough for what is spooled, and given up soon.
HASTY = NOWHERE.model_copy(update={"api_request_timeout_seconds": 0.5})


def test_a_cancel_that_was_given_up_leaves_the_spool(serving, listed, monkeypatch):
    over, took = threading.Event(), Spool.withdraw
    client = serving(HASTY)
    post(client, "first")
    told = post(client, "gone").json()["messages"][0]
    monkeypatch.setattr(Spool, "withdraw", lambda *asked: over.wait() and took(*asked))
    assert problem_of(client.delete(f"/v1/messages/{told['id']}")) == (503, "timeout")
    over.set()
    listed.is_open.set()
    # The second is the cancel.
    eventually(lambda: len(listed.arrived) == 2)
    assert "gone" not in listed.arrived


@pytest.mark.parametrize(
    ("method", "work"), [("DELETE", "cancel_and_confirm"), ("GET", "find_pending")]
)
def test_tries_of_one_request_share_the_look_that_takes_too_long(
    serving, monkeypatch, method, work
):
    over, calls, client = threading.Event(), [], serving(HASTY)

    def slow(*_):
        calls.append(over.wait())
        raise TooLate("it is delivered or about to be")

    monkeypatch.setattr(f"duetime.api.routes.messages.{work}", slow)
    path = "/v1/messages/00e8d4a51000-slow"
    for _ in range(3):
        assert problem_of(client.request(method, path)) == (503, "timeout")
    over.set()
    eventually(lambda: problem_of(client.request(method, path)) == (409, "too-late"))
    assert len(calls) <= 2


def too_late(*_):
    raise TooLate("it is delivered or about to be")
