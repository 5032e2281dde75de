"""The state machine of schedules: commands in log order, and the runs that follow."""

import json
import zoneinfo
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files

import pytest

from duetime.core import cron as cron_rules
from duetime.core import headers as H
from duetime.core import schedules
from duetime.core.cron import LEAD_MS, Misfire
from duetime.core.schedules import (
    REEVALUATION_MS,
    REFUSED,
    RUN,
    WAKE_MS,
    Schedule,
    ScheduleCommand,
    ScheduleEntry,
    ScheduleTable,
    apply_commands,
)

MINUTE = 60_000
NOW_MS = 1_800_000_000_000 + MINUTE

DAILY = Schedule(name="nightly", since="1-nightly", topic="orders", cron="*/10 * * * *")


class Talk:
    """Says things of schedules, and gives what follows."""

    def __init__(self):
        self.book = ScheduleTable()
        self._batches = []

    def say(self, *said, again=False):
        if not again:
            first = sum(len(each) for each in self._batches)
            self._batches.append([at(first + number) for number, at in enumerate(said)])
        self.outcomes, self.pages = apply_commands(self.book, self._batches[-1])
        written = {name: page and page.encoded() for name, page in self.pages.items()}
        self.book.note(
            {name: text and ScheduleEntry.decoded(text) for name, text in written.items()}
        )
        # Of a schedule that waits, the run that it is looked at again for.
        return [
            (each.kind, each.due_ms + LEAD_MS if each.kind == H.NEXT else each.run_ms)
            for each in self.outcomes
        ]

    def say_again(self):
        """As after a crash: the book has what was written of it."""
        return self.say(again=True)

    def say_anew(self, kept):
        """As without a checkpoint: the last records, as many as the topic has yet, in one batch."""
        everything = [each for batch in self._batches for each in batch]
        self._batches.append(everything[-kept:])
        return self.say(again=True)


def said(operation, schedule=DAILY, at_ms=NOW_MS, start_ms=None, next_ms=None):
    return lambda offset: ScheduleCommand(
        offset=offset,
        at_ms=at_ms,
        operation=operation,
        schedule=schedule,
        start_ms=at_ms if start_ms is None else start_ms,
        next_ms=next_ms,
    )


def ran(run_ms, schedule=DAILY):
    return said(H.NEXT, schedule, at_ms=run_ms - LEAD_MS, next_ms=run_ms)


@pytest.fixture
def talk():
    return Talk()


FIRST = NOW_MS + 10 * MINUTE - NOW_MS % (10 * MINUTE)
SECOND, THIRD, FOURTH = (FIRST + each * MINUTE for each in (10, 20, 30))


def test_schedule_waits_for_its_first_run_and_then_the_next(talk):
    assert talk.say(said(H.DEFINE)) == [(H.NEXT, FIRST)]
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (H.NEXT, SECOND)]
    assert talk.pages == {}


def test_schedule_defined_just_before_a_run_has_that_run(talk):
    assert talk.say(said(H.DEFINE, at_ms=FIRST - 1)) == [(RUN, FIRST), (H.NEXT, SECOND)]


def test_schedule_with_a_start_begins_then(talk):
    assert talk.say(said(H.DEFINE, start_ms=SECOND, at_ms=SECOND)) == [
        (RUN, SECOND),
        (H.NEXT, THIRD),
    ]


def test_next_run_is_never_before_the_start(talk):
    assert talk.say(said(H.DEFINE, start_ms=SECOND + 1)) == [(H.NEXT, THIRD)]
    schedule = talk.book.find("nightly")
    assert schedule.next_ms(NOW_MS) == THIRD
    assert schedule.next_ms(THIRD + 1) == THIRD + 10 * MINUTE


def test_next_run_is_the_first_that_is_not_sent(talk):
    """A pause or a resume that is heard by then does not change those."""
    talk.say(said(H.DEFINE))
    schedule = talk.book.find("nightly")
    assert schedule.next_ms(FIRST - LEAD_MS - 1) == FIRST
    assert schedule.next_ms(FIRST - LEAD_MS) == SECOND


