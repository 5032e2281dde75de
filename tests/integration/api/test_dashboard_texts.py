"""What the dashboard says where little is known, and to whom a drawing says nothing."""

import json
import re

import pytest
from playwright.sync_api import expect
from pydantic import SecretStr
from tests.support.api import RunningServer, alike
from tests.support.leading import leading
from tests.support.page import events, list_of, live, local, rows, tile, whole
from tests.support.topics import dead_letters_of

from duetime.api.events import DashboardSnapshot, event

MINUTE_MS = 60_000

#: A store that does not answer: nothing listens there.
AWAY = {"store": SecretStr("redis://127.0.0.1:1/0")}


#: Whether an element is in the page still.
THERE = "each => each.isConnected"


@pytest.mark.slow
def test_without_a_leader_the_tiles_of_its_note_say_so(look, settings, topics, tmp_path):
    assert topics
    running = RunningServer(alike(settings, tmp_path))
    page = live(look(running.settings))
    for name in ("Overdue releases", "Queries"):
        expect(whole(page, name)).to_contain_text("no pipeline leads")
    with leading(settings):
        for name in ("Overdue releases", "Queries"):
            expect(whole(page, name)).to_contain_text("the leader does not report it")
    running.stop()


def test_what_is_late_is_listed_without_what_is_not_before_the_first_look(
    look, served, waiting, now_ms
):
    waiting.message("not-late-yet", now_ms + 9 * MINUTE_MS)
    page = look(served)
    page.route("**/v1/events", lambda asked: None)  # noqa: ARG005 (nothing comes)
    page.reload()
    list_of(page, "Late").click()
    assert page.get_by_label("Due before").input_value() < local(page, now_ms + MINUTE_MS)
    expect(page.locator("#found")).to_contain_text("message")
    expect(page.locator("#messages-table")).not_to_contain_text("not-late-yet")


def test_while_the_store_does_not_answer_events_tell_who_leads(serving, settings, topics):
    assert topics
    api = serving(settings.model_copy(update=AWAY))
    with leading(settings, overdue_released=3), events(api) as received:
        name, seen = next(received)
    assert name == "snapshot"
    assert seen["status"]["leader"]
    assert (seen["status"]["overdue_released"], seen["totals"]["dead"]) == (3, 0)
    assert (seen["pending"], seen["status"]["waiting"], seen["status"]["late"]) == (None,) * 3
    assert "Redis" in seen["store_error"]
    assert DashboardSnapshot.model_validate(seen, strict=True).model_dump() == seen


@pytest.mark.slow
def test_while_the_store_does_not_answer_the_page_says_so_and_who_leads(
    look, settings, topics, tmp_path
):
    assert topics
    running = RunningServer(alike(settings.model_copy(update=AWAY), tmp_path))
    page = look(running.settings)
    with leading(settings):
        expect(tile(page, "Leader")).not_to_have_text("none")
        expect(page.locator("#connection")).to_contain_text("Redis")
        expect(tile(page, "Pending")).to_have_text("not known")
        expect(page.locator("#pending-readout")).to_contain_text("the store does not answer")
    running.stop()


LOOK = {
    "at_ms": 1_800_000_000_000,
    "status": {
        "leader": "here:1",
        "since_ms": 1,
        "standbys": [],
        "waiting": 0,
        "late": 0,
        "lag_ms": 0,
        "overdue_released": 0,
        "overdue_releases": [],
        "queries": {},
    },
    "pending": {"pending": 0, "slots": []},
    "store_error": None,
    "totals": dict.fromkeys(("taken_in", "cancels", "released", "rejected", "failed", "dead"), 0),
    "spooled": 0,
}


def looks(page, *changes):
    """Lets the page be told of these, two seconds apart, and of no more."""
    text = ""
    for number, (total, changed) in enumerate(changes):
        at_ms = LOOK["at_ms"] + 2_000 * number
        totals = LOOK["totals"] | {"taken_in": total}
        text += event("snapshot", json.dumps(LOOK | {"at_ms": at_ms, "totals": totals} | changed))
    said = [text]

    def tell(asked):
        # The connection after that one stands, and says nothing.
        if said:
            asked.fulfill(body=said.pop(), content_type="text/event-stream")

    page.route("**/v1/events", tell)
    page.reload()


def test_the_throughput_table_stays_as_it_is_under_pointer_or_keyboard(look, served):
    page = look(served, clock=True)
    looks(page, (10, {}), (30, {}), (50, {}))
    page.get_by_text("Throughput as a table").click()
    # From 10 to 30 in two seconds, and so on.
    expect(rows(page, "throughput-table")).to_have_text([re.compile(r":\d\d100$")] * 2)

    first = rows(page, "throughput-table").first.element_handle()
    module = "import('/dashboard/throughput.js')"
    call = f"snapshot => {module}.then(throughput => throughput.showThroughput(snapshot))"
    page.locator("#throughput-table").hover()
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 9_000})
    assert first.evaluate(THERE)
    page.mouse.move(0, 0)
    page.locator("#throughput-table").focus()
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 10_000})
    assert first.evaluate(THERE)
    page.locator("#main").focus()
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 11_000})
    assert not first.evaluate(THERE)
    expect(rows(page, "throughput-table")).to_have_count(5)


def test_a_table_without_a_change_is_not_drawn_again(look, served):
    page = live(look(served))
    page.get_by_text("Throughput as a table").click()
    draw = """rows => import('/dashboard/charts.js').then(({ ChartTable }) => {
        globals.table ??= new ChartTable("throughput-table", "T", [{ head: "H", cell: String }]);
        globals.table.show(rows);
    })"""
    page.evaluate("globals = {}")
    page.evaluate(draw, [17])
    first = rows(page, "throughput-table").first.element_handle()
    page.evaluate(draw, [17])
    assert first.evaluate(THERE)


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_choices_and_keys_are_visible_with_forced_colours(look, served, colours):
    page = live(look(served, forced_colors="active", color_scheme=colours))
    ground = "each => getComputedStyle(each).backgroundColor"
    behind = page.locator("section").first.evaluate(ground)
    chosen = page.get_by_role("radio", name="hour", exact=True).locator("xpath=..//span")
    other = page.get_by_role("radio", name="week").locator("xpath=..//span")
    assert chosen.evaluate(ground) != other.evaluate(ground)
    exact, spread = (page.locator(f".key.{each}").evaluate(ground) for each in ("exact", "spread"))
    assert len({exact, spread, behind}) == 3
    # Else the browser lays its own ground behind the words of a button that has the chosen colours.
    button = page.get_by_role("button", name="Search")
    assert button.evaluate("each => getComputedStyle(each).forcedColorAdjust") == "none"
    line = "each => getComputedStyle(each).borderTopColor"
    assert page.locator(".key.in").evaluate(line) == exact


@pytest.mark.slow
def test_a_list_that_is_cut_says_so(look, served):
    die = dead_letters_of(served)
    for each in range(10_000):
        die(f"cut-{each}", waits=each == 9_999)
    page = live(look(served))
    list_of(page, "Dead letters").click()
    expect(rows(page, "dead-letters-table")).to_have_count(1_000)
    expect(rows(page, "dead-letters-table").first).to_contain_text("cut-9999")
    expect(page.locator("#dead-letters-found")).to_contain_text("Older ones are not listed")
    page.get_by_label("For topic").fill("cut-17")
    page.get_by_role("button", name="List", exact=True).click()
    expect(page.locator("#dead-letters-found")).to_have_text("1 letter not redriven.")
