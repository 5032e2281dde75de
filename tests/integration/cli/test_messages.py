"""send, pending, show, cancel and reschedule on a real broker, whose wheel is filled by hand."""

import json
import subprocess
import sys

import pytest
from confluent_kafka.admin import AdminClient
from tests.support import topics

from duetime.client import producer
from duetime.core import headers as H
from duetime.core.clock import format_instant
from duetime.core.messages import MessageId
from duetime.kafka.connection import librdkafka_properties

pytestmark = pytest.mark.usefixtures("on_broker", "topics")

MINUTE_MS, HOUR_MS = 60_000, 3_600_000


@pytest.fixture
def taken_in(settings):
    """The records of the native intake topic, oldest first."""

    def read(count):
        records = topics.taken_in(settings, count)
        assert len(records) == count
        return records

    return read


def test_a_sent_message_is_in_the_intake_topic_with_all_parts(duetime, taken_in, now_ms):
    outcome = duetime(
        *("send", "orders", "--in", "1h", "--key", "größe", "--value", "v", "--id", "order-17"),
        *("--header", "a=1", "--header", "a==", "--partition", "3"),
    )

    assert (outcome.code, outcome.err) == (0, "")
    identity = MessageId.parse(outcome.out.removesuffix("\n"))
    assert identity.unique == "order-17"
    assert now_ms + HOUR_MS <= identity.due_ms < now_ms + HOUR_MS + MINUTE_MS
    (record,) = taken_in(1)
    assert (record.key(), record.value()) == ("größe".encode(), b"v")
    headers = record.headers()
    assert [each for each in headers if each[0] == "a"] == [("a", b"1"), ("a", b"=")]
    assert dict(headers)[H.DUE_TOPIC] == b"orders"
    assert dict(headers)[H.DUE_PARTITION] == b"3"
    assert dict(headers)[H.DUE_ID] == b"order-17"
    assert dict(headers)[H.DUE_AT_MS] == str(identity.due_ms).encode()


def test_an_unacknowledged_message_is_repeated_by_the_shown_options(duetime, monkeypatch):
    # Kafka has answered, and goes away then.
    gone = {"bootstrap.servers": "127.0.0.1:1", "delivery.timeout.ms": 500}
    with monkeypatch.context() as patch:
        patch.setattr(producer, "producer_properties", lambda _: gone)
        failed = duetime("send", "orders", "--in", "1h", "--value", "v")
        schedule = duetime("send", "orders", "--cron", "@daily", "--value", "v")

    assert (failed.code, failed.out) == (schedule.code, schedule.out) == (1, "")
    # Kafka's client may tell of the connection, too, before and after.
    said, _, options = failed.err.partition("send it again with the same id: ")
    assert schedule.err.rpartition("send it again with the same id: ")[2].startswith("--id ")

    again = duetime("send", "orders", *options.splitlines()[0].split(), "--value", "v")
    assert again.code == 0
    assert again.out.removesuffix("\n") in said


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_payload_is_taken_byte_for_byte(duetime, taken_in, tmp_path, way):
    payload = bytes(range(256)) + b"\n\r\n"
    (tmp_path / "payload").write_bytes(payload)

    if way == "file":
        duetime("send", "orders", "--in", "1m", "--file", tmp_path / "payload")
    else:
        duetime("send", "orders", "--in", "1m", stdin=payload)

    assert taken_in(1)[0].value() == payload


def test_a_topic_is_created_when_a_message_is_sent_to_it(duetime, settings):
    topic = f"orders_of_{settings.namespace}"
    outcome = duetime("send", topic, "--in", "1h", "--value", "v")
    assert outcome.err == ""
    assert topic in AdminClient(librdkafka_properties(settings)).list_topics(timeout=10).topics

    # Kafka refuses `a.b` beside `a_b`.
    outcome = duetime("send", topic.replace("_", "."), "--in", "1h", "--value", "v")
    assert outcome.code == 0
    assert outcome.err.startswith(
        f"note: topic {topic.replace('_', '.')} does not exist: create it"
    )