def test_schedule_before_its_start_can_be_paused_stopped_and_replaced(talk):
    talk.say(said(H.DEFINE, start_ms=SECOND), said(H.PAUSE))
    assert talk.book.find("nightly").is_paused
    again = replace(DAILY, since="2-nightly")
    assert talk.say(said(H.DEFINE, again, start_ms=THIRD)) == [(H.NEXT, THIRD)]
    assert talk.say(ran(SECOND)) == []
    talk.say(said(H.STOP))
    assert talk.say(ran(THIRD, again)) == []
    assert talk.book.all() == []


def test_entry_without_a_start_is_decoded(talk):
    talk.say(said(H.DEFINE, start_ms=SECOND))
    written = json.loads(talk.book.entries["nightly"].encoded())
    for name in ("start_ms", "ended_ms", "resumed_ms", "resumed_at"):
        del written["now"][name]
    schedule = ScheduleEntry.decoded(json.dumps(written).encode()).now
    assert (schedule.start_ms, schedule.next_ms(NOW_MS)) == (0, FIRST)


def test_runs_are_left_out_during_a_pause(talk):
    talk.say(said(H.DEFINE))
    assert talk.say(said(H.PAUSE)) == []
    assert talk.say(ran(FIRST)) == [(H.NEXT, SECOND)]
    assert talk.say(said(H.RESUME)) == []
    assert talk.say(ran(SECOND)) == [(RUN, SECOND), (H.NEXT, THIRD)]


def test_runs_left_out_by_a_pause_stay_so_when_replayed_without_it(talk):
    talk.say(said(H.DEFINE), said(H.PAUSE))
    again = replace(DAILY, since="2-nightly")
    later = [
        ran(FIRST),
        said(H.DEFINE, again, at_ms=SECOND - LEAD_MS),
        ran(THIRD, again),
        said(H.RESUME, at_ms=THIRD),
        ran(FOURTH, again),
    ]
    for each in later:
        talk.say(each)
    assert (RUN, FOURTH) in talk.say_anew(len(later))
    assert [run_ms for kind, run_ms in talk.say_again() if kind == RUN] == [FOURTH]


@pytest.mark.parametrize("resumed", [(FIRST, 0), (0, 10_000)], ids=["clock behind", "made anew"])
def test_run_after_a_pause_comes_despite_clock_or_offset_resets(talk, resumed):
    resumed_ms, resumed_at = resumed
    since = replace(DAILY, resumed_ms=resumed_ms, resumed_at=resumed_at)
    talk.book.note({"nightly": ScheduleEntry(since)})
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (H.NEXT, SECOND)]


def test_schedule_replaced_while_paused_stays_paused(talk):
    talk.say(said(H.DEFINE))
    talk.say(said(H.PAUSE))
    again = replace(DAILY, since="2-nightly")
    assert talk.say(said(H.DEFINE, again, at_ms=FIRST - LEAD_MS - 1)) == [(H.NEXT, FIRST)]
    assert talk.say(ran(FIRST, again)) == [(H.NEXT, SECOND)]
    assert talk.say(said(H.RESUME)) == []
    assert talk.say(ran(SECOND, again)) == [(RUN, SECOND), (H.NEXT, THIRD)]


def test_schedule_stopped_while_paused_can_be_defined_again(talk):
    talk.say(said(H.DEFINE), said(H.PAUSE), said(H.STOP))
    assert talk.say(said(H.DEFINE)) == [(H.NEXT, FIRST)]
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (H.NEXT, SECOND)]


def test_stopped_schedule_has_no_more_runs(talk):
    talk.say(said(H.DEFINE))
    assert talk.say(said(H.STOP)) == talk.say(ran(FIRST)) == []
    # Of what is unknown there is nothing to be said.
    assert talk.say(said(H.PAUSE), said(H.RESUME), said(H.STOP)) == []
    assert talk.say(said(H.DEFINE)) == [(H.NEXT, FIRST)]


