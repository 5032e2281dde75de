"""A browser on the dashboard, and the steps that tests take in it."""

import json
from contextlib import contextmanager

from confluent_kafka import Producer
from playwright.sync_api import expect

from duetime.core.schedules import Schedule, ScheduleEntry
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties

#: What the focused element is called, as far as this page names things.
NAME = "each => (each.labels?.[0] ?? each).textContent.trim()"


def live(page):
    expect(page.locator("#connection")).to_have_text("Live")
    return page


def tile(page, name):
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator(".value")


def search(page, **fields):
    for name, text in fields.items():
        page.locator(f"#search [name={name}]").fill(text)
    page.get_by_role("button", name="Search").click()


def show(page, identity):
    page.get_by_label("Id", exact=True).fill(str(identity))
    page.get_by_role("button", name="Look up").click()
    return page.get_by_role("dialog", name="Message")


def answer(page, text):
    """Answer the question that the page asks before it does anything."""
    page.locator("#question").get_by_role("button", name=text).click()


def local(page, ms):
    """An instant as a field of local time has it."""
    return page.evaluate("ms => import('/dashboard/format.js').then(f => f.asLocal(ms))", ms)


@contextmanager
def events(client):
    """Each event's name and data, as they come."""
    with client.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line.partition(": ")[2] for line in answer.iter_lines() if ": " in line)
        yield ((name, json.loads(next(lines))) for name in lines)


def reject(settings, value=b"v"):
    """Write a rejected record as the pipeline does; return the position of its source."""
    source = f"{settings.namespace}.in/0/7"
    said = [("due-error", "bad-topic"), ("due-error-detail", "so"), ("due-error-source", source)]
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).rejected, value, b"k", headers=[("own", b"1"), *said])
    assert producer.flush(30) == 0
    return source


def rows(page, table):
    return page.locator(f"#{table} tbody tr")


def list_of(page, name):
    """Return the button of the tile that lists the records it counts."""
    return page.get_by_role("button", name=f"List them: {name}")


def note(settings, **schedule):
    """Write the schedule's entry as the pipeline does; without fields, that of an ended one."""
    now = Schedule(name="weekdays", since="0-a", topic="reports", **schedule) if schedule else None
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).schedules, ScheduleEntry(now).encoded(), b"weekdays")
    assert producer.flush(30) == 0


def whole(page, name):
    """All that a tile says."""
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator("dd")
