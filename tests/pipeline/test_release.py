"""When turns are taken, on a real wheel; what a turn does is left out."""

import logging
from concurrent.futures import wait

import pytest
from prometheus_client import REGISTRY
from tests.conftest import SetClock

from duetime.pipeline.release import Release
from duetime.standing import RESCUES_TOLD, Rescue
from duetime.stores import ANY_TIME, DueTimes, OffsetRange
from duetime.stores.kafka import KafkaStore

pytestmark = pytest.mark.system

SECOND = 1_000


class NoTurn:
    """Takes up claims, and does nothing with them."""

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
    release = Release(settings=settings, store=store, turn=NoTurn(), clock=clock)
    yield release
    release.stop()
    release.join()
    store.close()


def test_each_rescue_is_noted_with_its_time_its_number_and_when_its_slots_were_due(
    release, wheel, clock, now_ms
):
    second_ms = (now_ms // SECOND + 7) * SECOND
    for each in range(3):
        wheel.message("orders", second_ms + each)
    wheel.message("orders", second_ms + SECOND)
    clock.ms = second_ms + 5 * SECOND
    counted = REGISTRY.get_sample_value("duetime_rescued_messages_total")

    wait(release.rescue_once())
    wait(release.rescue_once())

    assert release.rescues == (Rescue(clock.ms, 4, second_ms, second_ms + 2 * SECOND),)
    assert release.rescued == 4
    assert REGISTRY.get_sample_value("duetime_rescued_messages_total") == counted + 4


def test_a_rescue_tells_when_its_slots_were_due_as_far_as_that_is_known(release, now_ms):
    known = DueTimes(now_ms, now_ms + SECOND)
    claims = [OffsetRange("t", 0, 0, 1, due=each) for each in (ANY_TIME, known)]
    release._note(claims, now_ms)
    release._note(claims[:1], now_ms)
    assert release.rescues == (Rescue(now_ms, 2, *known), Rescue(now_ms, 1, *ANY_TIME))


def test_what_is_rescued_before_the_pipeline_is_warm_alarms_nobody(
    release, now_ms, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "duetime")
    claims = [OffsetRange("t", 0, 0, 1)]
    monkeypatch.setattr(release, "_is_warm", lambda: False)
    release._note(claims, now_ms)
    monkeypatch.setattr(release, "_is_warm", lambda: True)
    release._note(claims, now_ms)
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING"]


def test_the_latest_rescues_are_kept(release, wheel, clock, now_ms):
    due = [now_ms + each * SECOND for each in range(RESCUES_TOLD + 1)]
    for due_ms in due:
        wheel.message("orders", due_ms, level=0)
        clock.ms = due_ms + 10 * SECOND
        wait(release.rescue_once())

    assert [each.at_ms for each in release.rescues] == [each + 10 * SECOND for each in due[1:]]
    assert release.rescued == len(due)


def test_a_clock_that_is_set_back_while_a_planner_is_busy_is_noticed(release, clock, monkeypatch):
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
