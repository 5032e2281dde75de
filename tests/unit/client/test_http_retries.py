"""Which requests the HTTP clients repeat, when, and how often: no server, and no real delays."""

import asyncio
import inspect
import runpy
from datetime import UTC, datetime

import httpx
import pytest
from tests.support import ROOT

from duetime.client import AsyncClient, Client
from duetime.client.http import MAX_RETRY_AFTER_S, MAX_TRIES, RETRY_DELAY_S, RETRYABLE_STATUSES
from duetime.core.errors import (
    ConfigError,
    InvalidMessage,
    KafkaError,
    Refused,
    TooLate,
    UnknownMessage,
)

TOOL = ROOT / "tools" / "unasync.py"

#: Nothing listens there.
URL = "http://127.0.0.1:1"

AT = datetime(2020, 1, 1, tzinfo=UTC)

ID = "0000000003e8-a"

LOST = httpx.ReadError("the connection was closed")


def problem(status, reason, **headers):
    detail = {"reason": reason, "detail": "so it is"}
    return httpx.Response(status, json=detail, headers=headers)


def accepted(*ids):
    return httpx.Response(201, json={"messages": [{"id": each, "due": ""} for each in ids]})


class Played:
    """A call that gets these answers: its requests, its delays, and its result."""

    def __init__(self, call, *answers, token=None):
        self.requests, self.delays_s = [], []
        self._answers = iter(answers)
        transport = httpx.MockTransport(self._answer)
        with (
            pytest.MonkeyPatch.context() as patch,
            Client(URL, token=token, transport=transport) as client,
        ):
            patch.setattr("time.sleep", self.delays_s.append)
            self.result = call(client)

    def _answer(self, request):
        self.requests.append(request)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def schedule(client):
    return client.schedule("orders", "v", at=AT)


def status(client):
    return client.status()


def deliver_now(client):
    return client.deliver_now(ID)


def test_the_blocking_client_is_generated_from_the_asyncio_one():
    tool = runpy.run_path(str(TOOL))
    assert tool["TARGET"].read_text(encoding="utf-8") == tool["generate"](), (
        "run python tools/unasync.py"
    )


@pytest.mark.parametrize("status", sorted(RETRYABLE_STATUSES))
def test_a_retryable_status_is_tried_again_with_growing_delays(status):
    failing = [httpx.Response(status, text="Bad Gateway")] * (MAX_TRIES - 1)
    played = Played(schedule, *failing, accepted("a"))
    assert played.result.id == "a"
    assert played.delays_s == [RETRY_DELAY_S * 2**each for each in range(MAX_TRIES - 1)]


def test_the_asyncio_client_tries_again_too(monkeypatch):
    delays_s, answers = [], iter([problem(503, "timeout"), LOST, accepted("a")])

    async def sleep(delay_s):
        delays_s.append(delay_s)

    def answer(_):
        given = next(answers)
        if isinstance(given, Exception):
            raise given
        return given

    async def call():
        async with AsyncClient(URL, transport=httpx.MockTransport(answer)) as client:
            return await client.schedule("orders", "v", at=AT)

    monkeypatch.setattr("duetime.client.http.asyncio.sleep", sleep)
    assert asyncio.run(call()).id == "a"
    assert delays_s == [RETRY_DELAY_S, 2 * RETRY_DELAY_S]


@pytest.mark.parametrize(
    ("retry_after", "delay_s"),
    [("3", 3.0), ("0", 0.0), ("3600", MAX_RETRY_AFTER_S), ("9" * 400, MAX_RETRY_AFTER_S)]
    + [(each, RETRY_DELAY_S) for each in ("", "-1", "soon", "Wed, 21 Oct 2026 07:28:00 GMT")],
)
def test_retry_after_sets_the_delay_up_to_a_limit(retry_after, delay_s):
    busy = problem(429, "rate-limited", **{"Retry-After": retry_after})
    assert Played(schedule, busy, accepted("a")).delays_s == [delay_s]


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (LOST, KafkaError, "kafka"),
        (problem(503, "kafka"), KafkaError, "kafka"),
        (problem(503, "spool-full"), Refused, "spool-full"),
        (problem(429, "rate-limited"), Refused, "rate-limited"),
        (httpx.Response(502, text="<html>Bad Gateway</html>"), Refused, "error"),
    ],
)
def test_the_answer_to_the_last_try_is_raised(answer, error, reason):
    before = [problem(503, "timeout")] * (MAX_TRIES - 1)
    with pytest.raises(error) as raised:
        Played(schedule, *before, answer)
    assert raised.value.reason == reason


