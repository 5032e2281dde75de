"""Messages by HTTP, on a real broker."""

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.support.api import failed, problem_of
from tests.support.topics import TRACE, taken_in

from duetime.core.clock import format_instant
from duetime.core.messages import MessageId
from duetime.kafka.connection import librdkafka_properties

MINUTE_MS = 60_000


def test_a_message_arrives_in_the_intake_with_all_its_parts(api, settings):
    message = {
        "topic": "orders",
        "value": "größe",
        "key": "k",
        "headers": {"a": "1", "none": None} | {name: text.decode() for name, text in TRACE},
        "at": "2020-01-01T00:00:00Z",
        "id": "order-17",
        "partition": 2,
    }

    answer = api.post("/v1/messages", json=message)

    assert answer.status_code == 201
    identity = MessageId(due_ms=1_577_836_800_000, unique="order-17")
    assert answer.json() == {"id": str(identity), "due": "2020-01-01T00:00:00.000Z"}
    (record,) = taken_in(settings, 1)
    assert (record.key(), record.value()) == (b"k", "größe".encode())
    assert record.headers() == [
        ("due-topic", b"orders"),
        ("due-at-ms", b"1577836800000"),
        ("due-id", b"order-17"),
        ("due-partition", b"2"),
        ("a", b"1"),
        ("none", None),
        *TRACE,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "payload"),
    [
        ({"value": "text"}, b"text"),
        ({"value": {"b": [1, 2.5, None], "a": "ö"}}, '{"b":[1,2.5,null],"a":"ö"}'.encode()),
        ({"value": None}, None),
        ({"value": False}, b"false"),
        ({"value_base64": "/wA="}, b"\xff\x00"),
    ],
)
def test_a_payload_is_text_json_or_base64(api, settings, parts, payload):
    assert api.post("/v1/messages", json={"topic": "t", "in": "1m", **parts}).status_code == 201
    assert taken_in(settings, 1)[0].value() == payload


def test_a_batch_is_taken_whole_in_order(api, settings):
    batch = [{"topic": "t", "in": "1m", "id": f"m{each}"} for each in range(100)]

    told = api.post("/v1/messages", json=batch).json()["messages"]

    assert [MessageId.parse(each["id"]).unique for each in told] == [each["id"] for each in batch]
    assert len(taken_in(settings, 100)) == 100


@pytest.mark.slow
def test_of_a_batch_with_a_bad_message_nothing_is_taken(api, settings):
    batch = [{"topic": "t", "in": "1m"}, {"topic": "t"}, {"topic": "bad topic", "in": "1s"}]

    answer = api.post("/v1/messages", json=batch)

    assert problem_of(answer) == (422, "no-due-time")
    assert [(each["where"], each["reason"]) for each in answer.json()["errors"]] == [
        ("messages[1]", "no-due-time"),
        ("messages[2]", "bad-topic"),
    ]
    api.post("/v1/messages", json={"topic": "t", "in": "1m", "value": "only this"})
    assert [each.value() for each in taken_in(settings, 1)] == [b"only this"]


def test_a_message_that_waits_is_shown_with_all_its_parts(api, wheel, now_ms):
    parts = {"key": b"\xff", "value": "v", "headers": {"a": "1"}, "partition": 3}
    identity = wheel.message("orders", now_ms + MINUTE_MS, **parts)

    told = api.get(f"/v1/messages/{identity}").json()

    assert told["id"] == str(identity)
    assert (told["topic"], told["partition"], told["cancelled"]) == ("orders", 3, False)
    assert (told["key"], told["key_base64"], told["value"]) == (None, "/w==", "v")
    assert told["headers"] == [{"name": "a", "value": "1", "value_base64": None}]


