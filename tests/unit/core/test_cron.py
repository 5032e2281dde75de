"""When recurring messages are due: in zones, over changes of their clocks, and after an outage."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core import headers as H
from duetime.core.cron import GRACE_MS, LEAD_MS, Cron, Misfire, Recurrence
from duetime.core.errors import InvalidMessage
from duetime.core.messages import LATEST_MS

MINUTE = 60_000
HOUR = 60 * MINUTE

BERLIN = "Europe/Berlin"

#: Its clocks are set forth and back by half an hour.
LORD_HOWE = "Australia/Lord_Howe"

#: Its clocks are set forth at midnight, and back to 23:00 at the next one.
SANTIAGO = "America/Santiago"


def at(text, zone="UTC", fold=0):
    when = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)
    return int(when.timestamp() * 1_000)


#: In autumn of Lord Howe, the half hour before 2.
HALF_HOUR_TWICE = ["05 01:30+11", "05 01:45+11", "05 01:30+10", "05 01:45+10", "06 01:00+10"]


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
def test_run_in_the_missing_hour_comes_once_at_its_end(expression, runs):
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


@pytest.mark.parametrize("expression", ["*/20 * * * *", "*/20 1-3 * * *"])
def test_run_every_few_minutes_comes_through_both_hours(expression):
    both = [
        "25 02:00+02",
        "25 02:20+02",
        "25 02:40+02",
        "25 02:00+01",
        "25 02:20+01",
        "25 02:40+01",
    ]
    runs = ["25 01:40+02", *both, "25 03:00+01"]
    assert local(Cron(expression, BERLIN), "2026-10-25T01:30", len(runs)) == runs


@pytest.mark.parametrize(
    ("expression", "start", "runs"),
    [
        ("15 2 * * *", "2026-10-03T12:00", ["04 02:30+11", "05 02:15+11"]),
        ("0,15,45 2 * * *", "2026-10-03T12:00", ["04 02:30+11", "04 02:45+11", "05 02:00+11"]),
        ("*/15 * * * *", "2026-10-04T01:30", ["04 01:45+10", "04 02:30+11", "04 02:45+11"]),
        # What comes every hour is not at a fixed time: it is not put off to the half.
        ("@hourly", "2026-10-04T00:30", ["04 01:00+10", "04 03:00+11", "04 04:00+11"]),
        ("45 1 * * *", "2026-04-04T12:00", ["05 01:45+11", "06 01:45+10"]),
        ("*/15 1 * * *", "2026-04-05T01:20", HALF_HOUR_TWICE),
        ("@hourly", "2026-04-05T00:30", ["05 01:00+11", "05 02:00+10", "05 03:00+10"]),
        # As contracts.md tells: cronsim leaves these out.
        ("7 */2 * * *", "2026-04-05T00:00", ["05 00:07+11", "05 04:07+10"]),
        ("*/20 2 * * *", "2026-04-05T00:00", ["05 02:40+10", "06 02:00+10"]),
    ],
)
def test_clocks_may_be_set_by_half_an_hour(expression, start, runs):
    assert local(Cron(expression, LORD_HOWE), start, len(runs)) == runs


@pytest.mark.parametrize(
    ("expression", "start", "runs"),
    [
        ("@daily", "2026-09-04T12:00", ["05 00:00-04", "06 01:00-03", "07 00:00-03"]),
        ("30 0 * * *", "2026-09-05T12:00", ["06 01:00-03", "07 00:30-03"]),
        ("@hourly", "2026-09-05T22:30", ["05 23:00-04", "06 01:00-03", "06 02:00-03"]),
        ("@daily", "2026-04-03T12:00", ["04 00:00-03", "05 00:00-04", "06 00:00-04"]),
        ("30 23 * * *", "2026-04-03T12:00", ["03 23:30-03", "04 23:30-03", "05 23:30-04"]),
        ("@hourly", "2026-04-04T22:30", ["04 23:00-03", "04 23:00-04", "05 00:00-04"]),
    ],
)
def test_clocks_may_be_set_at_midnight(expression, start, runs):
    assert local(Cron(expression, SANTIAGO), start, len(runs)) == runs


def test_start_in_the_second_of_two_hours_misses_the_first():
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
    "expression", ["", "* * * *", "* * * * * *", "60 * * * *", "0 0 32 2 *", "@reboot", "a b c d e"]
)
def test_invalid_cron_expression_is_refused(expression):
    with pytest.raises(InvalidMessage, match="use five fields") as caught:
        Cron(expression)
    assert caught.value.reason == "bad-cron"


@pytest.mark.parametrize("expression", ["0 0 30 2 *", "0 0 31 2,4 *", "0 0 30,31 FEB *"])
def test_a_day_that_no_month_has_is_told_as_such(expression):
    with pytest.raises(InvalidMessage, match="never comes: no month that it names") as caught:
        Cron(expression)
    assert caught.value.reason == "bad-cron"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (H.DUE_CRON, "9" * 5_000 + " * * * *"),
        (H.DUE_CRON, "*" + "\t" * 600_000 + " * * * *"),
        (H.DUE_ZONE, "x" * 501),
        (H.DUE_MISFIRE, "x" * 501),
        (H.DUE_UNTIL, "9" * 501),
    ],
)
def test_too_long_text_is_refused_and_not_repeated_in_the_error(name, text):
    with pytest.raises(InvalidMessage, match=f"{name} is too long") as caught:
        Recurrence.parse({H.DUE_CRON: "@daily", name: text})
    assert caught.value.reason == "bad-cron"
    assert len(caught.value.detail) < 100


def test_every_number_that_cron_counts_one_by_one_is_not_too_long():
    counted = [range(60), range(24), range(1, 32), range(1, 13), range(7)]
    said = " ".join(",".join(map(str, each)) for each in counted)
    assert Cron(said).after(NOON) == NOON + MINUTE


@pytest.mark.parametrize("zone", ["Mars", "", "../etc/passwd", "Europe", "/etc/localtime"])
def test_invalid_time_zone_is_refused(zone):
    with pytest.raises(InvalidMessage, match="is no time zone") as caught:
        Cron("@daily", zone)
    assert caught.value.reason == "bad-zone"


@given(
    st.sampled_from(
        ["30 2 * * *", "@hourly", "@daily", "*/20 1-3 * * *", "0,30 2 25-31 3,10 *", "5 4 * * 0"]
    ),
    st.sampled_from([BERLIN, LORD_HOWE, SANTIAGO]),
    st.integers(at("2026-03-20T00:00"), at("2026-11-10T00:00")),
)
def test_runs_follow_one_another_and_looking_back_finds_the_same(expression, zone, instant_ms):
    cron = Cron(expression, zone)
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
def test_misfire_policy_decides_about_missed_runs(misfire, late):
    found = recurrence(misfire=Misfire(misfire)).runs(NOON, NOON + 35 * MINUTE)
    assert found.due_ms == [NOON + each * MINUTE for each in late]
    assert found.next_ms == NOON + 40 * MINUTE


@pytest.mark.parametrize(
    ("cron", "next_ms", "now_ms", "run_ms"),
    [
        # Moved out of the hour that was missing, and found by looking back.
        (
            Cron("30 2 * * *", BERLIN),
            at("2026-03-27T02:30", BERLIN),
            at("2026-03-29T20:00", BERLIN),
            at("2026-03-29T03:00", BERLIN),
        ),
        # The second of two hours has none of its own.
        (
            Cron("30 2 * * *", BERLIN),
            at("2026-10-23T02:30", BERLIN),
            at("2026-10-25T02:45", BERLIN, fold=1),
            at("2026-10-25T02:30", BERLIN),
        ),
        (
            Cron("*/20 * * * *", BERLIN),
            at("2026-10-24T12:00", BERLIN),
            at("2026-10-25T02:10", BERLIN, fold=1),
            at("2026-10-25T02:00", BERLIN, fold=1),
        ),
        (
            Cron("@daily", SANTIAGO),
            at("2026-09-04T00:00", SANTIAGO),
            at("2026-09-06T12:00", SANTIAGO),
            at("2026-09-06T01:00", SANTIAGO),
        ),
    ],
)
def test_the_latest_of_missed_runs_is_found_over_a_change_of_the_clocks(
    cron, next_ms, now_ms, run_ms
):
    assert Recurrence(cron=cron).runs(next_ms, now_ms).due_ms == [run_ms]


@pytest.mark.parametrize("most", [1_000, 7])
def test_many_missed_runs_are_caught_up_with_bit_by_bit(most):
    found = recurrence(misfire=Misfire.ALL).runs(NOON, NOON + 365 * 24 * HOUR, most)
    assert len(found.due_ms) == most
    assert found.next_ms == NOON + most * 10 * MINUTE


def test_once_sends_one_run_for_all_missed_and_just_due_runs():
    found = recurrence(misfire=Misfire.ONCE).runs(NOON, NOON + 30 * MINUTE + GRACE_MS // 2)
    assert found.due_ms == [NOON + 30 * MINUTE]


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
    said = {H.DUE_CRON: "@daily", H.DUE_ZONE: BERLIN, H.DUE_UNTIL: str(NOON), H.DUE_MISFIRE: "skip"}
    assert Recurrence.parse(said) == Recurrence(
        cron=Cron("@daily", BERLIN), until_ms=NOON, misfire=Misfire.SKIP
    )
    assert Recurrence.parse({H.DUE_CRON: "@daily"}) == Recurrence(
        cron=Cron("@daily", "UTC"), until_ms=LATEST_MS, misfire=Misfire.ONCE
    )


@pytest.mark.parametrize(
    ("name", "text"), [(H.DUE_UNTIL, "tomorrow"), (H.DUE_UNTIL, "9" * 19), (H.DUE_MISFIRE, "never")]
)
def test_headers_that_say_nothing_are_refused(name, text):
    with pytest.raises(InvalidMessage, match=name):
        Recurrence.parse({H.DUE_CRON: "@daily", name: text})
