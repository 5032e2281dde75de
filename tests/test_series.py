"""What is said of series, and what follows from it: records in their order, nothing else."""

import json

import pytest

from duetime.message import DEFINE, NEXT, PAUSE, RESUME, STOP
from duetime.recurrence import LEAD_MS
from duetime.series import REFUSED, RUN, Book, Page, Said, Series

MINUTE = 60_000
NOW_MS = 1_800_000_000_000 + MINUTE

DAILY = Series(name="nightly", since="1-nightly", topic="orders", cron="*/10 * * * *")


class Talk:
    """Says things of series, and gives what follows."""

    def __init__(self):
        self.book = Book()
        self._batches = []

    def say(self, *said, again=False):
        if not again:
            first = sum(len(each) for each in self._batches)
            self._batches.append([at(first + number) for number, at in enumerate(said)])
        outcomes, pages = self.book.heard(self._batches[-1])
        self.pages = pages
        self.book.note({name: Page.decoded(page.encoded()) for name, page in pages.items()})
        return [(each.kind, each.run_ms) for each in outcomes]

    def say_again(self):
        """As after a crash: the book has what was written of it."""
        return self.say(again=True)


def said(operation, series=DAILY, at_ms=NOW_MS, due_ms=None, next_ms=None):
    return lambda offset: Said(
        offset=offset,
        at_ms=at_ms,
        operation=operation,
        series=series,
        due_ms=at_ms if due_ms is None else due_ms,
        next_ms=next_ms,
    )


def ran(run_ms, series=DAILY):
    return said(NEXT, series, at_ms=run_ms - LEAD_MS, next_ms=run_ms)


@pytest.fixture
def talk():
    return Talk()


FIRST = NOW_MS + 10 * MINUTE - NOW_MS % (10 * MINUTE)
SECOND, THIRD = FIRST + 10 * MINUTE, FIRST + 20 * MINUTE


def test_a_series_waits_for_its_first_run_and_each_run_for_the_next(talk):
    assert talk.say(said(DEFINE)) == [(NEXT, FIRST)]
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (NEXT, SECOND)]
    assert talk.pages == {}


def test_what_is_defined_just_before_a_run_has_that_run(talk):
    assert talk.say(said(DEFINE, at_ms=FIRST - 1)) == [(RUN, FIRST), (NEXT, SECOND)]


def test_what_has_a_start_begins_then(talk):
    assert talk.say(said(DEFINE, due_ms=SECOND, at_ms=SECOND)) == [(RUN, SECOND), (NEXT, THIRD)]


def test_what_has_a_start_comes_next_after_it_and_not_before(talk):
    talk.say(said(DEFINE, due_ms=SECOND + 1))
    series = talk.book.pages["nightly"].now
    assert series.next_ms(NOW_MS) == THIRD
    assert series.next_ms(THIRD + 1) == THIRD + 10 * MINUTE


def test_what_was_written_without_a_start_is_read(talk):
    talk.say(said(DEFINE, due_ms=SECOND))
    written = json.loads(talk.book.pages["nightly"].encoded())
    del written["now"]["start_ms"]
    series = Page.decoded(json.dumps(written).encode()).now
    assert (series.start_ms, series.next_ms(NOW_MS)) == (0, FIRST)


def test_while_it_is_paused_runs_are_left_out(talk):
    talk.say(said(DEFINE))
    assert talk.say(said(PAUSE)) == []
    assert talk.say(ran(FIRST)) == [(NEXT, SECOND)]
    assert talk.say(said(RESUME)) == []
    assert talk.say(ran(SECOND)) == [(RUN, SECOND), (NEXT, THIRD)]


def test_what_is_defined_anew_while_it_is_paused_stays_so(talk):
    talk.say(said(DEFINE))
    talk.say(said(PAUSE))
    again = Series(name="nightly", since="2-nightly", topic="orders", cron=DAILY.cron)
    assert talk.say(said(DEFINE, again, at_ms=FIRST - LEAD_MS - 1)) == [(NEXT, FIRST)]
    assert talk.say(ran(FIRST, again)) == [(NEXT, SECOND)]
    assert talk.say(said(RESUME)) == []
    assert talk.say(ran(SECOND, again)) == [(RUN, SECOND), (NEXT, THIRD)]


def test_what_was_stopped_while_it_was_paused_begins_anew(talk):
    talk.say(said(DEFINE), said(PAUSE), said(STOP))
    assert talk.say(said(DEFINE)) == [(NEXT, FIRST)]
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (NEXT, SECOND)]


def test_what_is_stopped_comes_no_more(talk):
    talk.say(said(DEFINE))
    assert talk.say(said(STOP)) == talk.say(ran(FIRST)) == []
    # Of what is unknown there is nothing to be said.
    assert talk.say(said(PAUSE), said(RESUME), said(STOP)) == []
    assert talk.say(said(DEFINE)) == [(NEXT, FIRST)]


def test_of_two_with_one_name_the_later_one_is_meant(talk):
    other = Series(name="nightly", since="2-nightly", topic="orders", cron="*/20 * * * *")
    talk.say(said(DEFINE))
    (kind, first_ms), *_ = talk.say(said(DEFINE, other))
    assert kind == NEXT
    assert first_ms % (20 * MINUTE) == 0
    assert talk.say(ran(FIRST)) == []


def test_a_run_that_is_on_its_way_is_not_sent_again_by_who_defines_it_anew(talk):
    talk.say(said(DEFINE))
    assert talk.say(ran(FIRST)) == [(RUN, FIRST), (NEXT, SECOND)]
    again = Series(name="nightly", since="2-nightly", topic="orders", cron=DAILY.cron)
    assert talk.say(said(DEFINE, again, at_ms=FIRST - 5_000)) == [(NEXT, SECOND)]


@pytest.mark.parametrize("operation", [PAUSE, STOP])
def test_a_batch_that_is_heard_again_leads_to_the_same(talk, operation):
    talk.say(said(DEFINE))
    first = talk.say(ran(FIRST), said(operation), ran(SECOND))
    assert (RUN, FIRST) in first
    assert (RUN, SECOND) not in first
    assert talk.say_again() == first
    assert talk.say_again() == first


def test_a_definition_that_is_heard_again_leads_to_the_same(talk):
    first = talk.say(said(DEFINE, at_ms=FIRST - 1))
    assert talk.say_again() == first


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"cron": "daily"}, "bad-cron"),
        ({"zone": "Mars"}, "bad-zone"),
        ({"until": "1"}, "bad-cron"),
        ({"misfire": "?"}, "bad-cron"),
    ],
)
def test_what_cannot_be_defined_is_refused_and_changes_nothing(talk, wrong, reason):
    talk.say(said(DEFINE))
    bad = Series(name="nightly", since="2-nightly", topic="orders", **({"cron": "@daily"} | wrong))
    outcomes, pages = talk.book.heard([said(DEFINE, bad)(7)])
    assert [(each.kind, each.offset, each.reason) for each in outcomes] == [(REFUSED, 7, reason)]
    assert pages == {}


def test_what_is_none_of_ours_is_refused(talk):
    nobody = Series(name="", since="", topic="", cron="")
    outcomes, pages = talk.book.heard([said(None, nobody)(3)])
    assert [(each.kind, each.reason) for each in outcomes] == [(REFUSED, "unreadable")]
    assert pages == {}