def test_later_definition_of_a_name_replaces_the_earlier(talk):
    other = replace(DAILY, since="2-nightly", cron="*/20 * * * *")
    talk.say(said(H.DEFINE))
    (kind, first_ms), *_ = talk.say(said(H.DEFINE, other))
    assert kind == H.NEXT
    assert first_ms % (20 * MINUTE) == 0
    assert talk.say(ran(FIRST)) == []


def test_replacing_a_schedule_does_not_repeat_a_run_under_way(talk):
    talk.say(said(H.DEFINE))
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (H.NEXT, SECOND)]
    again = replace(DAILY, since="2-nightly")
    assert talk.say(said(H.DEFINE, again, at_ms=FIRST - 5_000)) == [(H.NEXT, SECOND)]


def test_stopping_and_defining_does_not_repeat_a_run_under_way(talk):
    talk.say(said(H.DEFINE))
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (H.NEXT, SECOND)]
    talk.say(said(H.STOP, at_ms=FIRST - 8_000))
    again = replace(DAILY, since="2-nightly")
    assert talk.say(said(H.DEFINE, again, at_ms=FIRST - 3_000)) == [(H.NEXT, SECOND)]


def test_last_run_under_way_is_not_repeated_by_the_next_schedule(talk):
    talk.say(said(H.DEFINE, replace(DAILY, until=str(FIRST))))
    assert talk.say(ran(FIRST)) == [(RUN, FIRST)]
    again = replace(DAILY, since="2-nightly")
    assert talk.say(said(H.DEFINE, again, at_ms=FIRST - 3_000)) == [(H.NEXT, SECOND)]


#: When a schedule is replaced whose first run was missed in an outage.
REPLACED_MS = FIRST + 5 * MINUTE


@pytest.mark.parametrize("misfire", list(Misfire))
def test_a_replaced_schedule_drops_its_missed_runs(talk, misfire):
    was = replace(DAILY, misfire=misfire)
    again = replace(was, since="2-nightly")
    talk.say(said(H.DEFINE, was))
    assert talk.say(said(H.DEFINE, again, at_ms=REPLACED_MS)) == [(H.NEXT, SECOND)]
    late = said(H.NEXT, was, at_ms=REPLACED_MS + 2_000, next_ms=FIRST)
    assert talk.say(late) == talk.say_again() == []
    assert talk.say(ran(SECOND, again)) == [(RUN, SECOND), (H.NEXT, THIRD)]


def test_fields_of_older_versions_are_ignored(talk):
    talk.say(said(H.DEFINE))
    page = talk.book.entries["nightly"]
    written = json.loads(page.encoded())
    written["now"]["replaced"] = [["1-nightly", REPLACED_MS]]
    assert ScheduleEntry.decoded(json.dumps(written).encode()) == page


OTHER = replace(DAILY, name="other", since="1-other")


@pytest.mark.parametrize(
    "end", [said(H.STOP, at_ms=FIRST - LEAD_MS), ran(FIRST)], ids=["stopped", "over"]
)
def test_entry_of_an_ended_schedule_is_deleted_in_a_later_batch(talk, end):
    talk.say(said(H.DEFINE, replace(DAILY, until=str(FIRST))))
    talk.say(end)
    assert talk.book.all() == []
    # Its last run may be on its way.
    talk.say(said(H.DEFINE, OTHER, at_ms=FIRST))
    assert "nightly" in talk.book.entries
    talk.say(said(H.PAUSE, OTHER, at_ms=FIRST + 1))
    assert talk.pages["nightly"] is None
    assert list(talk.book.entries) == ["other"]
    assert talk.say_again() == []


def test_schedule_over_at_once_sends_its_runs_and_is_not_listed(talk):
    over = replace(DAILY, until=str(FIRST))
    assert talk.say(said(H.DEFINE, over, at_ms=FIRST, start_ms=NOW_MS)) == [(RUN, FIRST)]
    assert talk.book.all() == []


