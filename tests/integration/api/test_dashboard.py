"""The dashboard in a real Chromium, over a real API and broker."""

import httpx
import pytest
from playwright.sync_api import expect
from tests.support.api import RunningServer, alike, guarded
from tests.support.page import NAME, answer, events, live, local, reject, search, show, tile
from tests.support.topics import dead_letters_of

from duetime.core.messages import MessageId

MINUTE_MS = 60_000

SECRET = "0123456789abcdef-secret"  # noqa: S105 (of this test alone)


@pytest.mark.slow
def test_an_empty_system_says_so_and_what_comes_is_seen(look, settings, wheel, now_ms, tmp_path):
    running = RunningServer(alike(settings, tmp_path))
    page = live(look(running.settings))

    expect(tile(page, "Leader")).to_have_text("none")
    for name in ("Pending", "Late", "Rejected", "Failed attempts", "Dead letters", "Spooled"):
        expect(tile(page, name)).to_have_text("0")
    expect(page.locator("#pending-readout")).to_contain_text("0 records are pending")
    search(page)
    expect(page.locator("#found")).to_have_text("0 messages.")
    page.get_by_role("button", name="List them: Dead letters").click()
    expect(page.locator("#dead-letters-found")).to_contain_text("0 letters")
    page.get_by_role("button", name="List them: Rejected").click()
    expect(page.locator("#rejected-found")).to_have_text("There are none.")
    wheel.message("orders", now_ms + MINUTE_MS)
    expect(tile(page, "Pending")).to_have_text("1")
    running.stop()


@pytest.mark.slow
def test_messages_are_found_by_topic_key_and_id_and_shown_as_text(look, served, waiting, now_ms):
    evil = "<img src=x onerror=alert(1)>"
    found = waiting.message("found", now_ms + MINUTE_MS, key="mine", value=evil)
    waiting.message("found", now_ms + MINUTE_MS, key="other")
    page = live(look(served))

    search(page, topic="found")
    expect(page.locator("#messages-table tbody tr")).to_have_count(2)
    search(page, topic="", key="mine")
    page.locator("#messages-table").get_by_role("button", name=str(found)).click()
    shown = page.get_by_role("dialog", name="Message")
    expect(shown).to_contain_text(evil)
    expect(shown.locator("img")).to_have_count(0)
    page.keyboard.press("Escape")
    show(page, MessageId(due_ms=now_ms + MINUTE_MS, unique="nobody"))
    expect(page.locator("#announcement")).to_contain_text("no message")


def test_a_message_is_cancelled_after_a_confirmation(look, served, waiting, now_ms, monkeypatch):
    monkeypatch.setattr("duetime.client.cancellation.ARRIVAL_MS", 200)
    identity = waiting.message("cancelled", now_ms + MINUTE_MS)
    page = live(look(served))

    show(page, identity).get_by_role("button", name="Cancel it …").click()
    answer(page, "No, go back")
    expect(page.locator("#question")).to_be_hidden()
    waiting.cancel(identity)
    page.get_by_role("button", name="Cancel it …").click()
    answer(page, "Cancel the message")

    expect(page.locator("#announcement")).to_have_text("Cancelled: it will not be delivered.")
    expect(show(page, identity)).to_contain_text("it will not be delivered")


def test_a_message_is_delivered_now(look, served, waiting, now_ms):
    page = live(look(served))
    show(page, waiting.message("now", now_ms + MINUTE_MS)).get_by_text("Deliver now").click()
    answer(page, "Deliver it now")
    expect(page.locator("#announcement")).to_have_text("It is on its way.")


@pytest.mark.slow
def test_a_message_is_rescheduled_by_keyboard_alone(look, served, waiting, now_ms):
    identity = waiting.message("keyboard", now_ms + MINUTE_MS)
    page = live(look(served))

    def tab_to(name):
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.locator(":focus")
            if focused.count() and focused.evaluate(NAME) == name:
                return
        pytest.fail(f"{name} is not reached")

    tab_to("Id")
    page.keyboard.type(str(identity))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Message")).to_be_visible()
    tab_to("Reschedule …")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_visible()
    page.keyboard.type("never")
    page.keyboard.press("Enter")
    expect(page.locator("#question-wrong")).to_contain_text("no duration")
    for _ in "never":
        page.keyboard.press("Backspace")
    page.keyboard.type("30m")
    page.keyboard.press("Enter")
    expect(page.locator("#announcement")).to_contain_text(f"{identity.unique}~1")


