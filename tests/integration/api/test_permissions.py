"""Who may do what, and how much."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer
from tests.support.api import problem_of
from tests.support.page import reject
from tests.support.tokens import ALL, OPERATIONS, SHOP, bearer, limited
from tests.support.topics import dead_letters_of

from duetime.api.errors import RateLimited
from duetime.api.security import RateLimit
from duetime.core.messages import MessageId
from duetime.core.schedules import Schedule, ScheduleEntry
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties

SECRET, OTHER, SLOW = "0123456789abcdef-secret", "fedcba9876543210-secret", "seldom-0123456789"


@pytest.fixture
def guarded(serving, settings, topics):  # noqa: ARG001 (the topics must be there)
    tokens = {
        "shop": {"token": SECRET, "topics": ["orders-*"], "rate": 10},
        "all": {"token": OTHER},
        # One message in 1,000 seconds.
        "slow": {"token": SLOW, "rate": 0.001},
    }
    named = type(settings)(**settings.model_dump() | {"api_tokens": tokens})
    return serving(named)


def reason_of(answer):
    return answer.status_code, answer.json()["reason"]


def test_a_token_is_for_its_topics_only(guarded, wheel, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.client.cancellation.ARRIVAL_MS", 200)
    mine = wheel.message("orders-eu", now_ms + 60_000)
    others = wheel.message("invoices", now_ms + 60_000)

    answer = guarded.post(
        "/v1/messages", json={"topic": "invoices", "in": "1m"}, headers=bearer(SECRET)
    )
    assert reason_of(answer) == (403, "topic-not-allowed")
    listed = guarded.get("/v1/messages", headers=bearer(SECRET)).json()["messages"]
    assert [each["id"] for each in listed] == [str(mine)]
    for call in (guarded.get, guarded.delete):
        answer = call(f"/v1/messages/{others}", headers=bearer(SECRET))
        assert reason_of(answer) == (404, "unknown-message")
    listed = guarded.get("/v1/messages", headers=bearer(OTHER)).json()["messages"]
    assert len(listed) == 2


def test_a_new_message_can_be_cancelled_by_a_token_for_its_topic(guarded, wheel):
    message = {"topic": "orders-eu", "in": "10m", "id": "fresh"}
    told = guarded.post("/v1/messages", json=message, headers=bearer(SECRET)).json()
    due_ms = MessageId.parse(told["id"]).due_ms
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(guarded.delete, f"/v1/messages/{told['id']}", headers=bearer(SECRET))
        # The pipeline takes a while.
        with pytest.raises(TimeoutError):
            deleting.result(1)
        wheel.cancel(wheel.message("orders-eu", due_ms, unique="fresh"))

        assert deleting.result(20).status_code == 204


def test_a_token_sends_so_many_a_second(guarded):
    batch = [{"topic": "orders-eu", "in": "1m"}] * 10

    assert guarded.post("/v1/messages", json=batch, headers=bearer(SECRET)).status_code == 201
    answer = guarded.post("/v1/messages", json=batch, headers=bearer(SECRET))

    assert reason_of(answer) == (429, "rate-limited")
    assert answer.headers["retry-after"] == "1"
    assert guarded.post("/v1/messages", json=batch, headers=bearer(OTHER)).status_code == 201


@pytest.mark.parametrize(
    "change",
    [
        ("/v1/messages/{id}/reschedule", {"in": "30m"}, {"in": "30m"}),
        ("/v1/messages/{id}/deliver-now", None, None),
        ("/v1/dead-letters/redrive", {"offsets": [0]}, {"offsets": [1]}),
    ],
    ids=lambda each: each[0].rpartition("/")[2],
)
def test_whatever_sends_a_message_counts(guarded, wheel, settings, now_ms, change):
    path, *bodies = change
    write_letter = dead_letters_of(settings)
    paths = []
    for _ in bodies:
        paths.append(path.format(id=wheel.message("orders-eu", now_ms + 600_000)))
        write_letter()

    assert guarded.post(paths[0], json=bodies[0], headers=bearer(SLOW)).status_code == 200
    answer = guarded.post(paths[1], json=bodies[1], headers=bearer(SLOW))

    assert reason_of(answer) == (429, "rate-limited")
    assert int(answer.headers["retry-after"]) > 0
    assert guarded.post(paths[1], json=bodies[1], headers=bearer(OTHER)).status_code == 200


def test_a_rate_is_saved_up_for_a_second_and_no_longer():
    rate = RateLimit(per_second=10)
    rate.take(10, now_s=100.0)
    with pytest.raises(RateLimited):
        rate.take(6, now_s=100.5)
    rate.take(5, now_s=100.5)
    rate.take(10, now_s=200.0)
    with pytest.raises(RateLimited):
        rate.take(1, now_s=200.0)


def test_what_is_more_than_can_be_saved_up_is_paid_off_afterwards():
    rate = RateLimit(per_second=10)
    rate.take(30, now_s=100.0)
    with pytest.raises(RateLimited) as refused:
        rate.take(1, now_s=101.0)
    assert refused.value.retry_after_s == 2
    rate.take(1, now_s=102.2)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(serving, settings, topics):  # noqa: ARG001
    client = serving(settings.model_copy(update={"api_max_body_bytes": 2_000}))
    answer = client.post("/v1/messages", json={"topic": "t", "in": "1s", "value": "x" * 2_000})
    assert reason_of(answer) == (413, "too-large")
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_request_that_takes_too_long_is_answered_in_time(serving, settings):
    # There are no topics, so Kafka does not take the message.
    client = serving(settings.model_copy(update={"api_request_timeout_seconds": 0.1}))
    answer = client.post("/v1/messages", json={"topic": "t", "in": "1s"})
    assert reason_of(answer) == (503, "timeout")
    assert int(answer.headers["retry-after"]) > 0


MINUTE_MS = 60_000


def test_a_token_learns_nothing_of_others_messages_from_a_cursor(
    serving, settings, wheel, now_ms, monkeypatch
):
    monkeypatch.setattr("duetime.api.routes.messages.MAX_READ", 2)
    client = serving(limited(settings), headers=bearer(SHOP))
    for each in range(4):
        wheel.message("invoices", now_ms + MINUTE_MS + each, unique=f"secret-{each}")
    nothing = client.get("/v1/messages").json()
    assert nothing == {"messages": [], "cursor": None}
    mine = [
        str(wheel.message("orders-eu", now_ms + MINUTE_MS + each, unique=f"mine-{each}"))
        for each in range(3)
    ]
    page = client.get("/v1/messages").json()
    assert [each["id"] for each in page["messages"]] == mine[:2]
    assert page["cursor"] == mine[1]
    last = client.get("/v1/messages", params={"cursor": mine[1]}).json()
    assert ([each["id"] for each in last["messages"]], last["cursor"]) == (mine[2:], None)
    others = client.get("/v1/messages", headers=bearer(ALL)).json()
    assert len(others["messages"]) == 2
    assert problem_of(client.get("/v1/messages", params={"cursor": "x"})) == (422, "bad-id")


EU = "both-0123456789abcdef"


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
    schedule = Schedule(
        name="weekly", since="1-first", topic="orders-1", cron="@weekly", cluster="eu"
    )
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).schedules, ScheduleEntry(schedule).encoded(), "weekly")
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
        ("GET", "/v1/dead-letters/0", None),
        ("GET", "/v1/schedules/weekly", None),
        ("DELETE", "/v1/schedules/weekly", None),
    ):
        assert problem_of(ask(SHOP, method, path, body)) == unknown, path
        if method == "GET":
            assert ask(EU, method, path, body).status_code == 200, path
    assert ask(SHOP, "GET", "/v1/dead-letters").json()["letters"] == []
    assert ask(SHOP, "GET", "/v1/schedules").json()["schedules"] == []
    assert ask(SHOP, "POST", "/v1/dead-letters/redrive", {"all": True}).json() == {"redriven": 0}
    taken = {"topic": "orders-1", "cron": "@daily", "id": "weekly"}
    assert problem_of(ask(SHOP, "POST", "/v1/messages", taken)) == (409, "id-taken")
    assert ask(EU, "POST", "/v1/dead-letters/redrive", {"all": True}).json() == {"redriven": 1}


@pytest.fixture
def shop(serving, settings, topics):  # noqa: ARG001 (the topics must be there)
    """A client with a token for some topics."""
    return serving(limited(settings), headers=bearer(SHOP))


@pytest.mark.slow
def test_others_dead_letters_are_neither_seen_nor_brought_back(shop, settings):
    die = dead_letters_of(settings)
    for topic in ("invoices", "orders-eu", "invoices", "orders-us"):
        die(topic, cluster="")

    def offsets(**headers):
        letters = shop.get("/v1/dead-letters", headers=headers).json()["letters"]
        return [each["offset"] for each in letters]

    assert offsets() == [1, 3]
    assert shop.get("/v1/dead-letters", params={"topic": "invoices"}).json()["letters"] == []
    assert shop.get("/v1/dead-letters/1").json()["topic"] == "orders-eu"
    # As one that never was.
    others, nobodys = shop.get("/v1/dead-letters/0"), shop.get("/v1/dead-letters/99")
    assert problem_of(others) == problem_of(nobodys) == (404, "unknown-message")
    assert others.json()["detail"].replace("0", "99") == nobodys.json()["detail"]
    for which in ({"offsets": [0, 2]}, {"topic": "invoices"}):
        assert shop.post("/v1/dead-letters/redrive", json=which).json() == {"redriven": 0}
    assert shop.post("/v1/dead-letters/redrive", json={"all": True}).json() == {"redriven": 2}
    assert offsets() == []
    assert offsets(**bearer(ALL)) == [0, 2]


def define(settings, *topics):
    """Write a schedule for each topic, as the pipeline does, and called as it."""
    producer = Producer(librdkafka_properties(settings))
    for topic in topics:
        schedule = Schedule(name=topic, since="1-first", topic=topic, cron="@weekly")
        producer.produce(TopicNames(settings).schedules, ScheduleEntry(schedule).encoded(), topic)
    assert producer.flush(30) == 0


@pytest.mark.slow
def test_schedules_of_others_are_neither_seen_nor_changed(shop, settings):
    define(settings, "orders-weekly", "invoices")

    def names(**headers):
        return [
            each["name"] for each in shop.get("/v1/schedules", headers=headers).json()["schedules"]
        ]

    assert names() == ["orders-weekly"]
    assert shop.get("/v1/schedules/orders-weekly").json()["topic"] == "orders-weekly"
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
    assert not shop.get("/v1/schedules/invoices", headers=bearer(ALL)).json()["paused"]


def test_schedules_of_others_are_not_replaced_by_one_of_the_same_name(shop, settings):
    define(settings, "orders-weekly", "invoices")

    def schedule(name, **headers):
        wanted = {"topic": "orders-eu", "cron": "@daily", "id": name}
        return shop.post("/v1/messages", json=wanted, headers=headers)

    assert problem_of(schedule("invoices")) == (409, "id-taken")
    for name in ("orders-weekly", "nobodys"):
        assert schedule(name).status_code == 201
    assert schedule("invoices", **bearer(ALL)).status_code == 201


def test_rejected_records_are_for_tokens_of_all_topics(shop, settings):
    reject(settings)
    for path in ("/v1/rejected", "/v1/rejected/0", "/v1/rejected/99"):
        assert problem_of(shop.get(path)) == (403, "topic-not-allowed")
    assert len(shop.get("/v1/rejected", headers=bearer(ALL)).json()["records"]) == 1
