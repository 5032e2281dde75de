"""Answers that come late, or never: each is held where it is, and let go when the test says so."""

from contextlib import contextmanager

import pytest
from playwright.sync_api import expect
from tests.support.api import RunningServer, alike, guarded
from tests.support.page import answer, list_of, live, rows, search, show
from tests.support.topics import dead_letters_of

MINUTE_MS = 60_000

#: What a list has asked for, and what is answered to an earlier question of it, by its table.
LISTS = {
    "rejected": ("v1/rejected", "List the latest", {"records": []}),
    "schedules": ("v1/schedules", "List all", {"schedules": []}),
    "overdue": ("v1/status", "List releases", {"overdue_released": 0, "overdue_releases": []}),
}

REJECTED = {"offset": 7, "at_ms": 1_000, "reason": "bad-topic", "detail": "so", "source": "in/0/7"}
SCHEDULE = {"name": "weekdays", "topic": "reports", "cron": "@daily", "zone": "UTC", "paused": True}
RELEASE = {"at_ms": 1_000, "messages": 3, "from_ms": 0, "to_ms": 1_000}
#: And to the last.
FOUND = {
    "rejected": {"records": [REJECTED]},
    "schedules": {"schedules": [SCHEDULE]},
    "overdue": {"overdue_released": 3, "overdue_releases": [RELEASE]},
}


@contextmanager
def held(page, url):
    """Holds the requests to there in this block; gives them."""
    found = []
    page.route(url, lambda asked: found.append(asked))  # noqa: PLW0108 (it wants one)
    yield found
    page.unroute(url)


def until_held(page, asked):
    """Wait until the page has asked, and the request is held."""
    while not asked:
        page.evaluate("new Promise(requestAnimationFrame)")


@pytest.mark.slow
def test_a_search_that_fails_late_leaves_what_the_present_one_found(look, served, waiting, now_ms):
    waiting.message("present", now_ms + 9 * MINUTE_MS)
    page = live(look(served))
    with held(page, "**/v1/messages?*topic=earlier*") as earlier:
        search(page, topic="earlier")
        until_held(page, earlier)
        search(page, topic="present")
        expect(page.locator("#found")).to_have_text("1 message.")
        with page.expect_event("requestfailed"):
            earlier[0].abort()

    page.evaluate("new Promise(requestAnimationFrame)")
    expect(page.locator("#found")).to_have_text("1 message.")
    expect(rows(page, "messages-table")).to_have_count(1)
    expect(page.locator("#announcement")).to_have_text("")


def test_a_slow_earlier_list_does_not_replace_the_last_one(look, served):
    die = dead_letters_of(served)
    for topic in ("all", "asked"):
        die(topic)
    page = live(look(served))
    with held(page, "**/v1/dead-letters?limit=1000") as everything:
        list_of(page, "Dead letters").click()
        until_held(page, everything)
        page.get_by_label("For topic").fill("asked")
        page.get_by_role("button", name="List", exact=True).click()
        expect(rows(page, "dead-letters-table")).to_have_count(1)
        with page.expect_response("**/v1/dead-letters?limit=1000"):
            everything[0].continue_()

    page.evaluate("new Promise(requestAnimationFrame)")
    expect(page.locator("#dead-letters-found")).to_have_text("1 letter not redriven.")
    page.get_by_role("button", name="Redrive all of these …").click()
    expect(page.locator("#question")).to_contain_text("Redrive dead letter ")


@pytest.mark.slow
def test_a_failed_list_of_dead_letters_hides_the_earlier_one(look, served):
    dead_letters_of(served)("listed")
    page = live(look(served))
    page.get_by_label("For topic").fill("listed")
    page.get_by_role("button", name="List", exact=True).click()
    expect(page.get_by_role("button", name="Redrive all of these …")).to_be_visible()
    with held(page, "**/v1/dead-letters?topic=other*") as asked:
        page.get_by_label("For topic").fill("other")
        page.get_by_role("button", name="List", exact=True).click()
        until_held(page, asked)
        asked[0].abort()
    expect(page.locator("#dead-letters-found")).to_contain_text("does not answer")
    expect(page.locator("#dead-letters-table")).to_be_hidden()
    expect(page.get_by_role("button", name="Redrive all of these …")).to_be_hidden()


