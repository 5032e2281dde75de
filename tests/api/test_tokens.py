"""What a token does not let see or change: others' topics, and without one anything at all."""

import hmac

import pytest
from confluent_kafka import Producer
from tests.api.conftest import NOWHERE, problem_of
from tests.api.test_events import reject
from tests.conftest import dead_letters_of

from duetime.api.app import create_app
from duetime.api.tokens import reader_of_tokens
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.series import Page, Series
from duetime.tables import ApiToken
from duetime.topics import TopicNames

SHOP, ALL = "0123456789abcdef-secret", "fedcba9876543210-secret"

TOKENS = {"shop": {"token": SHOP, "topics": ["orders-*"]}, "all": {"token": ALL}}

#: Every operation, and whether it is for tokens, as the OpenAPI document has it.
OPERATIONS = [
    (method.upper(), path, "security" in operation)
    for path, methods in create_app(NOWHERE).openapi()["paths"].items()
    for method, operation in methods.items()
]

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


def limited(settings):
    return Settings(**settings.model_dump() | {"api_tokens": TOKENS})


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_without_a_token_nothing_is_told(serving):
    client = serving(limited(NOWHERE))
    for method, path, _ in OPERATIONS:
        for headers in STRANGERS:
            asked = path.format(id="1-a", name="daily", number=0)
            answer = client.request(method, asked, headers=headers)
            if path in OPEN:
                assert answer.status_code == 200
                continue
            assert problem_of(answer) == (401, "unauthorised"), (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b'{"topic": "orders-eu"}'])
def test_without_a_token_nothing_is_said_of_what_was_sent(serving, body):
    client = serving(limited(NOWHERE), headers={"Content-Type": "application/json"})
    for path in ("/v1/messages", "/v1/dead/redrive", "/v1/messages/1-a/reschedule", "/v1/nothing"):
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
    who = reader_of_tokens(named)
    if token == "none":  # noqa: S105 (not a secret)
        with pytest.raises(Exception, match="no such token"):
            who(token)
    else:
        assert who(token).name == token.partition("-")[0]
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
    caller = reader_of_tokens({"shop": ApiToken(token=SHOP, **limits)})(SHOP)

    assert [place for place in PLACES if caller.allows(*place)] == allowed
    assert caller.sees_all == sees_all


EU = "both-0123456789abcdef"


@pytest.mark.system
def test_what_is_for_another_cluster_is_for_tokens_of_that_cluster(
    serving, settings, wheel, now_ms
):
    tokens = {
        "here": {"token": SHOP, "topics": ["orders-*"]},
        "both": {"token": EU, "topics": ["orders-*"], "clusters": ["eu"]},
    }
    client = serving(Settings(**settings.model_dump() | {"api_tokens": tokens}))
    mine = wheel.message("orders-1", now_ms + 600_000)
    there = wheel.message("orders-1", now_ms + 600_000, state="1:::::eu")
    dead_letters_of(settings)("orders-1", cluster="eu")
    series = Series(name="weekly", since="1-first", topic="orders-1", cron="@weekly", cluster="eu")
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).series, Page(series).encoded(), "weekly")
    assert producer.flush(30) == 0
    wanted = {"topic": "orders-1", "cluster": "eu", "in": "10m"}

    def ask(token, method, path, body=None):
        return client.request(method, path, json=body, headers=bearer(token))

    def listed(token):
        messages = ask(token, "GET", "/v1/messages").json()["messages"]
        return {each["id"] for each in messages}

    assert problem_of(ask(SHOP, "POST", "/v1/messages", wanted)) == (403, "topic-not-allowed")
    assert ask(EU, "POST", "/v1/messages", wanted).status_code == 201
    assert listed(SHOP) == {str(mine)}
    assert listed(EU) == {str(mine), str(there)}
    unknown = (404, "unknown-message")
    for method, path, body in (
        ("GET", f"/v1/messages/{there}", None),
        ("DELETE", f"/v1/messages/{there}", None),
        ("POST", f"/v1/messages/{there}/reschedule", {"in": "20m"}),
        ("POST", f"/v1/messages/{there}/deliver-now", None),
        ("GET", "/v1/dead/0", None),
        ("GET", "/v1/recurring/weekly", None),
        ("DELETE", "/v1/recurring/weekly", None),
    ):
        assert problem_of(ask(SHOP, method, path, body)) == unknown, path
        if method == "GET":
            assert ask(EU, method, path, body).status_code == 200, path
    assert ask(SHOP, "GET", "/v1/dead").json()["letters"] == []
    assert ask(SHOP, "GET", "/v1/recurring").json()["series"] == []
    assert ask(SHOP, "POST", "/v1/dead/redrive", {"all": True}).json() == {"redriven": 0}
    taken = {"topic": "orders-1", "cron": "@daily", "id": "weekly"}
    assert problem_of(ask(SHOP, "POST", "/v1/messages", taken)) == (409, "id-taken")
    assert ask(EU, "POST", "/v1/dead/redrive", {"all": True}).json() == {"redriven": 1}


