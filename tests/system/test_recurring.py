"""Messages that come again: each run once, through the whole pipeline."""

import uuid

import httpx
import pytest
from tests.api.conftest import Running, alike
from tests.conftest import eventually
from tests.system.conftest import PATIENCE_S, now_ms

from duetime import asking
from duetime.api.address import url
from duetime.asking import all_series
from duetime.errors import UnknownMessage
from duetime.pipeline.faults import Point, armed
from duetime.recurrence import Recurrence
from duetime.series import read_book

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

MINUTE = 60_000


def define(live, to, name, *, value=b"\x00v", ago=0, **more):
    """A series that began so many minutes ago; what was missed since is made up for."""
    said = {
        "due-topic": to,
        "due-cron": "* * * * *",
        "due-id": name,
        "due-at-ms": now_ms() - ago * MINUTE,
        "due-misfire": "all",
        **{f"due-{key}": text for key, text in more.items()},
    }
    headers = [(key, str(value).encode()) for key, value in said.items()]
    live.send(live.names.native, value, b"\xfek", [*headers, ("h", b"\xff"), ("h", None)])
    live.flush()
    return said["due-at-ms"]


def ask(live, name, operation):
    live.send(live.names.control, None, name, [("due-op", operation)])
    live.flush()


def runs_since(start_ms, count):
    first_ms = -(-start_ms // MINUTE) * MINUTE
    return [first_ms + number * MINUTE for number in range(count)]


def test_runs_come_at_their_minutes_as_they_were_sent(live):
    topic = live.topic(partitions=3)
    start_ms = define(live, topic, "minutely", ago=5, partition=2)
    # The last one is not due yet.
    arrived = live.inbox(topic).take(6)
    assert [each.due_ms for each in arrived] == runs_since(start_ms, 6)
    assert [each.id for each in arrived] == [f"{each.due_ms:012x}-minutely" for each in arrived]
    assert all(each.late_ms >= 0 for each in arrived)
    # It waited in its window.
    assert arrived[-1].late_ms < 2_000
    for each in arrived:
        assert (each.key, each.value, each.partition) == (b"\xfek", b"\x00v", 2)
        assert each.headers[2:] == [("h", b"\xff"), ("h", None)]
    ask(live, "minutely", "stop")
    eventually(lambda: read_book(live.settings).pages["minutely"].now is None)


@pytest.mark.parametrize("point", [Point.RECURRING_NOTED, Point.RECURRING_SENT])
def test_a_batch_that_failed_is_repeated_and_sends_each_run_once(live, point):
    topic, name = live.topic(), f"again.{point}"
    with armed(point) as failed:
        start_ms = define(live, topic, name, ago=5)
        assert failed.wait(PATIENCE_S)
    inbox = live.inbox(topic)
    arrived = inbox.take(5)
    assert sorted(each.due_ms for each in arrived) == runs_since(start_ms, 5)
    # What would come twice has come when something later has.
    define(live, topic, f"{name}.later", ago=1)
    inbox.until(lambda: any(each.id.endswith(".later") for each in inbox.arrived), "a later one")
    ids = [each.id for each in inbox.arrived]
    assert len(ids) == len(set(ids))
    for each in (name, f"{name}.later"):
        ask(live, each, "stop")


def test_a_series_is_paused_goes_on_and_is_stopped_by_its_name(live, sender):
    yearly = Recurrence.of("@yearly", zone="Europe/Berlin", misfire="skip")
    assert sender.produce(live.topic(), "x", id="paused", recurrence=yearly) == "paused"
    sender.flush()
    found = eventually(
        lambda: [each for each in all_series(live.settings) if each.name == "paused"]
    )
    assert found[0].recurrence == yearly
    for _ in range(2):
        assert asking.ask("paused", "pause", live.settings).is_paused
    assert not asking.ask("paused", "resume", live.settings).is_paused
    assert asking.ask("paused", "stop", live.settings) is None
    with pytest.raises(UnknownMessage, match="or it was stopped"):
        asking.ask("paused", "stop", live.settings)


@pytest.fixture
def api(live, tmp_path):
    settings = alike(live.settings, tmp_path)
    running = Running(settings)
    with httpx.Client(base_url=url(settings), timeout=PATIENCE_S) as client:
        yield client
    running.stop()


def test_the_api_schedules_shows_and_stops_series(live, api):
    wanted = {"topic": live.topic(), "cron": "0 9 * * 1-5", "zone": "Europe/Berlin", "id": "report"}
    posted = api.post("/v1/messages", json=wanted)
    assert (posted.status_code, posted.json()["id"]) == (201, "report")
    shown = eventually(lambda: found_in(api.get("/v1/recurring/report")))
    said = (shown["cron"], shown["next"], shown["paused"])
    assert said == ("0 9 * * 1-5", posted.json()["due"], False)
    assert shown in api.get("/v1/recurring").json()["series"]
    paused = api.post("/v1/recurring/report/pause").json()
    assert (paused["paused"], paused["next"]) == (True, None)
    assert api.post("/v1/recurring/report/resume").json() == shown
    assert api.delete("/v1/recurring/report").status_code == 204
    assert api.get("/v1/recurring/report").status_code == 404
    assert api.delete("/v1/recurring/report").json()["reason"] == "unknown-message"


def found_in(response):
    return response.json() if response.status_code == 200 else None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cron": "at noon"}, b"bad-cron"),
        ({"zone": "Mars"}, b"bad-zone"),
        ({"until": "1"}, b"bad-cron"),
        ({"expires-ms": 1}, b"bad-expiry"),
        ({"topic": "no topic"}, b"bad-topic"),
        ({"partition": "x"}, b"bad-partition"),
        ({"id": "x" * 161}, b"bad-id"),
    ],
)
def test_what_cannot_be_a_series_is_rejected_as_it_was_sent(live, wrong, reason):
    inbox, value = live.rejected(), uuid.uuid4().bytes
    define(live, "orders", "wrong", value=value, **wrong)
    found = lambda: [each for each in inbox.arrived if each.value == value]  # noqa: E731 (as above)
    inbox.until(found, "rejected")
    (rejected,) = found()
    assert rejected.by_name["due-error"] == reason
    sent = {"due-cron": "* * * * *"} | {f"due-{name}": str(text) for name, text in wrong.items()}
    assert {(name, text.encode()) for name, text in sent.items()} <= set(rejected.headers)
    assert rejected.headers[-5:-3] == [("h", b"\xff"), ("h", None)]
