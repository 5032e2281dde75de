"""What a running pipeline and its Spark write into their logs: ids, and never a payload."""

import json
import logging
from base64 import b64encode
from contextlib import contextmanager

import pytest
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, now_ms, sources

from duetime.pipeline.faults import Point, armed

pytestmark = [pytest.mark.slow, pytest.mark.hostile]

#: In each payload, key and header's value, and nowhere else.
SENTINEL = b"Tell-Nobody-4711"

#: How it would look in a log: as text, in base64, and as Java and Spark show bytes.
FORMS = (
    SENTINEL.decode(),
    b64encode(SENTINEL).decode().rstrip("="),
    SENTINEL.hex(),
    SENTINEL.hex(" "),
    ", ".join(map(str, SENTINEL)),
)

KEY, VALUE, OWN = SENTINEL + b"-key", SENTINEL + b"-value", ("h", SENTINEL + b"-header")


@contextmanager
def talkative(live):
    """Spark says all that `DUETIME_SPARK_LOG=info` shows."""
    context = live.pipeline.spark.sparkContext
    context.setLogLevel("INFO")
    try:
        yield
    finally:
        context.setLogLevel("ERROR")


def test_neither_payloads_nor_keys_nor_headers_are_in_any_log(live, caplog, capfd):
    caplog.set_level(logging.DEBUG, "duetime")
    dead, rejected = live.inbox(live.names.dead_letter), live.rejected()
    with talkative(live), armed(Point.JOB_SENT) as turned, armed(Point.RETRIES_SENT) as failed:
        delivered = live.inbox(delivered_and_cancelled(live))
        lost = sent(live, live.topic(), "lost", now_ms(), partition="7")
        refuse_some(live)
        assert turned.wait(PATIENCE_S)
        assert failed.wait(PATIENCE_S)
        delivered.take(3)
        dead.until_id(lost)
        refused = lambda: sources(rejected) >= live.sources and has_refused_schedule(rejected)  # noqa: E731 (a view)
        rejected.until(refused, "all that was refused")
        # What goes wrong is told in many words, and what is dead and rejected is counted.
        for told in (
            "release job failed",
            "query failed",
            "dead letters messages",
            "rejected messages",
        ):
            eventually(lambda told=told: told in caplog.text, told)
    written = caplog.text + "".join(capfd.readouterr())
    assert "spark INFO" in written
    assert [each for each in FORMS if each.lower() in written.lower()] == []


def delivered_and_cancelled(live):
    """Messages at once, by the lanes and by the wheel, and one that does not come; their topic."""
    topic = live.topic()
    # The last waits in the wheel, also where taking it in lasts seconds.
    for delay_ms in (0, 1_000, 30_000):
        sent(live, topic, f"after-{delay_ms}", now_ms() + delay_ms)
    gone = sent(live, topic, "gone", now_ms() + 29_000)
    live.send(live.names.control, VALUE, gone, [("due-op", b"cancel"), OWN])
    live.flush()
    return topic


def sent(live, topic, unique, due_ms, **more):
    """A message with the sentinel in all its parts; its id."""
    said = {"due-topic": topic, "due-at-ms": str(due_ms), "due-id": unique}
    said |= {f"due-{name}": text for name, text in more.items()}
    said["due-callback"] = f"http://localhost/{SENTINEL.decode()}"
    live.send(live.names.native, VALUE, KEY, [*said.items(), OWN])
    return f"{due_ms:012x}-{unique}"


def refuse_some(live):
    """Records that no contract takes, each with the sentinel where it is wrong."""
    names, text = live.names, SENTINEL.decode()
    live.send(names.native, VALUE, KEY, [("due-cron", SENTINEL), ("due-topic", b"orders"), OWN])
    live.flush()
    # It is refused where schedules are kept, and comes from there.
    live.sources.clear()
    wrong = {"due-topic": f"{text} no topic", "due-at-ms": "17"}
    live.send(names.native, VALUE, KEY, list(wrong.items()))
    live.send(names.native, VALUE, KEY, [("due-topic", b"orders"), ("due-in-ms", SENTINEL)])
    live.send(names.airtel, json.dumps({"topic": text, "postTime": text, "value": text}), KEY)
    live.send(names.countdown, VALUE, KEY, [OWN])
    live.send(names.scheduler, VALUE, KEY, [("scheduler-epoch", SENTINEL), OWN])
    live.send(names.control, VALUE, KEY, [("due-op", SENTINEL)])
    live.flush()


def has_refused_schedule(rejected):
    return any(
        (each.key, each.by_name["due-error"]) == (KEY, b"bad-cron") for each in rejected.arrived
    )