def test_a_cluster_missing_in_the_settings_is_noted(duetime, monkeypatch):
    monkeypatch.setenv("DUETIME_CLUSTERS", '{"eu": {"bootstrap": "127.0.0.1:1"}}')
    send = ("send", "orders", "--in", "1h", "--value", "v", "--cluster")
    assert duetime(*send, "eu").err == ""
    outcome = duetime(*send, "mars")
    assert outcome.code == 0
    assert outcome.err.startswith("note: no cluster mars in these settings: ")


def test_a_message_due_in_the_past_is_taken(duetime, taken_in):
    outcome = duetime("send", "orders", "--at", "2020-01-01T00:00:00Z", "--value", "v")

    assert outcome.code == 0
    taken_in(1)


def test_an_empty_wheel_has_no_pending_messages(duetime):
    assert duetime("pending").out == "no pending messages\n"
    assert duetime("pending", "--list").out == "no pending messages\n"
    assert json.loads(duetime("pending", "--json").out) == {"pending": 0, "slots": []}


def test_pending_messages_are_counted_with_a_bar_a_distance(duetime, wheel, now_ms):
    for seconds in (30, 31, 32, 1_800):
        wheel.message("orders", now_ms + seconds * 1_000)

    lines = duetime("pending").out.splitlines()

    assert lines[0] == "4 pending records, cancels included"
    assert [line.split()[:3] for line in lines if "under" in line and "█" in line] == [
        ["under", "1m", "3"],
        ["under", "1h", "1"],
    ]


def test_counts_for_programs_are_by_slot(duetime, wheel, now_ms):
    due_ms = wheel.message("orders", now_ms + 10_000).due_ms

    counted = json.loads(duetime("pending", "--json").out)

    assert counted["pending"] == 1
    (slot,) = counted["slots"]
    assert slot["count"] == 1
    assert slot["from_ms"] <= due_ms < slot["to_ms"]


def test_a_range_counts_its_slots_only(duetime, wheel, now_ms):
    wheel.message("orders", now_ms + 10_000)
    wheel.message("orders", now_ms + 14_000)

    until = format_instant(now_ms + 12_000)

    assert json.loads(duetime("pending", "--to", until, "--json").out)["pending"] == 1
    assert json.loads(duetime("pending", "--from", until, "--json").out)["pending"] == 1


@pytest.mark.slow
def test_a_list_shows_everything_but_payloads(duetime, wheel, now_ms):
    late = wheel.message("orders", now_ms + 14_000, key="k2", value="secret")
    early = wheel.message("orders", now_ms + 10_000, key="\x1b[31m", value="secret")
    wheel.message("others", now_ms + 10_000)

    outcome = duetime("pending", "--topic", "orders")

    rows = outcome.out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [str(early), str(late)]
    assert "orders" in rows[0]
    assert "6 B" in rows[0]
    assert "\\x1b[31m" in rows[0]
    assert "secret" not in outcome.out


def test_a_list_for_programs_is_a_line_a_message(duetime, wheel, now_ms):
    identity = wheel.message("orders", now_ms + 10_000, key="k", value="12345", partition=2)

    (line,) = duetime("pending", "--list", "--json").out.splitlines()

    assert json.loads(line) == {
        "id": str(identity),
        "due_at_ms": identity.due_ms,
        "due": format_instant(identity.due_ms),
        "topic": "orders",
        "partition": 2,
        "cluster": None,
        "key": "k",
        "value_bytes": 5,
    }


def test_a_long_list_says_that_there_is_more(duetime, wheel, now_ms):
    for number in range(3):
        wheel.message("orders", now_ms + 10_000 + number)

    assert "the first 2: --limit shows more" in duetime("pending", "--list", "--limit", "2").out
    assert "--limit" not in duetime("pending", "--list", "--limit", "3").out


