"""The tracker is woken when a message is overdue, and again until it has heard of it."""

import pytest
from tests.conftest import created_topics
from tests.system.conftest import Inbox

from duetime.clock import SystemClock
from duetime.pipeline import waking
from duetime.pipeline.waking import Waking
from duetime.tables import QueueSettings
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

PLACE = "jobs__markers", 0


@pytest.fixture
def wakes(settings):
    """What is written to wake the tracker."""
    # A queue's topics have the same names in all namespaces.
    queues = {f"jobs_{settings.namespace}": QueueSettings()}
    with created_topics(settings.model_copy(update={"queues": queues})):
        inbox = Inbox(settings, [TopicNames(settings).wake])
        yield inbox
        inbox.close()


@pytest.fixture
def running(settings):
    started = Waking(settings, SystemClock())
    started.start()
    yield started
    started.close()


def test_what_is_reached_wakes_again_until_it_is_answered(wakes, running, monkeypatch):
    monkeypatch.setattr(waking, "AGAIN_MS", 100)
    # What is overdue already is not waited for.
    wakes.until(lambda: wakes.arrived, "the first")
    next_ms = SystemClock().now_ms() + 700
    running.expect({PLACE: next_ms, ("jobs__markers", 1): next_ms + 10**9})
    wakes.until(lambda: len(wakes.arrived) >= 4, "several")
    assert min(each.appended_ms for each in wakes.arrived[1:]) >= next_ms

    # Answered: nothing is open there any more.
    running.expect({PLACE: None})
    answered_ms = SystemClock().now_ms()
    running.expect({PLACE: answered_ms + 500})
    before = len(wakes.arrived)
    wakes.until(lambda: wakes.arrived[-1].appended_ms >= answered_ms + 500, "the next")
    meanwhile = [one for one in wakes.arrived[before:] if one.appended_ms < answered_ms + 500]
    # One may have been on its way.
    assert len(meanwhile) <= 1


def test_it_is_woken_now_and_then_whatever_is_known(wakes, running, monkeypatch):
    wakes.until(lambda: wakes.arrived, "the first")
    monkeypatch.setattr(waking, "SELDOM_MS", 200)
    running.expect({})
    wakes.until(lambda: len(wakes.arrived) >= 3, "two more")
