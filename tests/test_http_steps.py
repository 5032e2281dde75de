"""Which requests the HTTP client makes again, when, and how often: no server, and nobody waits."""

import inspect
from datetime import UTC, datetime

import httpx
import pytest

from duetime.client import AsyncClient, Client
from duetime.errors import (
    ConfigError,
    InvalidMessage,
    KafkaError,
    Refused,
    TooLate,
    UnknownMessage,
)
from duetime.http import calls, steps
from duetime.http.steps import LONGEST_PAUSE_S, PASSING, PAUSE_S, TRIES, Request

AT = datetime(2020, 1, 1, tzinfo=UTC)

ID = "0000000003e8-a"

LOST = httpx.ReadError("the connection was closed")


def problem(status, reason, **headers):
    told = {"reason": reason, "detail": "so it is"}
    return httpx.Response(status, json=told, headers=headers)


def taken(*names):
    return httpx.Response(201, json={"messages": [{"id": each} for each in names]})


class Played:
    """A call that is given these answers; what it asked for, its pauses, and what it gave."""

    def __init__(self, call, *answers):
        self.requests, self.pauses_s = [], []
        self._answers = iter(answers)
        self.gave = self._end_of(call)

    def _end_of(self, call):
        given = None
        while True:
            try:
                step = call.send(given)
            except StopIteration as end:
                return end.value
            if isinstance(step, Request):
                self.requests.append(step)
                given = next(self._answers)
            else:
                self.pauses_s.append(step)


def schedule():
    return calls.schedule([calls.message("orders", "v", {"at": AT})])


@pytest.mark.parametrize("status", PASSING)
def test_what_may_pass_is_tried_again_with_longer_and_longer_pauses(status):
    failing = [httpx.Response(status, text="Bad Gateway")] * (TRIES - 1)
    played = Played(schedule(), *failing, taken("a"))
    assert [each.id for each in played.gave] == ["a"]
    assert played.pauses_s == [PAUSE_S * 2**each for each in range(TRIES - 1)]


@pytest.mark.parametrize(
    ("said", "pause_s"),
    [("3", 3.0), ("0", 0.0), ("3600", LONGEST_PAUSE_S), ("9" * 400, LONGEST_PAUSE_S)]
    + [(each, PAUSE_S) for each in ("", "-1", "soon", "Wed, 21 Oct 2026 07:28:00 GMT")],
)
def test_it_waits_as_long_as_the_api_says_but_not_for_ever(said, pause_s):
    busy = problem(429, "too-many", **{"Retry-After": said})
    assert Played(schedule(), busy, taken("a")).pauses_s == [pause_s]


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (LOST, KafkaError, "kafka"),
        (problem(503, "kafka"), KafkaError, "kafka"),
        (problem(503, "spool-full"), Refused, "spool-full"),
        (problem(429, "too-many"), Refused, "too-many"),
        (httpx.Response(502, text="<html>Bad Gateway</html>"), Refused, "error"),
    ],
)
def test_what_the_last_try_was_answered_is_told(answer, error, reason):
    before = [problem(503, "timeout")] * (TRIES - 1)
    with pytest.raises(error) as told:
        Played(schedule(), *before, answer)
    assert told.value.reason == reason


def test_a_message_whose_answer_was_lost_is_sent_again_as_the_same_message():
    played = Played(schedule(), LOST, taken("a"))
    first, again = played.requests
    assert first == again
    assert first.json[0]["id"]
    assert first.json[0]["at"] == "2020-01-01T00:00:00.000Z"


@pytest.mark.parametrize("change", [calls.reschedule(ID, AT, None), calls.deliver_now(ID)])
def test_what_cannot_be_repeated_is_tried_once(change):
    with pytest.raises(KafkaError, match="it is not known whether it did"):
        Played(change, LOST)


def test_of_what_changes_nothing_it_is_told_that_nobody_answered_and_no_more():
    with pytest.raises(KafkaError) as told:
        Played(calls.status(), *[LOST] * TRIES)
    assert told.value.detail.endswith("see that it runs there")


@pytest.mark.parametrize(
    "base_url", ["nonsense", "127.0.0.1:8080", "localhost:8080", "ftp://a", "http://", "http://a:b"]
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_where_nobody_can_be_asked_is_refused_at_once(kind, base_url):
    with pytest.raises(ConfigError, match=r"write it as http://127\.0\.0\.1:8080"):
        kind(base_url)


NESTED = []
NESTED.append(NESTED)


@pytest.mark.parametrize("value", [{1}, AT, {"a": float("nan")}, NESTED, "\ud800", {(1,): 2}])
def test_a_value_that_json_does_not_have_is_no_message(value):
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidMessage) as told:
        client.schedule("orders", value, at=AT)
    assert told.value.reason == "unreadable"
    assert "give text or bytes" in told.value.detail


