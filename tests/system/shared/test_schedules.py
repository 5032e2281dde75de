"""Messages that come again: each run once, through the whole pipeline."""

import json
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tests.support.api import RunningServer, alike
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, now_ms
from tests.support.schedules import (
    MINUTE,
    OWN,
    ask,
    define,
    next_of,
    of_each_policy,
    runs_since,
    wait_for_runs_at,
)

from duetime.cli import main
from duetime.client import schedules
from duetime.client.schedules import find_schedule, list_schedules, read_schedule_table
from duetime.core.clock import format_instant, instant_ms
from duetime.core.cron import LEAD_MS, Recurrence
from duetime.core.errors import UnknownMessage
from duetime.pipeline.faults import Point, armed
from duetime.stores.wheel_reader import WheelReader

pytestmark = pytest.mark.timeout(1_200)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_runs_come_at_their_minutes_and_none_of_a_paused_schedule(live):
    topic = live.topic(partitions=3)
    run_ms = paused_before_its_first_run(live, "paused.early")
    start_ms = define(live, topic, "minutely", ago=5, partition=2)
    # The last one is not due yet.
    arrived = live.inbox(topic).take(6)
    assert [each.due_ms for each in arrived] == runs_since(start_ms, 6)
    assert [each.id for each in arrived] == [f"{each.due_ms:012x}-minutely" for each in arrived]
    assert all(each.late_ms >= 0 for each in arrived)
    # It waited in its window, and came with no later run.
    assert arrived[-1].late_ms < MINUTE
    for each in arrived:
        assert (each.key, each.value, each.partition) == (b"\xfek", b"\x00v", 2)
        assert each.headers[2:] == OWN
    ask(live, "minutely", "stop")
    eventually(lambda: read_schedule_table(live.settings).find("minutely") is None)
    # It goes on to its next run before this one is due: that would wait by then, and does not.
    wait_for_runs_at(live, ["paused.early"], run_ms + MINUTE)
    with closing(WheelReader(live.settings)) as reader:
        waiting = {str(each.id) for each in reader.messages(now_ms())}
    assert f"{run_ms:012x}-paused.early" not in waiting
    assert not schedules.resume_schedule("paused.early", live.settings).is_paused
    ask(live, "paused.early", "stop")


def paused_before_its_first_run(live, name):
    """Pause a schedule some seconds before its first run is on its way; return when that is due."""
    start_ms = define(live, live.topic(), name, **{"at-ms": now_ms() + 40_000})
    eventually(lambda: read_schedule_table(live.settings).find(name))
    assert schedules.pause_schedule(name, live.settings).is_paused
    (run_ms,) = runs_since(start_ms, 1)
    return run_ms


@pytest.mark.slow
def test_a_schedule_that_begins_later_is_known_and_may_be_stopped_before(live, sender):
    name, begins = "begins.later", datetime.now(UTC) + timedelta(minutes=30)
    each_minute = Recurrence.of("* * * * *")
    sender.produce(live.topic(), "x", id=name, at=begins, recurrence=each_minute)
    sender.flush()
    eventually(lambda: read_schedule_table(live.settings).find(name))
    schedule = find_schedule(name, live.settings)
    first_ms = each_minute.first(instant_ms(begins))
    assert schedule.next_ms(now_ms()) == first_ms
    wait_for_runs_at(live, [name], first_ms)
    schedules.stop_schedule(name, live.settings)
    assert name not in {each.name for each in list_schedules(live.settings)}