@pytest.mark.slow
@pytest.mark.parametrize("table", LISTS)
def test_every_list_shows_what_was_asked_for_last(look, served, table):
    path, button, nothing = LISTS[table]
    page = live(look(served))
    with held(page, f"**/{path}*") as asked:
        for count in (1, 2):
            page.get_by_role("button", name=button).click()
            while len(asked) < count:
                page.evaluate("new Promise(requestAnimationFrame)")
        first, last = asked
        last.fulfill(json=FOUND[table])
        expect(rows(page, f"{table}-table")).to_have_count(1)
        with page.expect_response(f"**/{path}*"):
            first.fulfill(json=nothing)
    page.evaluate("new Promise(requestAnimationFrame)")
    expect(rows(page, f"{table}-table")).to_have_count(1)


def test_a_slow_message_does_not_replace_the_last_one(look, served, waiting, now_ms):
    slow, last = (waiting.message(each, now_ms + 9 * MINUTE_MS) for each in ("slow", "last"))
    page = live(look(served))
    with held(page, f"**/v1/messages/{slow}*") as asked:
        page.get_by_label("Id", exact=True).fill(str(slow))
        page.get_by_role("button", name="Look up").click()
        until_held(page, asked)
        shown = show(page, last)
        expect(shown).to_contain_text(str(last))
        with page.expect_response(f"**/v1/messages/{slow}*"):
            asked[0].continue_()
    page.evaluate("new Promise(requestAnimationFrame)")
    expect(shown).to_contain_text(str(last))


@pytest.mark.slow
def test_an_answer_that_comes_late_leaves_another_message_open(look, served, waiting, now_ms):
    slow, other = (waiting.message(each, now_ms + 9 * MINUTE_MS) for each in ("slow", "other"))
    page = live(look(served, clock=True))
    with held(page, "**/deliver-now") as asked:
        show(page, slow).get_by_role("button", name="Deliver now …").click()
        answer(page, "Deliver it now")
        until_held(page, asked)
        # For as long as it lasts, and not in the dialog that is closed.
        page.clock.run_for(15_000)
        expect(page.locator("#announcement")).to_have_text("A moment …")
        answer(page, "No, go back")
        expect(page.locator("#announcement")).to_be_visible()
        page.keyboard.press("Escape")
        shown = show(page, other)
        expect(shown).to_contain_text(str(other))
        asked[0].fulfill(json={})
        page.clock.run_for(1_000)
        expect(page.locator("#announcement")).to_have_text("It is on its way.")
    expect(shown).to_be_visible()
    expect(shown).to_contain_text(str(other))


@pytest.mark.slow
def test_a_server_that_hangs_is_told_as_lost_before_it_has_begun_to_answer(look, served, tmp_path):
    running = RunningServer(alike(served, tmp_path))
    page = live(look(running.settings, clock=True))
    with held(page, "**/v1/events") as asked:
        page.reload()
        until_held(page, asked)
        expect(page.locator("#connection")).to_have_text("Connecting …")
        page.clock.fast_forward(9_000)
        expect(page.locator("#connection")).to_contain_text("The connection is lost")
    running.stop()


def test_a_request_that_is_never_answered_is_given_up(look, served):
    page = live(look(served, clock=True))
    with held(page, "**/v1/messages?*") as asked:
        search(page, topic="hangs")
        until_held(page, asked)
        page.clock.fast_forward(61_000)
        expect(page.locator("#found")).to_contain_text("does not answer")


@pytest.mark.slow
def test_a_token_may_be_looked_for_longer_than_any_request(look, served, tmp_path):
    token = "0123456789abcdef"  # noqa: S105 (of this test alone)
    running = RunningServer(guarded(served, token, tmp_path))
    page = look(running.settings, clock=True)
    asked = page.get_by_role("dialog", name="A token is needed")
    expect(asked).to_be_visible()
    page.clock.fast_forward(300_000)
    expect(page.locator("#connection")).to_have_text("Connecting …")
    # One that cannot be sent is not kept, or nothing would ever be asked again.
    asked.get_by_label("Token").fill("0123456789abcdef€")
    page.keyboard.press("Enter")
    expect(asked).to_contain_text("signs of ASCII")
    asked.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    live(page)
    running.stop()
