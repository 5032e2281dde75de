"""A cascade of a real wheel."""

from contextlib import closing

import pytest
from tests.support.clocks import SetClock, eventually

from duetime.core.clock import SystemClock
from duetime.core.messages import MessageId
from duetime.core.timer_wheel import Slot
from duetime.core.topics import TopicNames
from duetime.pipeline.delivery.rows import parsed
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.cascades import CUT_UNTIL_MS, Cascades
from duetime.pipeline.release.job import ReleaseJob, read_claims
from duetime.stores.wheel_store import KafkaStore


@pytest.mark.usefixtures("topics")
def test_cancel_meets_its_message_of_another_chunk(spark, settings, wheel, monkeypatch):
    monkeypatch.setattr("duetime.pipeline.release.cascades.CHUNK", 2)
    # Its slots of level 2 are 256 s wide, and level 1 reaches 272 s.
    due_ms = SystemClock().now_ms() + 150_000
    messages = [wheel.message("orders", due_ms, level=2) for _ in range(3)]
    before = MessageId(due_ms=due_ms, unique="cancelled-before")
    wheel.cancel(before, level=2)
    wheel.message("orders", due_ms, unique=before.unique, level=2)
    wheel.cancel(MessageId(due_ms=due_ms, unique="no-message"), level=2)
    wheel.cancel(messages[0], level=2)
    names, slots = (
        TopicNames(settings),
        [Slot(level, settings.wheel.number(level, due_ms)) for level in range(3)],
    )
    with closing(KafkaStore(settings)) as store, closing(DeliveryLog(spark, settings)) as written:
        turn = ReleaseJob(spark, settings, written)
        claims = store.acquire(slots[2])
        chunks = _routed_on(settings, store, turn, slots[2], claims)
        assert [(each.start, each.end) for each in chunks] == [(0, 2), (2, 4), (4, 6), (6, 7)]
        (below,) = store.acquire(slots[1])
        records = read_claims(spark, settings, [below])
        arrived = [row.is_cancel for row in parsed(records).collect()]
        # Every cancel is there before the first message is.
        assert arrived[:3] == [True] * 3
        assert sum(not each for each in arrived) == 4
        left = turn.rows(records).where(f"topic = '{names.wheel(1)}'").collect()
    kept = {dict(row.headers)["due-id"].decode() for row in left if dict(row.headers)["due-topic"]}
    assert kept == {str(each) for each in messages[1:]}


def _routed_on(settings, store, turn, slot, claims):
    """Cascade the claims of a slot; returns what was begun and settled, in order."""
    done = []

    def release(some):
        store.mark_started(some, 1)
        turn(some)
        store.settle(some)
        done.extend(some)

    # An early instant: it is cut, although it is near for so small a wheel.
    clock = SetClock(settings.wheel.start_ms(slot) - CUT_UNTIL_MS)
    found = Cascades(
        settings, store, release=release, route_cancels=turn.route_cancels, clock=clock
    )
    for each in claims:
        found.submit(slot, each)
    eventually(lambda: done and done[-1].end == claims[-1].end)
    found.stop()
    found.join()
    return done