def test_pages_give_every_message_once_by_due_time(api, wheel, now_ms):
    due = [now_ms + MINUTE_MS + each // 3 for each in range(10)]
    sent = [str(wheel.message("orders", each)) for each in due]
    wheel.message("others", due[0])

    pages, cursor = [], None
    while not pages or cursor:
        query = {"topic": "orders", "limit": 4} | ({"cursor": cursor} if cursor else {})
        page = api.get("/v1/messages", params=query).json()
        pages.append([each["id"] for each in page["messages"]])
        cursor = page["cursor"]

    assert [len(each) for each in pages] == [4, 4, 2]
    assert [each for page in pages for each in page] == sent


def test_a_page_goes_on_where_the_last_message_is_gone(api, wheel, now_ms):
    due_ms = now_ms + MINUTE_MS
    sent = [str(wheel.message("orders", due_ms + each)) for each in (0, 1, 1, 2)]
    cursor = str(MessageId(due_ms=due_ms + 1, unique="gone"))

    page = api.get("/v1/messages", params={"cursor": cursor}).json()

    assert [each["id"] for each in page["messages"]] == sent[1:]


def test_a_page_passes_over_nothing_that_is_cascaded_meanwhile(api, wheel, settings, now_ms):
    due_ms = now_ms + 3 * MINUTE_MS
    early = wheel.message("orders", due_ms, unique="early", level=2)
    wheel.message("orders", due_ms - 1, unique="before", level=1)
    late = wheel.message("orders", due_ms, unique="late", level=1)
    query = {"from": format_instant(due_ms), "limit": 1}
    first = api.get("/v1/messages", params=query).json()
    wheel.message("orders", due_ms, unique="early", level=1)
    empty_wheel(settings, levels=[2])

    second = api.get("/v1/messages", params=query | {"cursor": first["cursor"]}).json()

    shown = [each["id"] for page in (first, second) for each in page["messages"]]
    assert shown == [str(early), str(late)]


def test_what_waits_is_counted_by_slot(api, wheel, now_ms):
    identity = wheel.message("orders", now_ms + 10_000)

    told = api.get("/v1/pending").json()

    assert told["pending"] == 1
    (slot,) = told["slots"]
    assert slot["from_ms"] <= identity.due_ms < slot["to_ms"]


def test_what_waits_is_counted_between_two_instants(api, wheel, settings, now_ms):
    due = [now_ms + each for each in (10_000, 40_000, 10 * MINUTE_MS)]
    slots = []
    for count, due_ms in enumerate(due, 1):
        for _ in range(count):
            wheel.message("orders", due_ms)
        (slot,) = pending(api, due_ms, due_ms + 1)["slots"]
        assert slot["from_ms"] <= due_ms < slot["to_ms"]
        assert slot["count"] == count
        slots.append(slot)

    assert pending(api, None, due[2] + 1) == {"pending": 6, "slots": slots}
    assert pending(api, due[0] + settings.wheel_tick_ms, None) == {"pending": 5, "slots": slots[1:]}
    # The end of the range is not in it, and the end of a slot not in the slot.
    assert pending(api, slots[0]["to_ms"], slots[1]["from_ms"]) == {"pending": 0, "slots": []}


def pending(api, from_ms, to_ms):
    bounds = {"from": from_ms, "to": to_ms}
    query = {name: format_instant(ms) for name, ms in bounds.items() if ms is not None}
    return api.get("/v1/pending", params=query).json()


def test_a_cancel_has_a_definite_answer(api, wheel, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.client.cancellation.ARRIVAL_MS", 200)
    waiting = wheel.message("orders", now_ms + MINUTE_MS)
    wheel.cancel(waiting)
    gone = MessageId(due_ms=now_ms - MINUTE_MS, unique="gone")
    nobody = MessageId(due_ms=now_ms + MINUTE_MS, unique="nobody")

    assert api.delete(f"/v1/messages/{waiting}").status_code == 204
    assert problem_of(api.delete(f"/v1/messages/{gone}")) == (409, "too-late")
    assert problem_of(api.delete(f"/v1/messages/{nobody}")) == (404, "unknown-message")
    assert problem_of(api.delete("/v1/messages/order-17")) == (422, "bad-id")


def empty_wheel(settings, levels=None):
    """As it is once its slots were settled, on all levels or on some."""
    admin = AdminClient(librdkafka_properties(settings))
    slots = [
        TopicPartition(f"{settings.namespace}.wheel.{level}", each, OFFSET_END)
        for level in levels or range(settings.wheel_levels)
        for each in range(settings.wheel.ring)
    ]
    for freed in admin.delete_records(slots).values():
        freed.result()


def test_what_cannot_be_rescheduled_is_refused_and_nothing_is_changed(api, wheel, settings, now_ms):
    identity = wheel.message("orders", now_ms + MINUTE_MS)
    nobody = MessageId(due_ms=now_ms + MINUTE_MS, unique="nobody")

    def refused(which, due):
        return problem_of(api.post(f"/v1/messages/{which}/reschedule", json=due))

    assert refused(identity, {"in": "365d"}) == (422, "delay-too-long")
    assert refused(nobody, {"in": "30m"}) == (404, "unknown-message")
    assert api.get(f"/v1/messages/{identity}").json()["cancelled"] is False
    api.post("/v1/messages", json={"topic": "t", "in": "1m", "value": "only this"})
    assert [each.value() for each in taken_in(settings, 1)] == [b"only this"]


def test_a_message_is_rescheduled_or_delivered_now_under_a_new_id(api, wheel, settings, now_ms):
    later = wheel.message("orders", now_ms + MINUTE_MS, unique="later")
    now = wheel.message("orders", now_ms + MINUTE_MS, unique="now")

    told = api.post(f"/v1/messages/{later}/reschedule", json={"in": "30m"}).json()
    assert MessageId.parse(told["id"]).unique == "later~1"
    told = api.post(f"/v1/messages/{now}/deliver-now").json()
    assert MessageId.parse(told["id"]).due_ms - now_ms < MINUTE_MS

    assert {dict(each.headers())["due-id"] for each in taken_in(settings, 2)} == {
        b"later~1",
        b"now~1",
    }


def test_of_two_that_reschedule_one_message_one_is_done(api, wheel, settings, now_ms):
    """Nobody takes in the first here: its cancel is not in the slot when the second asks."""
    identity = wheel.message("orders", now_ms + MINUTE_MS, unique="m")
    too_far = api.post(f"/v1/messages/{identity}/reschedule", json={"in": "365d"})
    assert problem_of(too_far) == (422, "delay-too-long")
    told = api.post(f"/v1/messages/{identity}/reschedule", json={"in": "30m"}).json()
    assert MessageId.parse(told["id"]).unique == "m~1"
    for again in ("reschedule", "deliver-now"):
        answer = api.post(f"/v1/messages/{identity}/{again}", json={"in": "20m"})
        assert problem_of(answer) == (404, "unknown-message")
    assert [dict(each.headers())["due-id"] for each in taken_in(settings, 1)] == [b"m~1"]


def test_status_health_and_metrics_are_answered(api):
    assert api.get("/healthz").status_code == 200
    assert api.get("/readyz").status_code == 200
    assert api.get("/v1/status").json() == {
        "leader": None,
        "since_ms": None,
        "standbys": [],
        "waiting": 0,
        "late": 0,
        "lag_ms": 0,
        "overdue_released": None,
        "overdue_releases": [],
        "queries": {},
    }
    assert "duetime_api_request_seconds_bucket" in api.get("/metrics").text


def test_where_there_is_nothing_a_problem_says_so(api):
    assert problem_of(api.get("/v1/nothing")) == (404, "not-found")
    assert problem_of(api.put("/v1/messages")) == (405, "method-not-allowed")


def test_what_failed_is_listed_by_its_next_attempt_page_by_page(api, wheel, now_ms):
    at = [now_ms + MINUTE_MS + each for each in range(4)]
    expected = [str(wheel.message("orders", at[0])), str(failed(wheel, "orders", at[1]))]
    expected += [str(failed(wheel, "orders", at[2])), str(wheel.message("orders", at[3]))]

    pages, query = [], {"limit": 2}
    while not pages or query["cursor"]:
        page = api.get("/v1/messages", params=query).json()
        pages += [[each["id"] for each in page["messages"]]]
        query["cursor"] = page["cursor"]

    assert pages == [expected[:2], expected[2:]]
    (first, second) = api.get("/v1/messages", params={"failed": True}).json()["messages"]
    assert [first["id"], second["id"]] == expected[1:3]
    assert (first["due_at_ms"], first["attempts"]) == (at[1], 3)
    assert first["failed_ms"] == at[1] - 120_000 + 5
    path = f"/v1/messages/{expected[1]}"
    shown = api.get(path, params={"retry_ms": first["due_at_ms"]}).json()
    assert (shown["value"], shown["attempts"]) == ("foreign", 3)
    assert problem_of(api.get(path, params={"retry_ms": at[2]})) == (404, "unknown-message")