def test_a_message_whose_answer_was_lost_is_sent_again_unchanged():
    first, again = Played(schedule, LOST, accepted("a")).requests
    assert first.content == again.content
    (message,) = httpx.Response(200, content=first.content).json()
    assert message["id"]
    assert message["at"] == "2020-01-01T00:00:00.000Z"


@pytest.mark.parametrize("change", [lambda client: client.reschedule(ID, at=AT), deliver_now])
def test_a_change_that_cannot_be_repeated_is_tried_once(change):
    with pytest.raises(KafkaError, match="it is not known whether it did"):
        Played(change, LOST)


def test_a_lost_answer_to_a_read_leaves_no_doubt_about_a_change():
    with pytest.raises(KafkaError) as raised:
        Played(status, *[LOST] * MAX_TRIES)
    assert raised.value.detail.endswith("see that it runs there")


@pytest.mark.parametrize(
    "base_url", ["nonsense", "127.0.0.1:8080", "localhost:8080", "ftp://a", "http://", "http://a:b"]
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_invalid_address_is_refused_at_once(kind, base_url):
    with pytest.raises(ConfigError, match=r"write it as http://127\.0\.0\.1:8080"):
        kind(base_url)


NESTED = []
NESTED.append(NESTED)


@pytest.mark.parametrize("value", [{1}, AT, {"a": float("nan")}, NESTED, "\ud800", {(1,): 2}])
def test_a_value_that_json_cannot_hold_is_an_invalid_message(value):
    with Client(URL) as client, pytest.raises(InvalidMessage) as refused:
        client.schedule("orders", value, at=AT)
    assert refused.value.reason == "malformed"
    assert "give text or bytes" in refused.value.detail


def test_a_value_is_sent_as_compact_json_in_utf_8():
    value = {"a": "ö", "b": [1, None]}
    (request,) = Played(lambda client: client.schedule("t", value, at=AT), accepted("a")).requests
    assert '"value":{"a":"ö","b":[1,null]}'.encode() in request.content
    assert request.headers["content-type"] == "application/json"
    with pytest.raises(Refused):
        Played(status, httpx.Response(200))


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (problem(404, "unknown-message"), UnknownMessage, "unknown-message"),
        (problem(409, "too-late"), TooLate, "too-late"),
        (problem(422, "bad-topic"), InvalidMessage, "bad-topic"),
        (problem(401, "unauthorised"), Refused, "unauthorised"),
        (httpx.Response(302, headers={"Location": "/login"}), Refused, "error"),
        (httpx.Response(404, text="<html>no such page</html>"), Refused, "error"),
        (httpx.Response(400, json=["no", "problem"]), Refused, "error"),
    ],
)
def test_any_other_problem_is_raised_at_once(answer, error, reason):
    with pytest.raises(error) as raised:
        Played(lambda client: client.find(ID), answer)
    assert raised.value.reason == reason


@pytest.mark.parametrize("body", ["<html>please log in</html>", "", "[]", "null"])
@pytest.mark.parametrize("call", [schedule, status, deliver_now])
def test_an_answer_that_duetime_does_not_give_is_refused(call, body):
    with pytest.raises(Refused, match="is it duetime"):
        Played(call, httpx.Response(200, text=body))