@pytest.mark.slow
def test_dead_letters_are_shown_and_redriven_after_a_confirmation(look, served):
    die = dead_letters_of(served)
    for topic in ("one", "two", "three"):
        die(topic)
    page = live(look(served))

    page.get_by_role("button", name="List them: Dead letters").click()
    rows = page.locator("#dead-letters-table tbody tr")
    expect(rows).to_have_count(3)
    rows.first.get_by_role("button").click()
    expect(page.get_by_role("dialog", name="Dead letter")).to_contain_text("so it is")
    page.get_by_role("button", name="Close").click()
    rows.first.get_by_role("checkbox").check()
    page.get_by_role("button", name="Redrive the 1 chosen …").click()
    answer(page, "Redrive")
    expect(page.locator("#announcement")).to_have_text("1 of 1 redriven.")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Redrive all of these …").click()
    answer(page, "Redrive")
    expect(page.locator("#dead-letters-found")).to_contain_text("0 letters")


@pytest.mark.slow
def test_rejected_records_are_a_click_away(look, served):
    source = reject(served)
    page = live(look(served))
    page.get_by_role("button", name="List them: Rejected").click()
    page.locator("#rejected-table").get_by_role("button").first.click()
    expect(page.get_by_role("dialog", name="Rejected record")).to_contain_text(source)


@pytest.mark.slow
def test_what_waits_is_drawn_from_a_minute_to_years(look, served, waiting, now_ms):
    due_ms = now_ms + 40 * MINUTE_MS
    waiting.message("drawn", due_ms)
    # The page is shown what was seen a moment ago, perhaps by another test.
    with httpx.Client(base_url=served.api_url) as client, events(client) as received:
        slots = (slot for _, seen in received for slot in seen["pending"]["slots"])
        next(slot for slot in slots if slot["from_ms"] <= due_ms < slot["to_ms"])
    page = live(look(served))

    for zoom in ("minute", "hour", "5 years", "all"):
        page.get_by_role("radio", name=zoom, exact=True).check()
        expect(page.locator("#pending svg")).to_be_visible()
    page.get_by_role("radio", name="day", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="week")).to_be_checked()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("Pending records as a table").click()
    page.locator("#pending-table").get_by_role("button", name="List").last.click()
    expect(page.locator("#messages-table")).to_contain_text("drawn")


def test_a_slot_that_is_wider_than_a_bar_is_spread_and_marked(look, served):
    slots = [
        {"from_ms": 0, "to_ms": 50, "count": 7},
        {"from_ms": 110, "to_ms": 120, "count": 3},
        {"from_ms": 100, "to_ms": 900, "count": 80},
    ]
    call = "slots => import('/dashboard/pending.js').then(bins => bins.bins(slots, 100, 400, 4))"

    found = look(served).evaluate(call, slots)

    assert round(found["beyond"]) == 40
    bars = [(round(each["exact"]), round(each["spread"])) for each in found["bars"]]
    assert bars == [(3, 10), (0, 10), (0, 10), (0, 10)]


@pytest.mark.slow
def test_ten_thousand_topics_are_listed_page_by_page(look, served, waiting, now_ms):
    with waiting.at_once():
        for each in range(10_000):
            waiting.message(f"many-{each}", now_ms + 30 * MINUTE_MS + each)
    page = live(look(served))

    search(page, **{"from": local(page, now_ms + 30 * MINUTE_MS)})
    expect(page.locator("#messages-table tbody tr")).to_have_count(100)
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#messages-table tbody tr")).to_have_count(200)
    search(page, topic="many-9876")
    expect(page.locator("#found")).to_have_text("1 message.")


@pytest.mark.slow
def test_a_lost_connection_is_said_and_found_again(look, served, tmp_path):
    settings = alike(served, tmp_path)
    running = RunningServer(settings)
    page = live(look(settings))
    running.stop()
    expect(page.locator("#connection")).to_contain_text("The connection is lost")
    search(page)
    expect(page.locator("#found")).to_contain_text("does not answer")
    running = RunningServer(settings)
    live(page)
    running.stop()


def test_a_token_is_asked_for_and_kept_in_the_tab_alone(look, served, tmp_path):
    running = RunningServer(guarded(served, SECRET, tmp_path))
    page = look(running.settings)
    asked = page.get_by_role("dialog", name="A token is needed")

    asked.get_by_label("Token").fill("wrong")
    page.keyboard.press("Enter")
    expect(asked).to_contain_text("does not know this token")
    asked.get_by_label("Token").fill(SECRET)
    page.keyboard.press("Enter")
    live(page)
    assert SECRET not in page.content()
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.get_by_role("button", name="Forget the token").click()
    expect(asked).to_be_visible()
    running.stop()


def test_the_page_asks_nobody_but_the_api(served):
    page = httpx.get(served.api_url).text
    assert "//" not in page.replace("<!doctype html>", "")
