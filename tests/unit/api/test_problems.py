"""What a problem says to whoever made a mistake: these tests need no Kafka."""

import pytest
from tests.support.api import NOWHERE, problem_of

from duetime.api.server import create_app

#: Each method and path of the API itself.
OPERATIONS = [
    (method.upper(), path)
    for path, methods in create_app(NOWHERE).openapi()["paths"].items()
    for method in methods
    if path.startswith("/v1/")
]

#: As curl sends it, and as a page may without asking first.
UNTYPED = [
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "text/plain"},
    {},
]

MESSAGE = {"topic": "t", "in": "1m"}


@pytest.mark.parametrize("headers", UNTYPED, ids=str)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/dead-letters/redrive"])
def test_a_body_without_its_content_type_is_refused_with_a_hint(alone, path, headers):
    answer = alone.post(path, content=b'{"topic": "t", "in": "1m"}', headers=headers)
    assert problem_of(answer) == (422, "malformed")
    assert answer.json()["detail"].endswith("send the header content-type: application/json")


@pytest.mark.parametrize(
    ("body", "where", "detail"),
    [
        ({}, "message.topic", "it is missing: add it"),
        (5, "message", "it must be an object"),
        (MESSAGE | {"topic": 5}, "message.topic", "it must be text"),
        (MESSAGE | {"headers": 5}, "message.headers", "it must be an object"),
        (MESSAGE | {"headers": {"h": 5}}, "message.headers.h", "it must be text"),
        (MESSAGE | {"headers": [{"name": "a"}, 5]}, "message.headers[1]", "it must be an object"),
        (
            MESSAGE | {"in_": "1s"},
            "message.in_",
            "there is none of this name: correct it, or leave it out",
        ),
        (MESSAGE | {"misfire": "no"}, "message.misfire", "it must be 'skip', 'once' or 'all'"),
        ([MESSAGE, {"in": "1s"}], "messages[1].topic", "it is missing: add it"),
        ([], "messages", "it must have 1 or more"),
    ],
    ids=str,
)
def test_an_error_in_a_body_names_its_field_once(alone, body, where, detail):
    told = alone.post("/v1/messages", json=body).json()
    assert [(each["where"], each["detail"]) for each in told["errors"]] == [(where, detail)]
    assert told["detail"] == f"{where}: {detail}"


@pytest.mark.parametrize(
    ("times", "detail"),
    [
        ({}, "neither at nor in is given: add one"),
        ({"in": "1s", "at": "2026-12-24T18:00:00Z"}, "both at and in are given: leave one"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/fffffffffff0-a/reschedule"])
def test_times_are_called_as_the_fields_are(alone, path, times, detail):
    message = {"topic": "t"} if path == "/v1/messages" else {}
    assert alone.post(path, json=message | times).json()["detail"] == detail


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_a_parameter_that_does_not_exist_is_refused_by_its_name(alone, method, path):
    answer = alone.request(method, path, params={"tpoic": "orders"})
    assert problem_of(answer) == (422, "malformed")
    assert answer.json()["detail"].startswith("no parameter is called 'tpoic': ")


def test_the_known_parameters_are_listed(alone):
    told = alone.get("/v1/pending", params={"form": "2026-12-24T18:00:00Z"}).json()
    assert told["detail"] == "no parameter is called 'form': use from, to"


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/openapi.json", "/"])
def test_other_tools_may_add_parameters(alone, path):
    assert alone.get(path, params={"probe": "1"}).status_code == 200


@pytest.mark.parametrize("cursor", ["zzz", "0000000003e8-a/x"])
def test_a_cursor_that_is_none_is_called_a_cursor(alone, cursor):
    answer = alone.get("/v1/messages", params={"cursor": cursor})
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        f"{cursor!r} is no cursor: give the one that the last page had"
    )