@pytest.mark.parametrize(
    ("call", "status", "body"),
    [(schedule, 201, each) for each in ({}, {"messages": []}, {"messages": [{}]}, {"messages": 1})]
    + [
        (call, 200, {})
        for call in (
            lambda client: list(client.messages()),
            lambda client: client.schedules(),
            lambda client: client.dead_letters(limit=10),
            lambda client: client.redrive(all=True),
            deliver_now,
        )
    ]
    + [(lambda client: client.find(ID), 200, {"id": ID, "value_base64": "YQ"})],
)
def test_an_answer_without_its_fields_is_refused(call, status, body):
    with pytest.raises(Refused, match="is it duetime"):
        Played(call, httpx.Response(status, json=body))


@pytest.mark.parametrize(
    "call", [lambda client: client.cancel(ID), lambda client: client.stop_schedule(ID)]
)
def test_a_foreign_page_does_not_count_as_done(call):
    assert Played(call, httpx.Response(204)).result is None
    with pytest.raises(Refused, match="is it duetime"):
        Played(call, httpx.Response(200, text="<html>please log in</html>"))


#: These would lead to other paths, if they were not quoted.
ASTRAY = ("../schedules/daily", "a#b", "a?b", "a/b", " ", "a b", "ä", "a\n")

OF_MESSAGES = (
    lambda client, id_: client.cancel(id_),
    lambda client, id_: client.deliver_now(id_),
    lambda client, id_: client.find(id_),
    lambda client, id_: client.reschedule(id_, at=AT),
)
OF_SCHEDULES = (
    lambda client, name: client.find_schedule(name),
    lambda client, name: client.stop_schedule(name),
    lambda client, name: client.pause_schedule(name),
)


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, f"{prefix}{each}") for call in OF_MESSAGES for prefix in ("", ID) for each in ASTRAY]
    + [(call, each) for call in OF_SCHEDULES for each in (*ASTRAY, ".", "..")],
)
def test_an_invalid_id_or_name_is_refused_before_a_request(call, name):
    with pytest.raises(InvalidMessage) as refused:
        Played(lambda client: call(client, name))
    assert refused.value.reason == "bad-id"


def test_an_id_or_a_name_is_one_segment_of_its_path():
    name = "A.z_0:=~+@-"
    quoted = b"A.z_0%3A%3D~%2B%40-"
    gone = httpx.Response(204)
    (deleted,) = Played(lambda client: client.cancel(f"0000000003e8-{name}"), gone).requests
    (stopped,) = Played(lambda client: client.stop_schedule(name), gone).requests
    assert deleted.url.raw_path == b"/v1/messages/0000000003e8-" + quoted
    assert stopped.url.raw_path == b"/v1/schedules/" + quoted


def test_pages_are_read_until_there_is_no_cursor():
    summary = {"topic": "t", "due": "", "due_at_ms": 1, "cancelled": False}
    pages = [
        httpx.Response(200, json={"messages": [{"id": "a"} | summary], "cursor": "next"}),
        httpx.Response(200, json={"messages": [], "cursor": "last"}),
        httpx.Response(200, json={"messages": [{"id": "b"} | summary], "cursor": None}),
    ]
    played = Played(lambda client: list(client.messages(topic="t", from_=AT)), *pages)
    assert [each.id for each in played.result] == ["a", "b"]
    queries = [dict(each.url.params) for each in played.requests]
    common = {"topic": "t", "from": "2020-01-01T00:00:00.000Z"}
    assert queries == [common, common | {"cursor": "next"}, common | {"cursor": "last"}]


def parameters(kind, name):
    return inspect.signature(getattr(kind, name)).parameters


@pytest.mark.parametrize("name", [each for each in vars(Client) if not each.startswith("_")])
def test_both_clients_are_called_alike(name):
    assert parameters(Client, name) == parameters(AsyncClient, name)


def test_both_clients_are_made_alike():
    assert parameters(Client, "__init__") == parameters(AsyncClient, "__init__")


@pytest.mark.parametrize("token", ["secret", None])
def test_a_token_is_sent_where_there_is_one(token):
    call = Played(lambda client: client.cancel(ID), httpx.Response(204), token=token)
    expected = f"Bearer {token}" if token else None
    assert call.requests[0].headers.get("authorization") == expected
