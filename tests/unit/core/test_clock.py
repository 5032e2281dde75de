from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core.clock import (
    UNITS_MS,
    SystemClock,
    duration_ms,
    format_duration,
    format_instant,
    instant_ms,
    parse_duration,
    parse_instant,
)
from duetime.core.errors import InvalidMessage, Reason

zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
aware = st.datetimes(timezones=zones)


def refused(parse, text):
    with pytest.raises(InvalidMessage) as refusal:
        parse(text)
    return refusal.value.reason == Reason.BAD_DUE_TIME


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS_MS)))
def test_a_number_and_a_unit_are_a_duration(amount, unit):
    assert parse_duration(f"{amount}{unit}") == amount * UNITS_MS[unit]


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(sorted(UNITS_MS))), min_size=1))
def test_the_parts_of_a_duration_add_up(parts):
    text = " ".join(f"{amount}{unit}" for amount, unit in parts)
    assert parse_duration(text) == sum(amount * UNITS_MS[unit] for amount, unit in parts)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("250ms", 250),
        ("5s", 5_000),
        ("1h30m", 5_400_000),
        (" 1h 30m ", 5_400_000),
        ("7d", 604_800_000),
        ("0s", 0),
        ("1.5h", 5_400_000),
        ("0.1s", 100),
        # Exactly, not by way of a binary fraction; and never early.
        ("0.29s", 290),
        ("0.0001s", 1),
        ("1.0000000000000000000001ms", 2),
    ],
)
def test_durations_as_people_write_them(text, milliseconds):
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        "-5s",
        " -5s",
        "1h-5m",
        "5",
        "",
        " ",
        "s",
        "5 lightyears",
        "5S",
        "1e5s",
        "+5s",
        "5s, 3m",
        "5s 3",
        "∞s",
        "nans",
        "1.s",
        "0x10s",
        "5s\x00",
    ],
)
def test_invalid_duration_is_refused_and_never_guessed(text):
    assert refused(parse_duration, text)


@given(st.text(max_size=20))
def test_any_text_is_a_duration_of_0_or_more_or_refused(text):
    try:
        duration = parse_duration(text)
    except InvalidMessage:
        assert refused(parse_duration, text)
    else:
        assert duration >= 0


@given(aware)
def test_an_instant_is_rounded_up_to_a_millisecond_and_never_down(instant):
    microseconds = (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert 0 <= instant_ms(instant) * 1_000 - microseconds < 1_000


@given(aware)
def test_an_iso_text_with_a_zone_is_that_instant(instant):
    assert parse_instant(instant.isoformat()) == instant_ms(instant)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-12-24T18:00:00+01:00", 1_798_131_600_000),
        ("2026-12-24 17:00:00.0001Z", 1_798_131_600_001),
    ],
)
def test_instants_as_people_write_them(text, instant):
    assert parse_instant(text) == instant


@pytest.mark.parametrize(
    "text",
    [
        "2026-12-24T18:00:00",
        "2026-12-24",
        "18:00:00+01:00",
        "1798131600000",
        "tomorrow",
        "",
        "2026-02-30T00:00:00Z",
        "2026-12-24T18:00:00 Europe/Berlin",
    ],
)
def test_a_time_without_a_zone_and_what_is_no_time_are_refused(text):
    assert refused(parse_instant, text)


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
def test_a_time_at_the_edge_of_the_calendar_has_an_instant(text):
    assert parse_instant(text) != 0


@given(st.datetimes())
def test_a_naive_datetime_is_refused(naive):
    assert refused(instant_ms, naive)


@given(st.timedeltas())
def test_a_timedelta_is_rounded_up(duration):
    assert timedelta(0) <= timedelta(milliseconds=duration_ms(duration)) - duration
    assert duration_ms(duration) == -(-duration // timedelta(milliseconds=1))


@given(st.integers(0, 253_402_300_799_999))
def test_an_instant_is_read_as_it_was_written(instant):
    assert parse_instant(format_instant(instant)) == instant


@given(st.integers(-(2**70), 2**70))
def test_any_number_can_be_shown_to_a_person(number):
    assert format_instant(number)
    assert format_duration(abs(number))


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0, "0ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (5_400_000, "1h 30m"),
        (90_061_000, "1d 1h"),
        (3_600_500, "1h"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(duration, text):
    assert format_duration(duration) == text


def test_the_clock_of_this_machine_is_in_milliseconds_and_goes_on():
    clock = SystemClock()
    first = clock.now_ms()
    assert first > 1_700_000_000_000
    assert clock.now_ms() >= first
