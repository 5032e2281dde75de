"""What is refused before Kafka is asked: these tests need none."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.api import NOWHERE, opened, problem_of
from tests.support.made_kafka import accept

from duetime.api.idempotency import IdempotencyKeys
from duetime.api.requests import NewMessage
from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError
from duetime.core.messages import MessageId


@pytest.mark.parametrize(
    ("message", "status", "reason"),
    [
        ({"in": "1s"}, 422, "no-topic"),
        ({"topic": "t", "in": "1s", "at": "2026-12-24T18:00:00Z"}, 422, "two-due-times"),
        ({"topic": "t", "in": "-1s"}, 422, "bad-due-time"),
        ({"topic": "t", "at": "2026-12-24T18:00:00"}, 422, "bad-due-time"),
        ({"topic": "t", "in": "99999999999d"}, 422, "bad-due-time"),
        ({"topic": "t", "in": "365d"}, 422, "delay-too-long"),
        ({"topic": "__consumer_offsets", "in": "1s"}, 422, "internal-topic"),
        ({"topic": "t", "in": "1s", "id": "a b"}, 422, "bad-id"),
        ({"topic": "t", "in": "1s", "partition": -1}, 422, "bad-partition"),
        ({"topic": "t", "in": "1s", "headers": {"due-topic": "x"}}, 422, "bad-headers"),
        ({"topic": "t", "in": "1s", "value": "a", "value_base64": "YQ=="}, 422, "malformed"),
        ({"topic": "t", "in": "1s", "value_base64": "?"}, 422, "malformed"),
        ({"topic": "t", "in": "1s", "colour": "red"}, 422, "malformed"),
        ({"topic": "t", "in": "1s", "value": "x" * 1_000_001}, 413, "too-large"),
        ([], 422, "malformed"),
        ([{"topic": "t", "in": "1s"}] * 1_001, 413, "too-large"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_intakes_reason(alone, message, status, reason):
    assert problem_of(alone.post("/v1/messages", json=message)) == (status, reason)


@pytest.mark.parametrize(
    ("due", "reason"),
    [
        ({}, "no-due-time"),
        ({"in": "1s", "at": "2026-12-24T18:00:00Z"}, "two-due-times"),
        ({"at": "2026-12-24T18:00:00"}, "bad-due-time"),
        ({"in": "-1s"}, "bad-due-time"),
        ({"in": "soon"}, "bad-due-time"),
        ({"in": "1s", "topic": "t"}, "malformed"),
    ],
)
def test_a_message_gets_no_other_time_that_is_none(alone, due, reason):
    identity = MessageId(due_ms=SystemClock().now_ms() + 60_000, unique="waits")
    answer = alone.post(f"/v1/messages/{identity}/reschedule", json=due)
    assert problem_of(answer) == (422, reason)


@pytest.mark.parametrize("left_ms", [-60_000, 0, 6_000])
@pytest.mark.parametrize("change", [("reschedule", {"in": "30m"}), ("deliver-now", None)])
def test_a_message_that_is_due_or_soon_gets_no_other_time(alone, left_ms, change):
    how, due = change
    identity = MessageId(due_ms=SystemClock().now_ms() + left_ms, unique="on-its-way")
    answer = alone.post(f"/v1/messages/{identity}/{how}", json=due)
    assert problem_of(answer) == (409, "too-late")


def test_what_is_no_id_is_refused_with_its_reason(alone):
    for how in ("reschedule", "deliver-now"):
        answer = alone.post(f"/v1/messages/order-17/{how}", json={"in": "1s"})
        assert problem_of(answer) == (422, "bad-id")


@pytest.mark.parametrize("bound", ["from", "to"])
@pytest.mark.parametrize("instant", ["tomorrow", "", "2026-12-24T18:00:00"])
def test_what_waits_is_counted_from_and_to_an_instant_with_a_zone(alone, bound, instant):
    answer = alone.get("/v1/pending", params={bound: instant})
    assert problem_of(answer) == (422, "bad-due-time")


@pytest.mark.parametrize("body", [b"{", b"\xff", b'"\xff"'])
def test_a_body_that_is_no_json_is_refused(alone, body):
    headers = {"content-type": "application/json"}
    answer = alone.post("/v1/messages", content=body, headers=headers)
    assert problem_of(answer) == (400, "not-json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"value_base64": "c2VjcmV0", "key": 5},
        {"key": ["secret"]},
        {"key_base64": "secret"},
        {"headers": {"h": ["secret"]}},
        {"headers": {"due-topic": "secret"}},
        {"headers": {"due-expires-ms": "secret"}},
        {"topic": "..", "id": "a b", "partition": -1},
        {"in": "soon"},
    ],
)
def test_a_problem_repeats_no_key_no_value_and_no_header(alone, wrong):
    given = {"topic": "t", "in": "1s", "key": "secret", "value": "secret"}
    answer = alone.post("/v1/messages", json=given | {"headers": {"h": "secret"}} | wrong)
    assert answer.status_code == 422
    assert "secret" not in answer.text


#: So many that to tell of each would take all memory.
MANY = 50_000

#: What is wrong in so many places.
WRONG = {
    "messages": ("/v1/messages", [1] * MANY),
    "messages of messages": ("/v1/messages", [[1] * MANY]),
    "fields": ("/v1/messages", {f"a{each}": 1 for each in range(MANY)}),
    "fields in a list": ("/v1/messages", [{f"a{each}": 1 for each in range(MANY)}]),
    "headers": ("/v1/messages", {"topic": "t", "headers": {f"{each}": 1 for each in range(MANY)}}),
    "listed headers": ("/v1/messages", {"topic": "t", "headers": [1] * MANY}),
    "fields of a header": (
        "/v1/messages",
        {"topic": "t", "headers": [{f"a{each}": 1 for each in range(MANY)}]},
    ),
    "times": ("/v1/messages/1-a/reschedule", {f"a{each}": 1 for each in range(MANY)}),
    "offsets": ("/v1/dead-letters/redrive", {"offsets": [-1] * MANY}),
    "many offsets": ("/v1/dead-letters/redrive", {"offsets": list(range(MANY))}),
    "choices": ("/v1/dead-letters/redrive", {f"a{each}": 1 for each in range(MANY)}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_many_places_is_told_of_a_few(roomy, wrong):
    path, body = WRONG[wrong]
    answer = roomy.post(path, json=body)
    assert problem_of(answer) == (422, "malformed")
    assert 1 <= len(answer.json()["errors"]) <= 10


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A client of a server that takes as many messages at once as there are."""
    settings = NOWHERE.model_copy(update={"api_max_batch_size": 10 * MANY})
    with opened(settings, tmp_path_factory.mktemp("api")) as client:
        yield client


