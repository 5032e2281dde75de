"""What the dashboard asks for, without a browser: events, rejected records, keys, its own files."""

import pytest
from tests.support.api import problem_of
from tests.support.page import events, reject

from duetime.api.errors import Problem
from duetime.api.events import DashboardSnapshot

MINUTE_MS = 60_000


@pytest.mark.slow
def test_events_tell_what_waits_and_what_came_in_again_and_again(api, wheel, settings, now_ms):
    with events(api) as received:
        name, first = next(received)
        assert name == "snapshot"
        assert (first["pending"]["pending"], first["status"]["leader"]) == (0, None)
        assert first["totals"] == dict.fromkeys(first["totals"], 0)
        wheel.message("orders", now_ms + MINUTE_MS)
        api.post("/v1/messages", json={"topic": "orders", "in": "1m"})
        reject(settings)
        second = next(look for _, look in received if look["pending"]["pending"])

    assert second["totals"]["taken_in"] == second["totals"]["rejected"] == 1
    assert second["at_ms"] > first["at_ms"]
    # What is said is what is documented, no more and no less.
    for look in (first, second):
        assert DashboardSnapshot.model_validate(look, strict=True).model_dump() == look


def test_while_kafka_is_down_events_say_so_and_what_is_spooled(alone, monkeypatch):
    monkeypatch.setattr("duetime.kafka.offsets.TIMEOUT_S", 0.2)
    alone.post("/v1/messages", json={"topic": "orders", "in": "1m"})
    with events(alone) as received:
        name, trouble = next(received)
    assert (name, trouble["problem"]["reason"], trouble["spooled"]) == ("problem", "kafka", 1)
    assert trouble.keys() == {"problem", "spooled"}
    problem = Problem.model_validate(trouble["problem"], strict=True)
    assert problem.model_dump() == trouble["problem"]


def test_rejected_records_are_listed_and_shown(api, settings, topics):  # noqa: ARG001 (they must be there)
    for value in (b"1", b"2", b"3"):
        source = reject(settings, value)

    told = api.get("/v1/rejected", params={"limit": 2}).json()["records"]

    assert [each["offset"] for each in told] == [1, 2]
    assert (told[0]["reason"], told[0]["source"]) == ("bad-topic", source)
    shown = api.get("/v1/rejected/1").json()
    assert (shown["key"], shown["value"]) == ("k", "2")
    assert shown["headers"] == [{"name": "own", "value": "1", "value_base64": None}]
    assert problem_of(api.get("/v1/rejected/3")) == (404, "unknown-message")


def test_messages_are_found_by_key_a_bounded_look_at_a_time(api, wheel, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.api.routes.messages.MAX_READ", 2)
    due = [now_ms + MINUTE_MS + each for each in range(5)]
    sent = [str(wheel.message("orders", at, key=f"k{at % 2}")) for at in due]

    pages, query = [], {"key": f"k{due[1] % 2}"}
    while not pages or query["cursor"]:
        page = api.get("/v1/messages", params=query).json()
        pages.append([each["id"] for each in page["messages"]])
        query["cursor"] = page["cursor"]

    assert pages == [[sent[1]], [sent[3]], []]


def test_the_page_may_run_its_own_scripts_and_no_others(alone):
    for path in ("/", "/dashboard/main.js", "/dashboard/style.css"):
        answer = alone.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "http" not in alone.get("/").text
    assert problem_of(alone.get("/dashboard/../server.py")) == (404, "not-found")
