"""Every control of the dashboard that test_dashboard.py does not need on its way."""

import re

import pytest
from playwright.sync_api import expect
from tests.support.api import RunningServer, alike, failed, guarded
from tests.support.leading import leading
from tests.support.page import answer, list_of, live, local, note, reject, rows, search, show, tile
from tests.support.topics import dead_letters_of

from duetime.core.messages import MessageId
from duetime.core.records import schedule_command_record

MINUTE_MS = 60_000

ZOOMS = "minute", "10 minutes", "hour", "6 hours", "day", "week", "month", "year", "5 years", "all"


def in_bar(page, number):
    """Where a bar is in the chart of what waits, which has 60 of them behind its scale."""
    width = page.locator("#pending").bounding_box()["width"]
    return {"x": 44 + (number + 0.5) * (width - 44) / 60, "y": 90}


@pytest.mark.slow
def test_the_first_tab_skips_to_the_content(look, served):
    page = live(look(served))
    skip = page.get_by_role("link", name="Skip to the content")
    page.keyboard.press("Tab")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


@pytest.mark.slow
def test_a_bar_says_what_it_has_and_a_click_lists_that(look, served, waiting, now_ms):
    # In the middle of the third bar, however long the page takes to open.
    waiting.message("barred", now_ms + 2 * MINUTE_MS + MINUTE_MS // 2)
    page = live(look(served))
    chart, third = page.locator("#pending"), in_bar(page, 2)

    chart.hover(position=third)
    expect(page.locator("#pending-readout")).to_contain_text("Click to list them.")
    chart.click(position=third)

    expect(page.locator("#messages-table")).to_contain_text("barred")
    expect(page.get_by_label("Topic", exact=True)).to_be_focused()
    assert page.get_by_label("Due from").input_value() > local(page, now_ms)


@pytest.mark.slow
def test_a_bar_that_is_drawn_anew_while_it_is_pressed_is_clicked(look, served):
    page = live(look(served))
    page.locator("#pending").hover(position=in_bar(page, 5))
    drawn = page.locator("#pending svg").element_handle()
    page.mouse.down()
    page.wait_for_function("drawn => !drawn.isConnected", arg=drawn)
    page.mouse.up()
    expect(page.locator("#found")).to_contain_text("message")


def test_each_zoom_is_drawn_and_said(look, served):
    page = live(look(served))
    for zoom in ZOOMS:
        page.get_by_role("radio", name=zoom, exact=True).check()
        said = "at all" if zoom == "all" else f"within the next {zoom}"
        drawn = page.locator("#pending").get_by_role("img")
        expect(drawn).to_have_accessible_name(re.compile(f"records are pending {said}"))


def test_the_table_of_what_waits_is_opened_by_keyboard(look, served, waiting, now_ms):
    waiting.message("tabled", now_ms + 5 * MINUTE_MS)
    page = live(look(served))
    page.get_by_role("radio", name="day", exact=True).check()
    page.get_by_text("Pending records as a table").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#pending-table").get_by_role("row").nth(1)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("region", name="Pending records, as a table")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#messages-table")).to_contain_text("tabled")


@pytest.mark.slow
def test_what_waits_is_a_click_away_and_so_is_what_is_late(look, served, waiting, now_ms):
    # Nobody delivers it.
    late = waiting.message("late", now_ms + 4_000)
    waiting.message("not-late", now_ms + 5 * MINUTE_MS)
    page = live(look(served))
    expect(tile(page, "Late")).not_to_have_text("0")

    list_of(page, "Late").click()
    expect(page.locator("#messages-table")).to_contain_text(str(late))
    expect(page.locator("#messages-table")).not_to_contain_text("not-late")
    list_of(page, "Pending").click()
    expect(page.locator("#messages-table")).to_contain_text("not-late")


def test_what_failed_is_a_click_away_and_shown_without_what_cannot_be_done(
    look, served, waiting, now_ms
):
    identity = failed(waiting, "failing", now_ms + 7 * MINUTE_MS)
    waiting.message("well", now_ms + 7 * MINUTE_MS)
    page = live(look(served))

    list_of(page, "Failed attempts").click()
    expect(page.get_by_label("Failed, to be retried")).to_be_checked()
    expect(rows(page, "messages-table")).to_have_count(1)
    expect(rows(page, "messages-table")).to_contain_text("3 times")
    rows(page, "messages-table").get_by_role("button", name=str(identity)).click()
    shown = page.get_by_role("dialog", name="Message")
    expect(shown).to_contain_text("3 times, first")
    expect(shown.get_by_role("button")).to_have_text(["Cancel it …", "Close"])
    shown.get_by_role("button", name="Close").click()
    expect(shown).to_be_hidden()
    page.get_by_label("Failed, to be retried").uncheck()
    search(page, topic="well")
    expect(rows(page, "messages-table")).to_have_count(1)


@pytest.mark.slow
def test_a_search_ends_before_its_end_and_the_end_of_a_list_is_said(look, served, waiting, now_ms):
    due_ms = now_ms + 40 * MINUTE_MS
    with waiting.at_once():
        for each in range(101):
            waiting.message("paged", due_ms + each)
        waiting.message("paged", due_ms + MINUTE_MS)
    page = live(look(served))
    search(page, topic="paged", to=local(page, due_ms + MINUTE_MS // 2))
    expect(page.locator("#found")).to_have_text("100 messages, and more to search.")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#found")).to_have_text("101 messages.")
    expect(page.get_by_role("button", name="Go on")).to_be_hidden()
    # The keyboard goes on with the first of the new ones.
    expect(rows(page, "messages-table").last.get_by_role("button")).to_be_focused()


@pytest.mark.slow
def test_a_message_is_rescheduled_to_an_instant(look, served, waiting, now_ms):
    identity = waiting.message("instant", now_ms + 9 * MINUTE_MS)
    page = live(look(served))
    search(page, topic="instant")
    rows(page, "messages-table").get_by_role("button").click()
    page.get_by_role("button", name="Reschedule …").click()
    asked = page.get_by_role("dialog", name="Give this message another time")

    answer(page, "Reschedule")
    expect(asked.get_by_role("alert")).to_have_text("Fill in one of the two.")
    asked.get_by_label("Or at, in your time").fill(local(page, now_ms + 30 * MINUTE_MS))
    answer(page, "Reschedule")

    expect(page.locator("#announcement")).to_contain_text(f"{identity.unique}~1")
    expect(page.locator("#announcement")).to_contain_text("It is due in 29 min")
    # What had the keyboard is gone.
    expect(page.locator("#found")).to_have_text("0 messages.")
    expect(page.locator("#found")).to_be_focused()


def test_escape_answers_no_and_gives_the_keyboard_back(look, served, waiting, now_ms):
    page = live(look(served))
    show(page, waiting.message("escape", now_ms + 9 * MINUTE_MS))
    page.get_by_role("button", name="Deliver now …").click()
    expect(page.get_by_role("button", name="No, go back")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#question")).to_be_hidden()
    expect(page.get_by_role("button", name="Deliver now …")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Look up")).to_be_focused()


@pytest.mark.slow
def test_an_answer_that_comes_late_leaves_the_next_question_open(look, served, waiting, now_ms):
    page = live(look(served))
    held = []
    page.route("**/deliver-now", lambda asked: held.append(asked))  # noqa: PLW0108 (it wants one)
    shown = show(page, waiting.message("slow", now_ms + 9 * MINUTE_MS))
    shown.get_by_role("button", name="Deliver now …").click()
    answer(page, "Deliver it now")
    expect(page.locator("#announcement")).to_have_text("A moment …")
    answer(page, "No, go back")
    page.get_by_role("button", name="Cancel it …").click()

    held[0].fulfill(json={})

    expect(page.locator("#announcement")).to_have_text("It is on its way.")
    expect(page.locator("#question")).to_contain_text("Cancel this message?")


def test_dead_letters_are_listed_by_topic_and_reason(look, served):
    die = dead_letters_of(served)
    for topic, reason in (
        ("filtered", "unknown-topic"),
        ("filtered", "expired"),
        ("not", "no-key"),
    ):
        die(topic, reason)
    page = live(look(served))
    listed = rows(page, "dead-letters-table")

    page.get_by_label("For topic").fill("filtered")
    page.get_by_role("button", name="List", exact=True).click()
    expect(listed).to_have_count(2)
    page.get_by_label("Reason").fill("expired")
    page.keyboard.press("Enter")
    expect(listed).to_have_count(1)
    expect(page.locator("#dead-letters-found")).to_have_text("1 letter not redriven.")
    page.get_by_label("Reason").fill("nobody")
    page.keyboard.press("Enter")
    expect(page.locator("#dead-letters-found")).to_contain_text("0 letters")
    expect(page.locator("#dead-letters-table")).to_be_hidden()
    list_of(page, "Dead letters").click()
    expect(page.get_by_label("For topic")).to_have_value("")
    expect(page.locator("#dead-letters-table")).to_contain_text("no-key")


@pytest.mark.slow
def test_a_dead_letter_is_redriven_from_what_is_shown_of_it(look, served):
    dead_letters_of(served)("alone")
    page = live(look(served))
    page.get_by_label("For topic").fill("alone")
    page.get_by_role("button", name="List", exact=True).click()
    choice = rows(page, "dead-letters-table").get_by_role("checkbox")
    choice.check()
    expect(page.get_by_role("button", name="Redrive the 1 chosen …")).to_be_visible()
    choice.uncheck()
    expect(page.get_by_role("button", name="Redrive the")).to_be_hidden()

    rows(page, "dead-letters-table").get_by_role("button").click()
    shown = page.get_by_role("dialog", name="Dead letter")
    shown.get_by_role("button", name="Redrive …").click()
    answer(page, "No, go back")
    shown.get_by_role("button", name="Redrive …").click()
    answer(page, "Redrive")

    expect(page.locator("#announcement")).to_have_text("1 of 1 redriven.")
    expect(shown).to_be_hidden()
    expect(page.locator("#dead-letters-found")).to_contain_text("0 letters")
    expect(page.locator("#dead-letters-found")).to_be_focused()


@pytest.mark.slow
def test_rejected_records_are_listed_by_their_own_button(look, served):
    reject(served)
    page = live(look(served))
    page.get_by_role("button", name="List the latest").click()
    expect(rows(page, "rejected-table").first).to_contain_text("bad-topic")


@pytest.mark.slow
def test_overdue_releases_are_a_click_away_and_what_still_waits_too(
    look, settings, wheel, now_ms, tmp_path
):
    due_ms = now_ms + 20 * MINUTE_MS
    waits, later = (wheel.message("late", due_ms + each) for each in (0, MINUTE_MS))
    running = RunningServer(alike(settings, tmp_path))
    page = live(look(running.settings))
    list_of(page, "Overdue releases").click()
    expect(page.get_by_role("button", name="List releases")).to_be_focused()
    expect(page.locator("#overdue-found")).to_contain_text("not known")

    found = [(now_ms - 9, 7, now_ms - 99, now_ms), (now_ms, 1_234, due_ms - 1_000, due_ms + 1_000)]
    with leading(settings, overdue_released=1_241, overdue_releases=found):
        expect(tile(page, "Overdue releases")).to_have_text("1,241")
        page.keyboard.press("Enter")
        expect(page.locator("#overdue-found")).to_contain_text("1,241 since it leads")
        expect(rows(page, "overdue-table")).to_have_count(2)
        # The latest first.
        expect(rows(page, "overdue-table").first).to_contain_text("1,234")
        page.keyboard.press("Tab")
        expect(page.get_by_role("region", name="Overdue releases found")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#messages-table")).to_contain_text(str(waits))
        expect(page.locator("#messages-table")).not_to_contain_text(str(later))
        expect(page.get_by_label("Topic", exact=True)).to_be_focused()
    with leading(settings, overdue_released=0):
        expect(tile(page, "Overdue releases")).to_have_text("0")
        list_of(page, "Overdue releases").click()
        expect(page.locator("#overdue-found")).to_contain_text("There are none")
        expect(page.locator("#overdue-table")).to_be_hidden()
    running.stop()


def test_an_invalid_id_is_announced(look, served, now_ms):
    page = live(look(served))
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#look-up :invalid")).to_have_count(1)
    show(page, "no id")
    expect(page.locator("#announcement")).to_contain_text("no id")
    show(page, MessageId(due_ms=now_ms - MINUTE_MS, unique="gone"))
    expect(page.locator("#announcement")).to_contain_text("it is delivered")


def test_a_token_is_asked_for_until_there_is_one(look, served, tmp_path):
    running = RunningServer(guarded(served, "0123456789abcdef", tmp_path))
    page = look(running.settings)
    asked = page.get_by_role("dialog", name="A token is needed")
    expect(asked).to_be_visible()
    for _ in range(3):
        page.keyboard.press("Escape")
    expect(asked).to_be_visible()
    asked.get_by_label("Token").fill("0123456789abcdef")
    asked.get_by_role("button", name="Go on").click()
    live(page)
    running.stop()


@pytest.mark.slow
def test_without_kafka_the_page_says_so_and_counts_the_spool(look, alone, monkeypatch):
    monkeypatch.setattr("duetime.kafka.offsets.TIMEOUT_S", 0.2)
    alone.post("/v1/messages", json={"topic": "orders", "in": "1m"})
    page = look(str(alone.base_url))
    expect(page.locator("#connection")).to_have_attribute("data-state", "problem")
    expect(page.locator("#connection")).to_contain_text("is the broker up?")
    expect(tile(page, "Spooled")).to_have_text("1")


def test_a_connection_that_is_silent_is_lost(look, served, tmp_path, monkeypatch):
    running = RunningServer(alike(served, tmp_path))
    # Nothing comes behind the first look.
    monkeypatch.setattr("duetime.api.events.POLL_INTERVAL_S", 60.0)
    page = live(look(running.settings, clock=True))
    page.clock.fast_forward(9_000)
    expect(page.locator("#connection")).to_contain_text("The connection is lost")
    expect(page.locator("#connection")).to_contain_text("The page is of")
    running.stop()


def test_without_scripts_the_page_names_the_commands(look, served):
    page = look(served, java_script_enabled=False)
    expect(page.locator("noscript p")).to_be_visible()


def test_a_schedule_is_paused_resumed_and_stopped_after_a_confirmation(look, served, monkeypatch):
    comes = {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin"}
    becomes = {"pause": comes | {"is_paused": True}, "resume": comes, "stop": {}}

    def record_and_apply(name, operation, settings):
        note(settings, **becomes[operation])
        return schedule_command_record(name, operation, settings)

    monkeypatch.setattr("duetime.client.schedules.schedule_command_record", record_and_apply)
    page = live(look(served))
    line, listed = page.locator("#schedules-found"), rows(page, "schedules-table")
    page.get_by_role("button", name="List all").click()
    expect(line).to_have_text("There are none.")
    note(served, **comes, until="4102444800000")
    page.get_by_role("button", name="List all").click()
    for each in comes.values():
        expect(listed).to_contain_text(each)
    expect(listed.locator("time[datetime='2100-01-01T00:00:00.000Z']")).to_be_visible()

    page.get_by_role("button", name="Pause … weekdays").click()
    answer(page, "No, go back")
    page.get_by_role("button", name="Pause … weekdays").click()
    answer(page, "Pause it")
    expect(page.locator("#announcement")).to_have_text("It is paused.")
    expect(line).to_be_focused()
    expect(listed).to_contain_text("paused")
    page.get_by_role("button", name="Resume … weekdays").click()
    answer(page, "Resume it")
    expect(page.locator("#announcement")).to_have_text("It continues.")
    page.get_by_role("button", name="Stop … weekdays").click()
    answer(page, "Stop it")
    expect(page.locator("#announcement")).to_have_text("It is stopped.")
    expect(line).to_have_text("There are none.")