def test_of_many_messages_that_cannot_be_taken_a_hundred_are_told(alone):
    answer = alone.post("/v1/messages", json=[{"topic": "t"}] * 200)
    assert problem_of(answer) == (422, "no-due-time")
    assert answer.json()["detail"].startswith("200 of the messages")
    assert [each["where"] for each in answer.json()["errors"]] == [
        f"messages[{each}]" for each in range(100)
    ]


def test_too_many_are_refused_before_it_is_looked_what_they_are(alone):
    assert problem_of(alone.post("/v1/messages", json=[1] * 1_001)) == (413, "too-large")


@pytest.mark.parametrize("body", [b"[1]", b"[" * 100_000, b"\xff"])
def test_what_is_said_to_be_no_json_is_not_read_as_such(alone, body):
    answer = alone.post("/v1/messages", content=body, headers={"content-type": "text/plain"})
    assert problem_of(answer) == (422, "malformed")


def test_the_same_id_twice_is_the_same_message_with_the_same_answer(alone):
    due = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    message = {"topic": "t", "at": due, "id": "once", "value": "v"}
    answers = [alone.post("/v1/messages", json=message).json() for _ in range(2)]
    batch = alone.post("/v1/messages", json=[message, {"topic": "t", "in": "5m"}]).json()
    assert answers[0] == answers[1] == batch["messages"][0]