@pytest.mark.slow
def test_runs_missed_before_a_schedule_is_known_follow_its_policy(live, sender):
    topic = live.topic()
    first_ms = (now_ms() // MINUTE - 5) * MINUTE
    names, ids, third_ms = of_each_policy(live, topic, first_ms, ago=6)
    wait_for_runs_at(live, names, third_ms)
    # What should not come has come before this.
    last = sender.produce(topic, "x", in_=timedelta(seconds=1))
    arrived = live.inbox(topic).until_id(last)
    assert sorted(each.id for each in arrived) == sorted({*ids, last})
    for each in names:
        ask(live, each, "stop")


@pytest.mark.slow
@pytest.mark.parametrize("point", [Point.SCHEDULES_NOTED, Point.SCHEDULES_SENT])
def test_a_batch_that_failed_is_repeated_and_sends_each_run_once(live, point):
    topic, name = live.topic(), f"again.{point}"
    with armed(point) as failed:
        start_ms = define(live, topic, name, ago=5)
        assert failed.wait(PATIENCE_S)
    inbox = live.inbox(topic)
    inbox.until(lambda: len(inbox.arrived) >= 5, "what was missed")
    # What would come twice has come when something later has.
    define(live, topic, f"{name}.later", ago=1)
    inbox.until(lambda: any(each.id.endswith(".later") for each in inbox.arrived), "a later one")
    ids = [each.id for each in inbox.arrived]
    assert len(ids) == len(set(ids))
    # The next minute may have begun while the query was down.
    own_ms = sorted(each.due_ms for each in inbox.arrived if each.id.endswith(name))
    assert own_ms == runs_since(start_ms, len(own_ms))
    for each in (name, f"{name}.later"):
        ask(live, each, "stop")


@pytest.fixture
def patient(monkeypatch):
    """How soon the pipeline answers a command on a busy machine is not what is asked."""
    monkeypatch.setattr(schedules, "CONFIRM_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(schedules, "ARRIVAL_TIMEOUT_S", PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_a_schedule_is_paused_goes_on_and_is_stopped_by_its_name(live, sender):
    yearly = Recurrence.of("@yearly", zone="Europe/Berlin", misfire="skip")
    assert sender.produce(live.topic(), "x", id="paused", recurrence=yearly) == "paused"
    sender.flush()
    # It is not known yet.
    schedule = find_schedule("paused", live.settings, timeout_s=PATIENCE_S)
    assert schedule.recurrence == yearly
    for _ in range(2):
        assert schedules.pause_schedule("paused", live.settings).is_paused
    assert not schedules.resume_schedule("paused", live.settings).is_paused
    schedules.stop_schedule("paused", live.settings)
    with pytest.raises(UnknownMessage, match="or it was stopped"):
        find_schedule("paused", live.settings)


@pytest.fixture
def duetime(live, capsys, monkeypatch):
    monkeypatch.setenv("DUETIME_BOOTSTRAP", live.settings.bootstrap)
    monkeypatch.setenv("DUETIME_NAMESPACE", live.settings.namespace)

    def run(*arguments):
        code = main(["schedules", *arguments])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_command_lists_shows_pauses_resumes_and_stops_schedules(live, sender, duetime):
    name, topic = "by.command", live.topic()
    weekly = Recurrence.of("0 9 * * 1", zone="Europe/Berlin", misfire="skip")
    sender.produce(topic, "x", id=name, recurrence=weekly)
    sender.flush()
    eventually(lambda: read_schedule_table(live.settings).find(name))
    next_ms = weekly.first(now_ms() + LEAD_MS)
    told = {"name": name, "topic": topic, "cron": "0 9 * * 1", "zone": "Europe/Berlin"}
    told |= {"misfire": "skip", "is_paused": False, "next_ms": next_ms}

    def listed():
        code, out = duetime("list", "--json")
        assert code == 0
        return [each for each in json.loads(out) if each["name"] == name]

    (found,) = listed()
    assert told.items() <= found.items()
    assert {"ended_ms", "resumed_ms", "resumed_at"}.isdisjoint(found)
    assert duetime("pause", name) == (0, f"paused: {name}\n")
    assert "next     paused" in duetime("show", name)[1]
    assert duetime("resume", name) == (0, f"resumed: {name}\n")
    code, shown = duetime("show", name)
    assert code == 0
    assert "zone     Europe/Berlin" in shown
    assert format_instant(next_ms) in shown
    assert duetime("stop", name) == (0, f"stopped: {name}\n")
    assert listed() == []
    assert "or it was stopped" in duetime("show", name)[1]


@pytest.fixture
def api(live, tmp_path):
    settings = alike(live.settings, tmp_path)
    running = RunningServer(settings)
    with httpx.Client(base_url=settings.api_url, timeout=PATIENCE_S) as client:
        yield client
    running.stop()


@pytest.mark.slow
def test_the_api_schedules_shows_and_stops_schedules(live, api):
    wanted = {"topic": live.topic(), "cron": "0 9 * * 1-5", "zone": "Europe/Berlin", "id": "report"}
    posted = api.post("/v1/messages", json=wanted)
    assert (posted.status_code, posted.json()["id"]) == (201, "report")
    shown = eventually(lambda: found_in(api.get("/v1/schedules/report")))
    said = (shown["cron"], shown["next"], shown["until"], shown["paused"])
    assert said == ("0 9 * * 1-5", posted.json()["due"], None, False)
    assert shown in api.get("/v1/schedules").json()["schedules"]
    paused = api.post("/v1/schedules/report/pause").json()
    assert (paused["paused"], paused["next"]) == (True, None)
    assert api.post("/v1/schedules/report/resume").json() == shown
    assert api.delete("/v1/schedules/report").status_code == 204
    assert api.get("/v1/schedules/report").status_code == 404
    assert api.delete("/v1/schedules/report").json()["reason"] == "unknown-message"


@pytest.mark.slow
def test_what_a_schedule_waits_as_is_no_message_to_be_listed_or_cancelled(live, api):
    name = f"kept-{uuid.uuid4().hex[:8]}"
    api.post("/v1/messages", json={"topic": live.topic(), "cron": "@yearly", "id": name})
    schedule = eventually(lambda: found_in(api.get(f"/v1/schedules/{name}")))
    waits = eventually(lambda: next_of(live, name))

    listed = api.get("/v1/messages", params={"limit": 1_000}).json()["messages"]
    assert not [each for each in listed if "@schedule" in each["id"]]
    assert waits.topic == live.names.schedule_commands
    refused = api.delete(f"/v1/messages/{waits.id}")
    assert (refused.status_code, refused.json()["reason"]) == (422, "bad-id")
    assert next_of(live, name)
    assert api.get(f"/v1/schedules/{name}").json() == schedule
    assert api.delete(f"/v1/schedules/{name}").status_code == 204


def found_in(response):
    return response.json() if response.status_code == 200 else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cron": "at noon"}, b"bad-cron"),
        ({"cron": "9" * 5_000 + " * * * *"}, b"bad-cron"),
        ({"at-ms": "soon"}, b"bad-due-time"),
        ({"zone": "Mars"}, b"bad-zone"),
        ({"until": "1"}, b"bad-cron"),
        ({"expires-ms": 1}, b"bad-expiry"),
        ({"topic": "no topic"}, b"bad-topic"),
        ({"partition": "x"}, b"bad-partition"),
        ({"id": "x" * 161}, b"bad-id"),
    ],
)
def test_what_cannot_be_a_schedule_is_rejected_as_it_was_sent(live, wrong, reason):
    inbox, value = live.rejected(), uuid.uuid4().bytes
    define(live, "orders", "wrong", value=value, **wrong)
    found = lambda: [each for each in inbox.arrived if each.value == value]  # noqa: E731 (as above)
    inbox.until(found, "rejected")
    (rejected,) = found()
    assert rejected.by_name["due-error"] == reason
    sent = {"due-cron": "* * * * *"} | {f"due-{name}": str(text) for name, text in wrong.items()}
    assert {(name, text.encode()) for name, text in sent.items()} <= set(rejected.headers)
    assert rejected.headers[-3 - len(OWN) : -3] == OWN