def test_a_list_for_programs_has_all_unless_it_is_limited(duetime, wheel, now_ms):
    with wheel.at_once():
        for number in range(60):
            wheel.message("orders", now_ms + 10_000 + number, key=b"\xff")

    lines = duetime("pending", "--topic", "orders", "--json").out.splitlines()

    assert {json.loads(line)["key_base64"] for line in lines} == {"/w=="}
    assert len(lines) == 60
    limited = duetime("pending", "--topic", "orders", "--json", "--limit", "7").out
    assert len(limited.splitlines()) == 7


def test_a_pending_message_is_shown_with_all_parts(duetime, wheel, now_ms):
    identity = wheel.message(
        "orders", now_ms + MINUTE_MS, key="k", value="one\ntwo", headers={"a": "1"}, partition=3
    )

    outcome = duetime("show", identity)

    assert outcome.code == 0
    lines = [line.split(maxsplit=1) for line in outcome.out.splitlines()]
    assert ["id", str(identity)] in lines
    assert ["state", "waiting"] in lines
    assert ["topic", "orders"] in lines
    assert ["partition", "3"] in lines
    assert ["header", "a=1"] in lines
    assert "value      one\n           two\n" in outcome.out


def test_a_binary_payload_is_not_shown_on_the_terminal(duetime, wheel, now_ms):
    identity = wheel.message("orders", now_ms + MINUTE_MS, value=b"\xff\x00")

    assert "2 B; --value writes it to stdout" in duetime("show", identity).out


def test_a_payload_comes_out_byte_for_byte(wheel, now_ms):
    payload = bytes(range(256))
    identity = wheel.message("orders", now_ms + MINUTE_MS, value=payload)

    command = [sys.executable, "-m", "duetime", "show", str(identity), "--value"]

    assert subprocess.run(command, check=True, capture_output=True).stdout == payload


def test_a_cancelled_message_is_shown_as_cancelled(duetime, wheel, now_ms):
    identity = wheel.message("orders", now_ms + MINUTE_MS)
    wheel.cancel(identity)

    assert "state  cancelled" in duetime("show", identity).out
    assert duetime("cancel", identity).code == 0


def test_an_id_that_was_never_sent_is_unknown(duetime, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.client.cancellation.ARRIVAL_MS", 200)
    identity = MessageId(due_ms=now_ms + MINUTE_MS, unique="nobody")

    for command in (["show"], ["cancel"], ["reschedule", "--in", "1h"]):
        outcome = duetime(*command, identity)
        assert (outcome.code, outcome.out) == (4, "")


@pytest.mark.slow
def test_a_message_of_the_past_is_too_late(duetime, now_ms):
    identity = MessageId(due_ms=now_ms - MINUTE_MS, unique="gone")

    for command in (["show"], ["cancel"], ["reschedule", "--in", "1h"]):
        outcome = duetime(*command, identity)
        assert (outcome.code, outcome.out) == (3, "")


def test_a_message_about_to_be_sent_is_too_late_to_cancel(duetime, wheel, now_ms):
    identity = wheel.message("orders", now_ms + 1_200)

    outcome = duetime("cancel", identity)

    assert outcome.code == 3
    assert "too late" in outcome.err


@pytest.mark.slow
def test_an_unconfirmed_cancel_is_an_error(duetime, wheel, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.client.cancellation.CONFIRM_MS", 200)
    identity = wheel.message("orders", now_ms + MINUTE_MS)

    outcome = duetime("cancel", identity)

    assert outcome.code == 1
    assert "no pipeline has applied it" in outcome.err


def test_a_rescheduled_message_has_a_new_id(duetime, wheel, now_ms):
    identity = wheel.message("orders", now_ms + MINUTE_MS, unique="order-17", value="v")

    outcome = duetime("reschedule", identity, "--in", "30m")

    assert outcome.code == 0
    assert MessageId.parse(outcome.out.removesuffix("\n")).unique == "order-17~1"
