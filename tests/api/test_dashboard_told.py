"""What the dashboard says where little is known, and to whom a drawing says nothing."""

import json
import re

import pytest
from playwright.sync_api import expect
from pydantic import SecretStr
from tests.api.conftest import Running, alike
from tests.api.page import live, local, tile
from tests.api.test_dashboard_controls import list_of, rows
from tests.api.test_events import events
from tests.conftest import dead_letters_of
from tests.leading import leading

from duetime.api.responses import Look
from duetime.api.watch import event

pytestmark = pytest.mark.system

MINUTE_MS = 60_000

#: A store that does not answer: nothing listens there.
AWAY = {"store": SecretStr("redis://127.0.0.1:1/0")}


#: Whether an element is in the page still.
THERE = "each => each.isConnected"


def whole(page, name):
    """All that a tile says."""
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator("dd")


def test_without_a_leader_no_tile_says_that_kafka_or_an_own_message_will_tell(
    look, settings, topics, tmp_path
):
    assert topics
    running = Running(alike(settings, tmp_path))
    page = live(look(running.settings))
    for name in ("Lateness", "Rescued", "Queries"):
        expect(whole(page, name)).to_contain_text("no pipeline leads")
    with leading(settings):
        expect(whole(page, "Lateness")).to_contain_text("its own messages will tell")
        for name in ("Rescued", "Queries"):
            expect(whole(page, name)).to_contain_text("the leader does not tell")
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
    with leading(settings, rescued=3), events(api) as heard:
        name, seen = next(heard)
    assert name == "look"
    assert seen["status"]["leader"]
    assert (seen["status"]["rescued"], seen["totals"]["dead"]) == (3, 0)
    assert (seen["pending"], seen["status"]["waiting"], seen["status"]["late"]) == (None,) * 3
    assert "Redis" in seen["store_trouble"]
    assert Look.model_validate(seen, strict=True).model_dump() == seen


def test_while_the_store_does_not_answer_the_page_says_so_and_who_leads(
    look, settings, topics, tmp_path
):
    assert topics
    running = Running(alike(settings.model_copy(update=AWAY), tmp_path))
    page = look(running.settings)
    with leading(settings):
        expect(tile(page, "Leader")).not_to_have_text("none")
        expect(page.locator("#connection")).to_contain_text("Redis")
        expect(tile(page, "Waiting")).to_have_text("not known")
        expect(page.locator("#waiting-readout")).to_contain_text("the store does not answer")
    running.stop()


LOOK = {
    "at_ms": 1_800_000_000_000,
    "since_ms": 1,
    "lateness": {"samples": 9, "p50_ms": 1, "p99_ms": 2, "max_ms": 3, "overdue_ms": 0},
    "status": {
        "leader": "here:1",
        "since_ms": 1,
        "standbys": [],
        "waiting": 0,
        "late": 0,
        "lag_ms": 0,
        "rescued": 0,
        "rescues": [],
        "queries": {},
    },
    "pending": {"pending": 0, "slots": []},
    "store_trouble": None,
    "totals": dict.fromkeys(("taken_in", "cancels", "released", "rejected", "failed", "dead"), 0),
    "spooled": 0,
}


def looks(page, *changes):
    """Lets the page be told of these, two seconds apart, and of no more."""
    text = ""
    for number, (total, changed) in enumerate(changes):
        at_ms = LOOK["at_ms"] + 2_000 * number
        totals = LOOK["totals"] | {"taken_in": total}
        text += event("look", json.dumps(LOOK | {"at_ms": at_ms, "totals": totals} | changed))
    said = [text]

    def tell(asked):
        # The connection after that one stands, and says nothing.
        if said:
            asked.fulfill(body=said.pop(), content_type="text/event-stream")

    page.route("**/v1/events", tell)
    page.reload()


def test_a_process_of_the_api_that_is_another_makes_no_rate_of_what_it_does_not_count(look, served):
    page = look(served, clock=True)
    # The first had sent 90,000 of its own, which the second does not know of.
    looks(page, (10, {}), (14, {}), (90_014, {"since_ms": 2}), (90_020, {"since_ms": 2}))
    expect(tile(page, "Taken in")).to_have_text("3/s")
    page.get_by_text("Throughput as a table").click()
    expect(rows(page, "traffic-table")).to_have_count(1)


def test_lateness_and_throughput_can_be_had_as_a_table_that_stays_under_the_fingers(look, served):
    page = look(served, clock=True)
    looks(page, (10, {}), (30, {}), (50, {}))
    page.get_by_text("Lateness as a table").click()
    page.get_by_text("Throughput as a table").click()
    expect(rows(page, "lateness-table").first).to_contain_text("2 ms")
    expect(rows(page, "lateness-table")).to_have_count(3)
    # From 10 to 30 in two seconds, and so on.
    expect(rows(page, "traffic-table")).to_have_text([re.compile(r":\d\d100$")] * 2)

    first = rows(page, "traffic-table").first.element_handle()
    call = "look => import('/dashboard/traffic.js').then(traffic => traffic.showTraffic(look))"
    page.locator("#traffic-table").hover()
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 9_000})
    assert first.evaluate(THERE)
    page.mouse.move(0, 0)
    page.locator("#traffic-table").focus()
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 10_000})
    assert first.evaluate(THERE)
    page.locator("#main").focus()
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 11_000})
    assert not first.evaluate(THERE)
    expect(rows(page, "traffic-table")).to_have_count(5)


def test_a_table_that_says_the_same_is_not_made_anew(look, served):
    page = look(served, clock=True)
    looks(page, (10, {}), (30, {}))
    page.get_by_text("Lateness as a table").click()
    first = rows(page, "lateness-table").first.element_handle()
    call = "look => import('/dashboard/lateness.js').then(late => late.showLateness(look))"
    page.evaluate(call, LOOK | {"at_ms": LOOK["at_ms"] + 2_000, "lateness": None})
    assert first.evaluate(THERE)


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_what_is_chosen_and_what_a_colour_means_is_seen_where_colours_are_forced(
    look, served, colours
):
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
    assert page.locator(".key.p50").evaluate(line) == exact


def test_a_list_that_is_cut_says_so(look, served):
    die = dead_letters_of(served)
    for each in range(10_000):
        die(f"cut-{each}", waits=each == 9_999)
    page = live(look(served))
    list_of(page, "Dead letters").click()
    expect(rows(page, "dead-table")).to_have_count(1_000)
    expect(rows(page, "dead-table").first).to_contain_text("cut-9999")
    expect(page.locator("#dead-found")).to_contain_text("Older ones are not listed")
    page.get_by_label("For topic").fill("cut-17")
    page.get_by_role("button", name="List", exact=True).click()
    expect(page.locator("#dead-found")).to_have_text("1 letter not brought back.")
