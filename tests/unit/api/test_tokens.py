"""What a token does not let see or change: others' topics, and without one anything at all."""

import hmac

import pytest
from tests.support.api import NOWHERE, problem_of
from tests.support.tokens import OPERATIONS, SHOP, bearer, limited

from duetime.api.security import Callers
from duetime.core.setting_types import ApiToken

#: What runs the process asks these.
OPEN = {"/healthz", "/readyz"}

#: None, and what is none of ours.
STRANGERS = (
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": f"Bearer {SHOP[:-1]}"},
    {"Authorization": b"Bearer \xff"},
    {"Authorization": "Bearer"},
    {"Authorization": "Basic eA=="},
    {"Authorization": SHOP},
)


def test_without_a_token_every_request_is_refused(serving):
    client = serving(limited(NOWHERE))
    for method, path, _ in OPERATIONS:
        for headers in STRANGERS:
            asked = path.format(id="1-a", name="daily", offset=0)
            answer = client.request(method, asked, headers=headers)
            if path in OPEN:
                assert answer.status_code == 200
                continue
            assert problem_of(answer) == (401, "unauthorised"), (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b'{"topic": "orders-eu"}'])
def test_without_a_token_the_body_is_not_checked(serving, body):
    client = serving(limited(NOWHERE), headers={"Content-Type": "application/json"})
    for path in (
        "/v1/messages",
        "/v1/dead-letters/redrive",
        "/v1/messages/1-a/reschedule",
        "/v1/nothing",
    ):
        answer = client.post(path, content=body)
        assert problem_of(answer) == (401, "unauthorised")
    answer = client.post("/v1/messages", content=b"{", headers=bearer(SHOP))
    assert problem_of(answer) == (400, "not-json")


def test_all_that_needs_a_token_says_so():
    assert {path for _, path, is_secured in OPERATIONS if not is_secured} == OPEN


@pytest.mark.parametrize("token", ["first-0123456789abcdef", "last-0123456789abcdef", "none"])
def test_every_token_is_compared_whichever_is_right(token, monkeypatch):
    compared, compare = [], hmac.compare_digest

    def noticed(known, given):
        compared.append(known)
        return compare(known, given)

    monkeypatch.setattr("hmac.compare_digest", noticed)
    named = {each: ApiToken(token=f"{each}-0123456789abcdef") for each in ("first", "mid", "last")}
    find = Callers(named).find
    if token == "none":  # noqa: S105 (not a secret)
        with pytest.raises(Exception, match="no such token"):
            find(token)
    else:
        assert find(token).name == token.partition("-")[0]
    assert len(set(compared)) == len(compared) == 3


PLACES = [("orders-1", None), ("orders-1", "eu"), ("invoices", None), ("invoices", "eu")]


@pytest.mark.parametrize(
    ("limits", "allowed", "sees_all"),
    [
        ({}, PLACES, True),
        ({"topics": ["orders-*"]}, PLACES[:1], False),
        ({"topics": ["orders-*"], "clusters": ["eu"]}, PLACES[:2], False),
        ({"topics": ["orders-*"], "clusters": ["e?", "us"]}, PLACES[:2], False),
        ({"topics": ["orders-*"], "clusters": ["us"]}, PLACES[:1], False),
        ({"topics": ["*"]}, PLACES[::2], False),
        ({"topics": ["*"], "clusters": ["*"]}, PLACES, True),
        ({"clusters": ["eu"]}, PLACES, False),
        ({"topics": []}, [], False),
    ],
)
def test_topics_are_those_of_this_cluster_and_of_clusters_that_are_named(limits, allowed, sees_all):
    caller = Callers({"shop": ApiToken(token=SHOP, **limits)}).find(SHOP)

    assert [place for place in PLACES if caller.allows(*place)] == allowed
    assert caller.sees_all == sees_all
