"""Bad input is refused with its reason and exit code 2, before connecting."""

import pytest

SEND = ("send", "orders", "--value", "v")
ID = "01a1fe699a54-order-17"

REFUSED = {
    "no due time": ([*SEND], "no due time: add"),
    "two due times": ([*SEND, "--in", "5s", "--at", "2030-01-01T00:00Z"], "omit one"),
    "a bare number": ([*SEND, "--in", "5"], "write a number and a unit"),
    "an unknown unit": ([*SEND, "--in", "5y"], "'y' is no unit of time"),
    "a negative delay": ([*SEND, "--in=-5s"], "is negative"),
    "a time without a zone": ([*SEND, "--at", "2030-01-01T00:00:00"], "no time zone"),
    "a date": ([*SEND, "--at", "2030-01-01"], "no time zone"),
    "no time at all": ([*SEND, "--at", "tomorrow"], "no ISO 8601 time"),
    "past the wheel's end": ([*SEND, "--in", "36500d"], "the wheel ends"),
    "past the calendar's end": ([*SEND, "--in", "99999999999d"], "outside the calendar"),
    "before its beginning": ([*SEND, "--at", "0001-01-01T00:00+14:00"], "outside the calendar"),
    "an illegal topic": (["send", "a/b", "--in", "5s", "--value", "v"], "no topic name"),
    "Kafka's topic": (["send", "__x", "--in", "5s", "--value", "v"], "belongs to Kafka"),
    "duetime's topic": (["send", "duetime.in", "--in", "5s", "--value", "v"], "belongs to Kafka"),
    "an illegal id": ([*SEND, "--in", "5s", "--id", "a b"], "cannot be an id"),
    "a negative partition": ([*SEND, "--in", "5s", "--partition", "-1"], "partition -1"),
    "a partition's name": ([*SEND, "--in", "5s", "--partition", "x"], "--partition"),
    "half a header": ([*SEND, "--in", "5s", "--header", "x"], "write it as name=value"),
    "a nameless header": ([*SEND, "--in", "5s", "--header", "=x"], "write it as name=value"),
    "our own header": ([*SEND, "--in", "5s", "--header", "due-id=x"], "leave it out"),
    "two payloads": ([*SEND, "--in", "5s", "--file", "x"], "omit one"),
    "no such file": (["send", "orders", "--in", "5s", "--file", "x"], "No such file"),
    "a directory": (["send", "orders", "--in", "5s", "--file", "/"], "directory"),
    "no topic": (["send", "--in", "5s"], "Missing argument 'TOPIC': see duetime send --help"),
    "no id to show": (["show", "order-17"], "no message id"),
    "no id to cancel": (["cancel", ""], "no message id"),
    "no id to reschedule": (["reschedule", "x", "--in", "5s"], "no message id"),
    "no new time": (["reschedule", ID], "no due time: add"),
    "a range's zone": (["pending", "--from", "2030-01-01T00:00"], "no time zone"),
    "a range backwards": (
        ["pending", "--from", "2030-01-01T00:00Z", "--to", "2029-01-01T00:00Z"],
        "--from is not before --to",
    ),
    "a list of more than Java can count": (["sql", "select 1", "--limit", 2**31 - 1], "--limit"),
    "more dead letters than there can be": (["dead-letters", "list", "--limit", 10**20], "--limit"),
    "more than can wait": (["pending", "--list", "--limit", 10**20], "--limit"),
    "more than a queue has": (["queue", "peek", "jobs", "--limit", 10**20], "--limit"),
    "a list of nothing": (["pending", "--limit", "0"], "--limit"),
    "a port": (["up", "--port", "65536"], "--port"),
    "two Kafkas": (["up", "--port", "9093", "--kafka", "a:1"], "omit one"),
    "an unknown option": (["topics", "--foo"], "No such option: --foo: see duetime topics --help"),
    "an unknown command": (["launch"], "No such command 'launch': see duetime --help"),
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_its_reason(duetime, arguments, reason):
    outcome = duetime(*arguments)

    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert reason in outcome.err


def test_a_payload_over_the_limit_is_refused(duetime):
    outcome = duetime("send", "orders", "--in", "5s", stdin=b"x" * 1_000_001)

    assert outcome.code == 2
    assert "over max_message_bytes" in outcome.err
