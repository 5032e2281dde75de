"""The tracker is woken when a message is overdue, and again until a batch answers."""

import pytest
from tests.support.live import Inbox
from tests.support.topics import created_topics

from duetime.core.clock import SystemClock
from duetime.core.setting_types import QueueSettings
from duetime.core.topics import TopicNames
from duetime.pipeline import tracker
from duetime.pipeline.tracker import WakeUpTimer

PLACE = "jobs__markers", 0


@pytest.fixture
def wakes(settings):
    """The records that wake the tracker."""
    # A queue's topics have the same names in all namespaces.
    queues = {f"jobs_{settings.namespace}": QueueSettings()}
    with created_topics(settings.model_copy(update={"queues": queues})):
        inbox = Inbox(settings, [TopicNames(settings).tracker_wakeup])
        yield inbox
        inbox.close()


@pytest.fixture
def running(settings):
    started = WakeUpTimer(settings, SystemClock())
    started.start()
    yield started
    started.close()


def test_a_deadline_wakes_the_tracker_until_a_batch_answers(wakes, running, monkeypatch):
    monkeypatch.setattr(tracker, "RETRY_INTERVAL_MS", 100)
    # Messages that are overdue already do not wait.
    wakes.until(lambda: wakes.arrived, "the first")
    next_ms = SystemClock().now_ms() + 700
    running.schedule({PLACE: next_ms, ("jobs__markers", 1): next_ms + 10**9})
    wakes.until(lambda: len(wakes.arrived) >= 4, "several")
    assert min(each.appended_ms for each in wakes.arrived[1:]) >= next_ms

    # Answered: no message is in flight there.
    running.schedule({PLACE: None})
    answered_ms = SystemClock().now_ms()
    running.schedule({PLACE: answered_ms + 500})
    before = len(wakes.arrived)
    wakes.until(lambda: wakes.arrived[-1].appended_ms >= answered_ms + 500, "the next")
    meanwhile = [one for one in wakes.arrived[before:] if one.appended_ms < answered_ms + 500]
    # One may have been under way.
    assert len(meanwhile) <= 1


def test_the_tracker_is_woken_regularly_without_a_deadline(wakes, running, monkeypatch):
    wakes.until(lambda: wakes.arrived, "the first")
    monkeypatch.setattr(tracker, "MAX_INTERVAL_MS", 200)
    running.schedule({})
    wakes.until(lambda: len(wakes.arrived) >= 3, "two more")