def test_schedule_with_an_unknown_zone_is_retried_and_loses_no_run(talk):
    unknown = replace(DAILY, zone="Mars/Olympus")
    talk.book.note({"nightly": ScheduleEntry(unknown)})
    talk.say(ran(FIRST))
    (again,) = talk.outcomes
    assert (again.kind, again.run_ms) == (H.NEXT, FIRST)
    assert (again.reason, again.due_ms) == ("bad-zone", FIRST - LEAD_MS + REEVALUATION_MS)
    assert talk.book.find("nightly").next_ms(NOW_MS) is None
    # On another machine.
    talk.book.note({"nightly": ScheduleEntry(DAILY)})
    assert talk.say(said(H.NEXT, at_ms=again.due_ms, next_ms=FIRST)) == [
        (RUN, FIRST),
        (H.NEXT, SECOND),
    ]


@pytest.fixture
def place(tmp_path):
    """Says how many hours the zone Test/Place is ahead of UTC; `is_seen` as an hour later."""

    def ahead(number, *, is_seen=True):
        rules = files("tzdata.zoneinfo.Etc").joinpath(f"GMT-{number}").read_bytes()
        zone = tmp_path / "Test" / "Place"
        zone.parent.mkdir(exist_ok=True)
        zone.write_bytes(rules)
        if is_seen:
            cron_rules._zone_read.cache_clear()

    zoneinfo.reset_tzpath([tmp_path])
    yield ahead
    zoneinfo.reset_tzpath()
    cron_rules._zone_read.cache_clear()


YEARLY = replace(DAILY, cron="0 9 1 6 *", zone="Test/Place", misfire="skip")

#: Its next run while its zone is an hour ahead of UTC, and so much earlier or later it may be.
YEARLY_MS = int(datetime(2027, 6, 1, 8, tzinfo=UTC).timestamp() * 1_000)
HOUR = 60 * MINUTE


@pytest.mark.parametrize(("ahead", "run_ms"), [(2, YEARLY_MS - HOUR), (0, YEARLY_MS + HOUR)])
def test_run_follows_the_zones_rules_of_its_day(talk, place, ahead, run_ms):
    place(1)
    talk.say(said(H.DEFINE, YEARLY))
    (waits,) = talk.outcomes
    assert waits.due_ms == NOW_MS + WAKE_MS
    place(ahead)
    runs, looks = [], 0
    while not runs:
        assert waits.kind == H.NEXT
        assert waits.due_ms < run_ms
        talk.say(said(H.NEXT, YEARLY, at_ms=waits.due_ms, next_ms=waits.run_ms))
        *runs, waits = talk.outcomes
        looks += 1
    assert [each.run_ms for each in runs] == [run_ms]
    # A look a month, and the last one just before the run.
    assert looks == (run_ms - LEAD_MS - NOW_MS) // WAKE_MS + 1
    assert waits.due_ms == run_ms - LEAD_MS + WAKE_MS


@pytest.mark.parametrize(
    ("ahead", "led_to"),
    [
        # An hour earlier than it is known of: what was missed comes at once.
        (2, [(RUN, YEARLY_MS - HOUR)]),
        (0, []),
        (1, [(RUN, YEARLY_MS)]),
    ],
)
def test_rules_that_change_in_the_last_days_move_the_run(talk, place, ahead, led_to):
    place(1)
    once = replace(YEARLY, misfire="once")
    day_ms = 24 * HOUR
    talk.say(said(H.DEFINE, once, at_ms=YEARLY_MS - day_ms))
    (waits,) = talk.outcomes
    assert waits.due_ms == YEARLY_MS - LEAD_MS
    place(ahead)
    *runs, (_, looked_at_ms) = talk.say(
        said(H.NEXT, once, at_ms=waits.due_ms, next_ms=waits.run_ms)
    )
    assert runs == led_to
    if not runs:
        assert looked_at_ms == YEARLY_MS + HOUR


