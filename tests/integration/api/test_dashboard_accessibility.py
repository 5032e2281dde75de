"""All of the dashboard has a name, can be read and fits, by the checks of accessible.js."""

import pytest
from playwright.sync_api import expect
from tests.support import SUPPORT
from tests.support.api import RunningServer, alike, guarded
from tests.support.leading import leading
from tests.support.page import answer, list_of, live, note, reject, search, show
from tests.support.topics import dead_letters_of

MINUTE_MS = 60_000

CHECK = (SUPPORT / "accessible.js").read_text(encoding="utf-8")

NARROW, WIDE = ({"width": width, "height": 740} for width in (360, 1200))

TOKEN = "0123456789abcdef"  # noqa: S105 (of this test alone)


@pytest.fixture(params=[("light", NARROW), ("light", WIDE), ("dark", NARROW), ("dark", WIDE)])
def seen(look, request):
    """Opens a page in each of the ways."""
    colours, viewport = request.param
    return lambda settings: look(settings, color_scheme=colours, viewport=viewport)


def check(page):
    assert page.evaluate(CHECK) == []


@pytest.mark.slow
def test_all_that_is_listed_is_named_and_readable_and_fits(seen, served, waiting, now_ms):
    waiting.message("named", now_ms + 5 * MINUTE_MS)
    dead_letters_of(served)("named")
    reject(served)
    note(served, cron="0 9 * * 1-5", zone="Europe/Berlin")
    page = live(seen(served))
    check(page)

    search(page, topic="named")
    list_of(page, "Dead letters").click()
    list_of(page, "Rejected").click()
    page.get_by_role("button", name="List all").click()
    with leading(
        served, overdue_released=3, overdue_releases=[(now_ms, 3, now_ms - MINUTE_MS, now_ms)]
    ):
        expect(page.locator(".tile").first).to_contain_text("for")
        list_of(page, "Overdue releases").click()
        for table in ("messages", "dead-letters", "rejected", "schedules", "overdue"):
            expect(page.locator(f"#{table}-table tbody tr").first).to_be_visible()
    check(page)


@pytest.mark.slow
def test_each_dialog_is_named_and_readable_and_fits(seen, served, waiting, now_ms):
    identity = waiting.message("asked", now_ms + 5 * MINUTE_MS)
    dead_letters_of(served)("asked")
    reject(served)
    page = live(seen(served))

    shown = show(page, identity)
    expect(shown).to_be_visible()
    check(page)
    for asking in ("Deliver now …", "Cancel it …", "Reschedule …"):
        shown.get_by_role("button", name=asking).click()
        check(page)
        if asking == "Reschedule …":
            answer(page, "Reschedule")
            expect(page.locator("#question-wrong")).to_have_text("Fill in one of the two.")
            check(page)
        answer(page, "No, go back")
    page.keyboard.press("Escape")
    for name in ("Dead letters", "Rejected"):
        list_of(page, name).click()
        table = name.replace(" ", "-").lower()
        page.locator(f"#{table}-table tbody").get_by_role("button").first.click()
        expect(page.locator("#detail")).to_be_visible()
        check(page)
        if name == "Dead letters":
            page.locator("#detail").get_by_role("button", name="Redrive …").click()
            check(page)
            answer(page, "No, go back")
        page.keyboard.press("Escape")


@pytest.mark.slow
def test_what_asks_for_a_token_is_named_and_readable_and_fits(seen, served, tmp_path):
    running = RunningServer(guarded(served, TOKEN, tmp_path))
    page = seen(running.settings)
    asked = page.get_by_role("dialog", name="A token is needed")
    expect(asked).to_be_visible()
    check(page)
    asked.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(asked).to_contain_text("does not know this token")
    check(page)
    running.stop()


@pytest.mark.slow
def test_a_lost_connection_is_readable(seen, served, tmp_path):
    running = RunningServer(alike(served, tmp_path))
    page = live(seen(running.settings))
    running.stop()
    expect(page.locator("#connection")).to_contain_text("The connection is lost")
    check(page)
