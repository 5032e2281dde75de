"""When recurring messages are due: in zones, over changes of their clocks, and after an outage."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.errors import InvalidMessage
from duetime.message import DUE_CRON, DUE_MISFIRE, DUE_UNTIL, DUE_ZONE, LATEST_MS
from duetime.recurrence import GRACE_MS, LEAD_MS, Cron, Misfire, Recurrence

MINUTE = 60_000
HOUR = 60 * MINUTE

BERLIN = "Europe/Berlin"


def at(text, zone="UTC", fold=0):
    when = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)
    return int(when.timestamp() * 1_000)


def local(cron, start, count):
    """The next runs, as the clocks of the zone show them."""
    found, instant_ms = [], at(start, cron.zone)
    for _ in range(count):
        instant_ms = cron.after(instant_ms)
        run = datetime.fromtimestamp(instant_ms / 1_000, ZoneInfo(cron.zone))
        found.append(run.strftime("%d %H:%M%z")[:-2])
    return found


@pytest.mark.parametrize(
    ("expression", "runs"),
    [
        ("30 2 * * *", ["29 03:00+02", "30 02:30+02"]),
        ("0,30 2 * * *", ["29 03:00+02", "30 02:00+02"]),
        ("0 3 * * *", ["29 03:00+02", "30 03:00+02"]),
        ("@hourly", ["29 00:00+01", "29 01:00+01", "29 03:00+02"]),
        ("*/30 1-3 * * *", ["29 01:00+01", "29 01:30+01", "29 03:00+02"]),
    ],
)
def test_what_is_in_the_hour_that_is_missing_comes_at_its_end_once(expression, runs):
    assert local(Cron(expression, BERLIN), "2026-03-28T23:00", len(runs)) == runs


@pytest.mark.parametrize(
    ("expression", "runs"),
    [
        ("30 2 * * *", ["25 02:30+02", "26 02:30+01"]),
        ("0 2,3 * * *", ["25 02:00+02", "25 03:00+01", "26 02:00+01"]),
        ("@hourly", ["25 00:00+02", "25 01:00+02", "25 02:00+02", "25 02:00+01", "25 03:00+01"]),
    ],
)
def test_in_the_hour_that_comes_twice_a_fixed_time_comes_once(expression, runs):
    assert local(Cron(expression, BERLIN), "2026-10-24T23:00", len(runs)) == runs


def test_what_begins_in_the_second_of_two_hours_has_missed_the_first():
    cron = Cron("50 2 * * *", BERLIN)
    assert cron.after(at("2026-10-25T02:45", BERLIN, fold=1)) == at("2026-10-26T02:50", BERLIN)


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        ("@yearly", "2027-01-01T00:00"),
        ("@annually", "2027-01-01T00:00"),
        ("@monthly", "2026-12-01T00:00"),
        ("@weekly", "2026-11-29T00:00"),
        ("@daily", "2026-11-24T00:00"),
        ("@midnight", "2026-11-24T00:00"),
        ("@hourly", "2026-11-23T13:00"),
        ("0 9 * * MON-FRI", "2026-11-24T09:00"),
        ("0 0 29 2 *", "2028-02-29T00:00"),
        ("*/7 * * * *", "2026-11-23T12:35"),
        ("0 0 13 * 5", "2026-11-27T00:00"),
    ],
)
def test_five_fields_and_their_short_names_are_as_cron_has_them(expression, first):
    assert Cron(expression).after(at("2026-11-23T12:30")) == at(first)


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "* * * * * *", "60 * * * *", "0 0 31 2 *", "@reboot", "a b c d e"]
)
def test_what_is_no_cron_expression_is_refused(expression):
    with pytest.raises(InvalidMessage, match="use five fields") as caught:
        Cron(expression)
    assert caught.value.reason == "bad-cron"


@pytest.mark.parametrize("zone", ["Mars", "", "../etc/passwd", "Europe", "/etc/localtime"])
def test_what_is_no_time_zone_is_refused(zone):
    with pytest.raises(InvalidMessage, match="is no time zone") as caught:
        Cron("@daily", zone)
    assert caught.value.reason == "bad-zone"


@given(
    st.sampled_from(
        ["30 2 * * *", "@hourly", "*/20 1-3 * * *", "0,30 2 25-31 3,10 *", "5 4 * * 0"]
    ),
    st.integers(at("2026-03-20T00:00"), at("2026-11-10T00:00")),
)
def test_runs_follow_one_another_and_looking_back_finds_the_same(expression, instant_ms):
    cron = Cron(expression, BERLIN)
    first_ms = cron.after(instant_ms)
    second_ms = cron.after(first_ms)
    assert instant_ms < first_ms < second_ms
    # None is between two.
    assert cron.after((first_ms + second_ms) // 2) == second_ms
    for looked_ms in (first_ms, second_ms - 1):
        assert cron.latest(looked_ms) == first_ms


def recurrence(**others):
    return Recurrence(cron=Cron("*/10 * * * *"), **others)


NOON = at("2026-11-23T12:00")


@pytest.mark.parametrize("misfire", list(Misfire))
def test_a_run_is_sent_on_its_way_before_it_is_due_whatever_the_policy(misfire):
    found = recurrence(misfire=misfire).runs(NOON, NOON - LEAD_MS)
    assert (found.due_ms, found.next_ms) == ([NOON], NOON + 10 * MINUTE)
    # Nor is it missed when it is a little late.
    assert recurrence(misfire=misfire).runs(NOON, NOON + GRACE_MS).due_ms == [NOON]


@pytest.mark.parametrize(
    ("misfire", "late"),
    [("skip", []), ("once", [30]), ("all", [0, 10, 20, 30])],
)
def test_what_becomes_of_missed_runs_is_what_the_policy_says(misfire, late):
    found = recurrence(misfire=Misfire(misfire)).runs(NOON, NOON + 35 * MINUTE)
    assert found.due_ms == [NOON + each * MINUTE for each in late]
    assert found.next_ms == NOON + 40 * MINUTE


def test_many_missed_runs_are_caught_up_with_bit_by_bit():
    found = recurrence(misfire=Misfire.ALL).runs(NOON, NOON + 365 * 24 * HOUR)
    assert len(found.due_ms) == 1_000
    assert found.next_ms == NOON + 1_000 * 10 * MINUTE


def test_nothing_comes_after_the_end():
    ends = recurrence(until_ms=NOON + 15 * MINUTE)
    assert ends.runs(NOON, NOON) == ends.runs(NOON, NOON + LEAD_MS)
    assert ends.runs(NOON, NOON).next_ms == NOON + 10 * MINUTE
    last = ends.runs(NOON + 10 * MINUTE, NOON + 10 * MINUTE)
    assert (last.due_ms, last.next_ms) == ([NOON + 10 * MINUTE], None)
    assert ends.first(NOON + 16 * MINUTE) is None
    # Of those that were missed, the last one that should have come.
    assert ends.runs(NOON, NOON + HOUR).due_ms == [NOON + 10 * MINUTE]


def test_headers_say_it():
    said = {DUE_CRON: "@daily", DUE_ZONE: BERLIN, DUE_UNTIL: str(NOON), DUE_MISFIRE: "skip"}
    assert Recurrence.parse(said) == Recurrence(
        cron=Cron("@daily", BERLIN), until_ms=NOON, misfire=Misfire.SKIP
    )
    assert Recurrence.parse({DUE_CRON: "@daily"}) == Recurrence(
        cron=Cron("@daily", "UTC"), until_ms=LATEST_MS, misfire=Misfire.ONCE
    )


@pytest.mark.parametrize(
    ("name", "text"), [(DUE_UNTIL, "tomorrow"), (DUE_UNTIL, "9" * 19), (DUE_MISFIRE, "never")]
)
def test_headers_that_say_nothing_are_refused(name, text):
    with pytest.raises(InvalidMessage, match=name):
        Recurrence.parse({DUE_CRON: "@daily", name: text})