def test_zone_is_read_once_an_hour(place, monkeypatch):
    place(1)
    cron = cron_rules.Cron("0 9 * * *", "Test/Place")
    before_ms = cron.after(YEARLY_MS)
    place(2, is_seen=False)
    assert cron.after(YEARLY_MS) == before_ms
    # Each look is in another hour than the one before.
    monkeypatch.setattr(cron_rules, "ZONE_CACHE_S", 1e-9)
    assert cron.after(YEARLY_MS) == before_ms - HOUR


def test_catch_up_is_capped_per_batch(talk, monkeypatch):
    monkeypatch.setattr(schedules, "BATCH_RUNS", 1_000)
    count, at_ms = 200, FIRST + 30 * 24 * 60 * MINUTE
    many = [
        replace(DAILY, name=f"n{each}", since=f"{each}", misfire="all") for each in range(count)
    ]
    talk.book.note({each.name: ScheduleEntry(each) for each in many})
    batch = [said(H.NEXT, each, at_ms=at_ms, next_ms=FIRST) for each in many]
    kinds = [kind for kind, _ in talk.say(*batch)]
    assert (kinds.count(RUN), kinds.count(H.NEXT)) == (1_000, count)


@pytest.mark.parametrize("operation", [H.PAUSE, H.STOP])
def test_repeated_batch_leads_to_the_same(talk, operation):
    talk.say(said(H.DEFINE))
    first = talk.say(ran(FIRST), said(operation), ran(SECOND))
    assert (RUN, FIRST) in first
    assert (RUN, SECOND) not in first
    assert talk.say_again() == first
    assert talk.say_again() == first


def test_replay_in_other_batches_leads_to_nothing_new(talk):
    """As where a pipeline has lost its checkpoint: ids tell then what is sent already."""
    again, last = (replace(DAILY, since=f"{number}-nightly") for number in (2, 3))
    each = [
        said(H.DEFINE, at_ms=FIRST - 5_000),
        said(H.NEXT, at_ms=REPLACED_MS, next_ms=SECOND),
        said(H.DEFINE, again, at_ms=REPLACED_MS + 1),
        said(H.PAUSE, at_ms=REPLACED_MS + 2),
        ran(SECOND, again),
        said(H.RESUME, at_ms=SECOND),
        said(H.DEFINE, last, at_ms=SECOND + 1),
        ran(THIRD, last),
    ]
    led_to = {found for one in each for found in talk.say(one)}
    book = dict(talk.book.entries)
    assert set(talk.say(*each)) <= led_to
    now = talk.book.find("nightly")
    assert (now.since, now.is_paused) == (last.since, book["nightly"].now.is_paused)
    assert talk.say(said(H.NEXT, last, at_ms=THIRD, next_ms=THIRD + 10 * MINUTE))


def test_repeated_definition_leads_to_the_same(talk):
    first = talk.say(said(H.DEFINE, at_ms=FIRST - 1))
    assert talk.say_again() == first


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cron": "daily"}, "bad-cron"),
        ({"cron": "9" * 5_000 + " * * * *"}, "bad-cron"),
        ({"zone": "Mars"}, "bad-zone"),
        ({"until": "1"}, "bad-cron"),
        ({"misfire": "?"}, "bad-cron"),
    ],
)
def test_invalid_definition_is_refused_and_changes_nothing(talk, wrong, reason):
    talk.say(said(H.DEFINE))
    bad = Schedule(
        name="nightly", since="2-nightly", topic="orders", **({"cron": "@daily"} | wrong)
    )
    outcomes, pages = apply_commands(talk.book, [said(H.DEFINE, bad)(7)])
    assert [(each.kind, each.offset, each.reason) for each in outcomes] == [(REFUSED, 7, reason)]
    assert pages == {}


def test_foreign_record_is_refused(talk):
    unnamed = Schedule(name="", since="", topic="", cron="")
    outcomes, pages = apply_commands(talk.book, [said(None, unnamed)(3)])
    assert [(each.kind, each.reason) for each in outcomes] == [(REFUSED, "malformed")]
    assert pages == {}
