"""Release scheduler on a real wheel, with a job that does nothing."""

import logging
from concurrent.futures import wait

import pytest
from prometheus_client import REGISTRY
from tests.support.clocks import SetClock

from duetime.client.status import MAX_OVERDUE_RELEASES
from duetime.kafka.offsets import ANY_TIME, DueTimes, OffsetRange
from duetime.pipeline.release.scheduler import ReleaseScheduler
from duetime.stores.wheel_store import KafkaStore

SECOND = 1_000


class NoJob:
    """A release job that does nothing."""

    def __call__(self, claims):
        pass

    def route_cancels(self, claims):
        pass


@pytest.fixture
def clock(now_ms):
    return SetClock(now_ms)


@pytest.fixture
def release(settings, topics, clock):  # noqa: ARG001 (the topics must be there)
    store = KafkaStore(settings)
    release = ReleaseScheduler(settings=settings, store=store, job=NoJob(), clock=clock)
    yield release
    release.stop()
    release.join()
    store.close()


def test_overdue_release_notes_instant_count_and_due_times(release, wheel, clock, now_ms):
    second_ms = (now_ms // SECOND + 7) * SECOND
    for each in range(3):
        wheel.message("orders", second_ms + each)
    wheel.message("orders", second_ms + SECOND)
    clock.ms = second_ms + 5 * SECOND
    counted = REGISTRY.get_sample_value("duetime_overdue_released_messages_total")

    wait(release.release_overdue())
    wait(release.release_overdue())

    (noted,) = release.overdue_releases
    assert (noted.at_ms, noted.messages) == (clock.ms, 4)
    assert (noted.from_ms, noted.to_ms) == (second_ms, second_ms + 2 * SECOND)
    assert release.overdue_messages == 4
    assert REGISTRY.get_sample_value("duetime_overdue_released_messages_total") == counted + 4


def test_overdue_release_notes_due_times_as_far_as_known(release, now_ms):
    known = DueTimes(now_ms, now_ms + SECOND)
    claims = [OffsetRange("t", 0, 0, 1, due=each) for each in (ANY_TIME, known)]
    release._note(claims, now_ms)
    release._note(claims[:1], now_ms)
    noted = [(each.messages, each.from_ms, each.to_ms) for each in release.overdue_releases]
    assert noted == [(2, *known), (1, *ANY_TIME)]


def test_overdue_release_before_the_pipeline_is_warm_is_no_warning(
    release, now_ms, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "duetime")
    claims = [OffsetRange("t", 0, 0, 1)]
    monkeypatch.setattr(release, "_is_warm", lambda: False)
    release._note(claims, now_ms)
    monkeypatch.setattr(release, "_is_warm", lambda: True)
    release._note(claims, now_ms)
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING"]


def test_latest_overdue_releases_are_kept(release, wheel, clock, now_ms):
    due = [now_ms + each * SECOND for each in range(MAX_OVERDUE_RELEASES + 1)]
    for due_ms in due:
        wheel.message("orders", due_ms, level=0)
        clock.ms = due_ms + 10 * SECOND
        wait(release.release_overdue())

    assert [each.at_ms for each in release.overdue_releases] == [
        each + 10 * SECOND for each in due[1:]
    ]
    assert release.overdue_messages == len(due)


def test_clock_set_back_while_a_planner_is_busy_is_noticed(release, clock, monkeypatch):
    def a_second_later():
        clock.ms += SECOND
        return clock.ms

    monkeypatch.setattr(clock, "now_ms", a_second_later)
    slots = release._slots(0, clock.ms)
    ahead = next(slots).number, next(slots).number

    # The store is asked for what is in that slot, and meanwhile:
    clock.ms -= 10 * SECOND

    assert next(slots).number <= ahead[0] - 5
    assert ahead[1] == ahead[0] + 1
