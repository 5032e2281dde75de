"""Messages that come again: each run once, through the whole pipeline."""

import json
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tests.api.conftest import Running, alike
from tests.conftest import TRACE, eventually
from tests.system.conftest import PATIENCE_S, now_ms

from duetime import asking
from duetime.api.address import url
from duetime.asking import all_series, find_series, find_series_soon
from duetime.cli import main
from duetime.clock import format_instant, instant_ms
from duetime.errors import UnknownMessage
from duetime.message import DUE_SERIES
from duetime.pipeline.faults import Point, armed
from duetime.recurrence import LEAD_MS, Recurrence
from duetime.series import read_book
from duetime.stores.reader import WheelReader

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

MINUTE = 60_000

#: What senders give their series.
OWN = [("h", b"\xff"), ("h", None), *TRACE]


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
    live.send(live.names.native, value, b"\xfek", [*headers, *OWN])
    live.flush()
    return said["due-at-ms"]


def ask(live, name, operation):
    live.send(live.names.control, None, name, [("due-op", operation)])
    live.flush()


def runs_since(start_ms, count):
    first_ms = -(-start_ms // MINUTE) * MINUTE
    return [first_ms + number * MINUTE for number in range(count)]


def every_minute(live, to, name, *, ago, for_ms=0, **more):
    """A series that began so many minutes ago and is over in so many ms; the ids of its runs."""
    until_ms = now_ms() + for_ms
    start_ms = define(live, to, name, ago=ago, until=until_ms, **more)
    count = until_ms // MINUTE - (start_ms - 1) // MINUTE
    return {f"{each:012x}-{name}" for each in runs_since(start_ms, count)}


def of_each_policy(live, to, first_ms, *, ago=0):
    """Series of two runs, a minute apart, that are to be missed, and a third half an hour later.

    Returns their names, the ids of the runs that are made up for, and when the third is due.
    """
    runs_ms = [first_ms, first_ms + MINUTE, first_ms + 30 * MINUTE]
    minutes = ",".join(str(each // MINUTE % 60) for each in runs_ms)
    made_up_for = {"skip": [], "once": runs_ms[1:2], "all": runs_ms[:2]}
    ids = set()
    for policy, come_ms in made_up_for.items():
        name = f"{policy}.{to}"
        define(live, to, name, ago=ago, cron=f"{minutes} * * * *", misfire=policy)
        ids |= {f"{each:012x}-{name}" for each in come_ms}
    return [f"{policy}.{to}" for policy in made_up_for], ids, runs_ms[2]


def wait_for_runs_at(live, names, due_ms):
    """Wait until each of the series waits for its run that is due then."""

    def found():
        nexts = [next_of(live, name) for name in names]
        return [each and each.id.due_ms + LEAD_MS for each in nexts]

    eventually(lambda: found() == [due_ms] * len(names), found, PATIENCE_S)


def test_runs_come_at_their_minutes_as_they_were_sent_and_none_of_a_series_that_is_paused(live):
    topic = live.topic(partitions=3)
    run_ms = paused_before_its_first_run(live, "paused.early")
    start_ms = define(live, topic, "minutely", ago=5, partition=2)
    # The last one is not due yet.
    arrived = live.inbox(topic).take(6)
    assert [each.due_ms for each in arrived] == runs_since(start_ms, 6)
    assert [each.id for each in arrived] == [f"{each.due_ms:012x}-minutely" for each in arrived]
    assert all(each.late_ms >= 0 for each in arrived)
    # It waited in its window, and came with no later run.
    assert arrived[-1].late_ms < MINUTE / 4
    for each in arrived:
        assert (each.key, each.value, each.partition) == (b"\xfek", b"\x00v", 2)
        assert each.headers[2:] == OWN
    ask(live, "minutely", "stop")
    eventually(lambda: read_book(live.settings).find("minutely") is None)
    # It goes on to its next run before this one is due: that would wait by then, and does not.
    wait_for_runs_at(live, ["paused.early"], run_ms + MINUTE)
    with closing(WheelReader(live.settings)) as reader:
        waiting = {str(each.id) for each in reader.messages(now_ms())}
    assert f"{run_ms:012x}-paused.early" not in waiting
    assert not asking.ask(
        find_series("paused.early", live.settings), "resume", live.settings
    ).is_paused
    ask(live, "paused.early", "stop")


def paused_before_its_first_run(live, name):
    """A series that is paused some seconds before its first run is on its way; when that is due."""
    start_ms = define(live, live.topic(), name, **{"at-ms": now_ms() + 25_000})
    eventually(lambda: read_book(live.settings).find(name))
    assert asking.ask(find_series(name, live.settings), "pause", live.settings).is_paused
    (run_ms,) = runs_since(start_ms, 1)
    return run_ms


def test_a_series_that_begins_later_is_known_at_once_and_may_be_stopped_before(live, sender):
    name, begins = "begins.later", datetime.now(UTC) + timedelta(minutes=30)
    each_minute = Recurrence.of("* * * * *")
    sender.produce(live.topic(), "x", id=name, at=begins, recurrence=each_minute)
    sender.flush()
    eventually(lambda: read_book(live.settings).find(name))
    series = find_series(name, live.settings)
    first_ms = each_minute.first(instant_ms(begins))
    assert series.next_ms(now_ms()) == first_ms
    wait_for_runs_at(live, [name], first_ms)
    assert asking.ask(series, "stop", live.settings) is None
    assert name not in {each.name for each in all_series(live.settings)}


def test_what_is_missed_before_a_series_is_known_is_made_up_for_as_its_policy_says(live, sender):
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


@pytest.mark.parametrize("point", [Point.RECURRING_NOTED, Point.RECURRING_SENT])
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
    monkeypatch.setattr(asking, "KNOWN_S", PATIENCE_S)
    monkeypatch.setattr(asking, "HEARD_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_a_series_is_paused_goes_on_and_is_stopped_by_its_name(live, sender):
    yearly = Recurrence.of("@yearly", zone="Europe/Berlin", misfire="skip")
    assert sender.produce(live.topic(), "x", id="paused", recurrence=yearly) == "paused"
    sender.flush()
    # It is not known yet.
    series = find_series_soon("paused", live.settings)
    assert series.recurrence == yearly
    for _ in range(2):
        assert asking.ask(series, "pause", live.settings).is_paused
    assert not asking.ask(series, "resume", live.settings).is_paused
    assert asking.ask(series, "stop", live.settings) is None
    with pytest.raises(UnknownMessage, match="or it was stopped"):
        find_series("paused", live.settings)


@pytest.fixture
def duetime(live, capsys, monkeypatch):
    monkeypatch.setenv("DUETIME_BOOTSTRAP", live.settings.bootstrap)
    monkeypatch.setenv("DUETIME_NAMESPACE", live.settings.namespace)

    def run(*arguments):
        code = main(["recurring", *arguments])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.mark.usefixtures("patient")
def test_the_command_lists_shows_pauses_resumes_and_stops_series(live, sender, duetime):
    name, topic = "by.command", live.topic()
    weekly = Recurrence.of("0 9 * * 1", zone="Europe/Berlin", misfire="skip")
    sender.produce(topic, "x", id=name, recurrence=weekly)
    sender.flush()
    eventually(lambda: read_book(live.settings).find(name))
    next_ms = weekly.first(now_ms() + LEAD_MS)
    told = {"name": name, "topic": topic, "cron": "0 9 * * 1", "zone": "Europe/Berlin"}
    told |= {"misfire": "skip", "is_paused": False, "next_ms": next_ms}

    def listed():
        code, out = duetime("list", "--json")
        assert code == 0
        return [each for each in json.loads(out) if each["name"] == name]

    (found,) = listed()
    assert told.items() <= found.items()
    assert {"ended_ms", "replaced", "resumed_ms", "resumed_at"}.isdisjoint(found)
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
    running = Running(settings)
    with httpx.Client(base_url=url(settings), timeout=PATIENCE_S) as client:
        yield client
    running.stop()


def test_the_api_schedules_shows_and_stops_series(live, api):
    wanted = {"topic": live.topic(), "cron": "0 9 * * 1-5", "zone": "Europe/Berlin", "id": "report"}
    posted = api.post("/v1/messages", json=wanted)
    assert (posted.status_code, posted.json()["id"]) == (201, "report")
    shown = eventually(lambda: found_in(api.get("/v1/recurring/report")))
    said = (shown["cron"], shown["next"], shown["until"], shown["paused"])
    assert said == ("0 9 * * 1-5", posted.json()["due"], None, False)
    assert shown in api.get("/v1/recurring").json()["series"]
    paused = api.post("/v1/recurring/report/pause").json()
    assert (paused["paused"], paused["next"]) == (True, None)
    assert api.post("/v1/recurring/report/resume").json() == shown
    assert api.delete("/v1/recurring/report").status_code == 204
    assert api.get("/v1/recurring/report").status_code == 404
    assert api.delete("/v1/recurring/report").json()["reason"] == "unknown-message"


def test_what_a_series_waits_as_is_no_message_to_be_listed_or_cancelled(live, api):
    name = f"kept-{uuid.uuid4().hex[:8]}"
    api.post("/v1/messages", json={"topic": live.topic(), "cron": "@yearly", "id": name})
    series = eventually(lambda: found_in(api.get(f"/v1/recurring/{name}")))
    waits = eventually(lambda: next_of(live, name))

    listed = api.get("/v1/messages", params={"limit": 1_000}).json()["messages"]
    assert not [each for each in listed if "@series" in each["id"]]
    assert waits.topic == live.names.recurring
    refused = api.delete(f"/v1/messages/{waits.id}")
    assert (refused.status_code, refused.json()["reason"]) == (422, "bad-id")
    assert next_of(live, name)
    assert api.get(f"/v1/recurring/{name}").json() == series
    assert api.delete(f"/v1/recurring/{name}").status_code == 204


def next_of(live, name):
    with closing(WheelReader(live.settings)) as reader:
        waiting = list(reader.messages(now_ms(), topic=live.names.recurring))
    own = DUE_SERIES, name.encode()
    return next((each for each in waiting if own in each.headers), None)


def found_in(response):
    return response.json() if response.status_code == 200 else None


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
def test_what_cannot_be_a_series_is_rejected_as_it_was_sent(live, wrong, reason):
    inbox, value = live.rejected(), uuid.uuid4().bytes
    define(live, "orders", "wrong", value=value, **wrong)
    found = lambda: [each for each in inbox.arrived if each.value == value]  # noqa: E731 (as above)
    inbox.until(found, "rejected")
    (rejected,) = found()
    assert rejected.by_name["due-error"] == reason
    sent = {"due-cron": "* * * * *"} | {f"due-{name}": str(text) for name, text in wrong.items()}
    assert {(name, text.encode()) for name, text in sent.items()} <= set(rejected.headers)
    assert rejected.headers[-3 - len(OWN) : -3] == OWN