def test_what_json_has_is_sent_as_json():
    sent = steps.body(Request(method="POST", path="/", json={"a": "ö", "b": [1, None]}))
    assert sent["content"] == '{"a":"ö","b":[1,null]}'.encode()
    assert sent["headers"] == {"Content-Type": "application/json"}
    assert steps.body(Request(method="GET", path="/")) == {}


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
def test_another_problem_is_told_at_once(answer, error, reason):
    with pytest.raises(error) as told:
        Played(calls.find(ID, None), answer)
    assert told.value.reason == reason


@pytest.mark.parametrize("body", ["<html>please log in</html>", "", "[]", "null"])
@pytest.mark.parametrize("call", [schedule, calls.status, lambda: calls.deliver_now(ID)])
def test_an_answer_that_is_none_of_duetimes_is_refused(call, body):
    with pytest.raises(Refused, match="is it duetime"):
        Played(call(), httpx.Response(200, text=body))


@pytest.mark.parametrize(
    ("call", "status", "body"),
    [(schedule, 201, each) for each in ({}, {"messages": []}, {"messages": [{}]}, {"messages": 1})]
    + [
        (call, 200, {})
        for call in (
            lambda: calls.page({}),
            calls.all_series,
            lambda: calls.dead_letters({}, 10),
            lambda: calls.redrive({"all": True}),
            lambda: calls.deliver_now(ID),
        )
    ]
    + [(lambda: calls.find(ID, None), 200, {"id": ID, "value_base64": "YQ"})],
)
def test_an_answer_that_lacks_what_was_asked_for_is_refused(call, status, body):
    with pytest.raises(Refused, match="is it duetime"):
        Played(call(), httpx.Response(status, json=body))


@pytest.mark.parametrize("call", [calls.cancel, calls.stop_series])
def test_a_page_of_somebody_else_is_not_taken_for_done(call):
    assert Played(call(ID), httpx.Response(204)).gave is None
    with pytest.raises(Refused, match="is it duetime"):
        Played(call(ID), httpx.Response(200, text="<html>please log in</html>"))


#: What would lead elsewhere, were it a part of a path as it is.
ASTRAY = ("../recurring/daily", "a#b", "a?b", "a/b", " ", "a b", "ä", "a\n")

OF_MESSAGES = (
    calls.cancel,
    calls.deliver_now,
    lambda id_: calls.find(id_, None),
    lambda id_: calls.reschedule(id_, AT, None),
)
OF_SERIES = (calls.find_series, calls.stop_series, lambda name: calls.change_series(name, "pause"))


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, f"{prefix}{each}") for call in OF_MESSAGES for prefix in ("", ID) for each in ASTRAY]
    + [(call, each) for call in OF_SERIES for each in (*ASTRAY, ".", "..")],
)
def test_what_is_no_id_or_name_is_refused_before_anybody_is_asked(call, name):
    with pytest.raises(InvalidMessage) as refused:
        Played(call(name))
    assert refused.value.reason == "bad-id"


def test_an_id_or_a_name_is_one_part_of_its_path_whatever_it_is_made_of():
    name = "A.z_0:=~+@-"
    quoted = "A.z_0%3A%3D~%2B%40-"
    gone = httpx.Response(204)
    (deleted,) = Played(calls.cancel(f"0000000003e8-{name}"), gone).requests
    (stopped,) = Played(calls.stop_series(name), gone).requests
    assert deleted.path == f"/v1/messages/0000000003e8-{quoted}"
    assert stopped.path == f"/v1/recurring/{quoted}"


def parameters(kind, name):
    return inspect.signature(getattr(kind, name)).parameters


@pytest.mark.parametrize("name", [each for each in vars(Client) if not each.startswith("_")])
def test_both_clients_are_called_alike(name):
    assert parameters(Client, name) == parameters(AsyncClient, name)


def test_both_clients_are_made_alike():
    assert parameters(Client, "__init__") == parameters(AsyncClient, "__init__")


def test_a_token_is_sent_where_there_is_one():
    assert steps.authorised("secret") == {"Authorization": "Bearer secret"}
    assert steps.authorised(None) == {}
