"""Who may do what, and how much."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conftest import dead_letters_of

from duetime.api.problems import TooMany
from duetime.api.tokens import Rate
from duetime.message import MessageId

pytestmark = pytest.mark.system

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


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def reason_of(answer):
    return answer.status_code, answer.json()["reason"]


def test_a_token_is_for_its_topics_only(guarded, wheel, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.cancelling.ARRIVAL_MS", 200)
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


def test_what_was_posted_just_now_can_be_cancelled_by_a_token_for_its_topic(guarded, wheel):
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

    assert reason_of(answer) == (429, "too-many")
    assert answer.headers["retry-after"] == "1"
    assert guarded.post("/v1/messages", json=batch, headers=bearer(OTHER)).status_code == 201


@pytest.mark.parametrize(
    "change",
    [
        ("/v1/messages/{id}/reschedule", {"in": "30m"}, {"in": "30m"}),
        ("/v1/messages/{id}/deliver-now", None, None),
        ("/v1/dead/redrive", {"numbers": [0]}, {"numbers": [1]}),
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

    assert reason_of(answer) == (429, "too-many")
    assert int(answer.headers["retry-after"]) > 0
    assert guarded.post(paths[1], json=bodies[1], headers=bearer(OTHER)).status_code == 200


def test_a_rate_is_saved_up_for_a_second_and_no_longer():
    rate = Rate(per_second=10)
    rate.take(10, now_s=100.0)
    with pytest.raises(TooMany):
        rate.take(6, now_s=100.5)
    rate.take(5, now_s=100.5)
    rate.take(10, now_s=200.0)
    with pytest.raises(TooMany):
        rate.take(1, now_s=200.0)


def test_what_is_more_than_can_be_saved_up_is_paid_off_afterwards():
    rate = Rate(per_second=10)
    rate.take(30, now_s=100.0)
    with pytest.raises(TooMany) as refused:
        rate.take(1, now_s=101.0)
    assert refused.value.retry_after_s == 2
    rate.take(1, now_s=102.2)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(serving, settings, topics):  # noqa: ARG001
    client = serving(settings.model_copy(update={"api_body_bytes": 2_000}))
    answer = client.post("/v1/messages", json={"topic": "t", "in": "1s", "value": "x" * 2_000})
    assert reason_of(answer) == (413, "too-large")
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_request_that_takes_too_long_is_answered_in_time(serving, settings):
    # There are no topics, so Kafka does not take the message.
    client = serving(settings.model_copy(update={"api_request_seconds": 0.1}))
    answer = client.post("/v1/messages", json={"topic": "t", "in": "1s"})
    assert reason_of(answer) == (503, "timeout")
    assert int(answer.headers["retry-after"]) > 0