@pytest.fixture
def shop(serving, settings, topics):  # noqa: ARG001 (the topics must be there)
    """A client with a token for some topics."""
    return serving(limited(settings), headers=bearer(SHOP))


@pytest.mark.system
def test_others_dead_letters_are_neither_seen_nor_brought_back(shop, settings):
    die = dead_letters_of(settings)
    for topic in ("invoices", "orders-eu", "invoices", "orders-us"):
        die(topic, cluster="")

    def numbers(**headers):
        letters = shop.get("/v1/dead", headers=headers).json()["letters"]
        return [each["number"] for each in letters]

    assert numbers() == [1, 3]
    assert shop.get("/v1/dead", params={"topic": "invoices"}).json()["letters"] == []
    assert shop.get("/v1/dead/1").json()["topic"] == "orders-eu"
    # As one that never was.
    others, nobodys = shop.get("/v1/dead/0"), shop.get("/v1/dead/99")
    assert problem_of(others) == problem_of(nobodys) == (404, "unknown-message")
    assert others.json()["detail"].replace("0", "99") == nobodys.json()["detail"]
    for which in ({"numbers": [0, 2]}, {"topic": "invoices"}):
        assert shop.post("/v1/dead/redrive", json=which).json() == {"redriven": 0}
    assert shop.post("/v1/dead/redrive", json={"all": True}).json() == {"redriven": 2}
    assert numbers() == []
    assert numbers(**bearer(ALL)) == [0, 2]


def define(settings, *topics):
    """Write a series for each topic, as the pipeline does, and called as it."""
    producer = Producer(librdkafka_properties(settings))
    for topic in topics:
        series = Series(name=topic, since="1-first", topic=topic, cron="@weekly")
        producer.produce(TopicNames(settings).series, Page(series).encoded(), topic)
    assert producer.flush(30) == 0


@pytest.mark.system
def test_others_series_are_neither_seen_nor_changed(shop, settings):
    define(settings, "orders-weekly", "invoices")

    def names(**headers):
        return [
            each["name"] for each in shop.get("/v1/recurring", headers=headers).json()["series"]
        ]

    assert names() == ["orders-weekly"]
    assert shop.get("/v1/recurring/orders-weekly").json()["topic"] == "orders-weekly"
    for method, path, _ in OPERATIONS:
        if "{name}" in path:
            others, nobodys = (
                shop.request(method, path.format(name=name)) for name in ("invoices", "nobodys")
            )
            assert problem_of(others) == problem_of(nobodys) == (404, "unknown-message")
            assert (
                others.json()["detail"].replace("invoices", "nobodys") == nobodys.json()["detail"]
            )
    assert names(**bearer(ALL)) == ["invoices", "orders-weekly"]
    assert not shop.get("/v1/recurring/invoices", headers=bearer(ALL)).json()["paused"]


@pytest.mark.system
def test_others_series_are_not_replaced_by_one_of_the_same_name(shop, settings):
    define(settings, "orders-weekly", "invoices")

    def schedule(name, **headers):
        wanted = {"topic": "orders-eu", "cron": "@daily", "id": name}
        return shop.post("/v1/messages", json=wanted, headers=headers)

    assert problem_of(schedule("invoices")) == (409, "id-taken")
    for name in ("orders-weekly", "nobodys"):
        assert schedule(name).status_code == 201
    assert schedule("invoices", **bearer(ALL)).status_code == 201


@pytest.mark.system
def test_rejected_records_are_for_tokens_of_all_topics(shop, settings):
    reject(settings)
    for path in ("/v1/rejected", "/v1/rejected/0", "/v1/rejected/99"):
        assert problem_of(shop.get(path)) == (403, "topic-not-allowed")
    assert len(shop.get("/v1/rejected", headers=bearer(ALL)).json()["records"]) == 1