def test_one_id_of_a_batch_is_one_message(alone):
    message = {"topic": "t", "in": "5m", "id": "twice", "value": "v"}
    first, again = alone.post("/v1/messages", json=[message] * 2).json()["messages"]
    assert first == again
    for other in ({"in": "6m"}, {"topic": "other"}, {"value": "w"}):
        batch = [message | {"id": "both"}, message | {"id": "both"} | other]
        assert problem_of(alone.post("/v1/messages", json=batch)) == (409, "id-taken")
    # 1 and true are equal to Python only.
    batch = [message | {"id": "both", "value": each} for each in (1, True)]
    assert problem_of(alone.post("/v1/messages", json=batch)) == (409, "id-taken")


@pytest.mark.parametrize(
    ("at", "begins_ms"),
    [
        ("2000-01-01T00:00:00Z", 1_800_000_000_000 - 60_000),
        ("2027-01-15T07:59:30Z", 1_800_000_000_000 - 30_000),
        ("2027-01-15T09:00:00Z", 1_800_000_000_000 + 3_600_000),
    ],
)
def test_a_schedule_does_not_begin_in_years_that_are_over(at, begins_ms):
    message = NewMessage(topic="t", id="s", cron="* * * * *", misfire="all", at=at)
    record = message.record(NOWHERE, 1_800_000_000_000)
    assert dict(record.headers)["due-at-ms"] == b"%d" % begins_ms


def noted(*names):
    messages = [NewMessage(topic="t", id=each, **{"in": "5m"}) for each in names]
    return messages, [each.record(NOWHERE, 0) for each in messages]


def test_an_id_is_free_once_its_request_has_ended():
    async def begin_twice():
        keys, (messages, records) = IdempotencyKeys(), noted("a")
        for _ in range(2):
            async with keys.begin(messages, lambda _: records) as sending:
                assert sending.fresh == records
                accept(sending)

    asyncio.run(begin_twice())


def test_an_id_that_comes_twice_in_a_batch_is_sent_once():
    async def sends():
        messages, records = noted("a", "b", "a")
        async with IdempotencyKeys().begin(messages, lambda _: records) as sending:
            assert sending.fresh == records[:2]

    asyncio.run(sends())


@pytest.mark.parametrize("fails", [False, True])
def test_of_two_tries_at_once_the_second_sends_only_if_the_first_fails(fails):
    async def try_twice():
        keys, sent, over = IdempotencyKeys(), [], asyncio.Event()

        async def one(*names):
            messages, records = noted(*names)
            async with keys.begin(messages, lambda _: records) as sending:
                sent.append([each.id.unique for each in sending.fresh])
                await over.wait()
                if fails and len(sent) == 1:
                    raise KafkaError("not now")
                accept(sending)

        async with asyncio.timeout(5):
            tries = [asyncio.create_task(one(*names)) for names in ("ab", "ba", "bc")]
            await asyncio.sleep(0)
            over.set()
            await asyncio.gather(*tries, return_exceptions=True)
        return sent

    first, *others = asyncio.run(try_twice())
    assert first == ["a", "b"]
    assert others == ([["b", "a"], ["c"]] if fails else [[], ["c"]])


#: As many requests as the framework has threads for.
THREADS = 40


def test_metrics_are_answered_while_every_thread_waits_for_kafka(serving, monkeypatch):
    entered, over = threading.Semaphore(0), threading.Event()

    def wait_for_kafka(*_):
        entered.release()
        over.wait()
        raise KafkaError("it does not answer")

    monkeypatch.setattr("duetime.api.routes.health.read_status", wait_for_kafka)
    client = serving(NOWHERE)
    with ThreadPoolExecutor(THREADS) as pool:
        hanging = [pool.submit(client.get, "/v1/status") for _ in range(THREADS)]
        try:
            assert all(entered.acquire(timeout=20) for _ in range(THREADS))
            assert client.get("/metrics", timeout=5).status_code == 200
        finally:
            over.set()
        assert {each.result().status_code for each in hanging} == {503}


def test_a_fault_of_our_own_is_a_problem_too_and_tells_nothing_of_itself(
    serving, monkeypatch, caplog
):
    def broken(*_):
        raise LookupError("secret")

    monkeypatch.setattr("duetime.api.routes.health.read_status", broken)
    answer = serving(NOWHERE).get("/v1/status")

    assert problem_of(answer) == (500, "internal")
    assert "secret" not in answer.text
    assert "secret" not in caplog.text
    assert "LookupError" in caplog.text
