"""Wheel logs of which a power cut has taken the end: acknowledged, and not yet on the disk."""

import logging
from contextlib import closing

import pytest
from tests.support.topics import small_settings
from tests.support.wheel import WheelWriter

from duetime.core.topics import TopicNames
from duetime.kafka.admin import create_topics
from duetime.kafka.offsets import Offsets, Position
from duetime.local.broker import LocalBroker
from duetime.stores.wheel_store import DeletionGuard, KafkaStore

SECOND = 1_000

#: Records before the power cut, and the bytes that it takes: the last record, and a part of it.
BEFORE, LOST_BYTES = 5, 10


def summary(claim):
    return claim.start, claim.end, claim.started_ms is not None


class NoDeletion(DeletionGuard):
    """Deletes nothing: a broker notes only each minute where its logs begin."""

    def delete(self, *_): ...


class PowerCut:
    """Three slots of five records, through a cut in which two of their logs lose the last one.

    What is written after it has the offsets of what is lost.
    """

    def __init__(self, broker, folder, now_ms):
        self._broker, self._folder, self._now_ms = broker, folder, now_ms
        self.settings = small_settings(broker.bootstrap)
        create_topics(self.settings)
        self._wheel = WheelWriter(self.settings, now_ms)
        self.due_ms = [now_ms + seconds * SECOND for seconds in (10, 11, 12)]
        self.short, self.whole, self.claimed = (
            self.settings.wheel.place(each, now_ms) for each in self.due_ms
        )
        self.places = [self._wheel.partition(each) for each in self.due_ms]
        self.store = KafkaStore(self.settings, NoDeletion())
        self.add(BEFORE)
        for slot in (self.short, self.whole):
            claims = self.store.acquire(slot)
            self.store.mark_started(claims, self.due_ms[0])
            self.store.settle(claims)
        self.claims = self.store.acquire(self.claimed)
        self.offsets = Offsets(self.settings, TopicNames(self.settings).release_group)
        self.before = self.offsets.latest(self.places)

    def add(self, count, slots=(0, 1, 2)):
        for number in slots:
            for _ in range(count):
                self._wheel.message("orders", self.due_ms[number], level=0)

    def cut(self):
        self._broker.kill()
        for number in (0, 2):
            topic, partition = self.places[number]
            (log,) = self._folder.rglob(f"{topic}-{partition}/*.log")
            with log.open("r+b") as file:
                file.truncate(log.stat().st_size - LOST_BYTES)
        self._broker.start()
        # To the idempotent producer it is an error that its records are gone.
        self._wheel = WheelWriter(self.settings, self._now_ms)

    def claimed_of(self, slot):
        """Claim the slot as the next leader, and return from where to where."""
        store = KafkaStore(self.settings, NoDeletion())
        (claim,) = store.acquire(slot)
        store.close()
        return summary(claim)

    def close(self):
        self.store.close()
        self.offsets.close()


@pytest.fixture
def power_cut(tmp_path, now_ms):
    with (
        LocalBroker(tmp_path) as broker,
        closing(PowerCut(broker, tmp_path, now_ms)) as cut,
    ):
        yield cut


@pytest.mark.slow
def test_log_shorter_than_the_settled_offset_is_read_from_its_start(power_cut, caplog):
    power_cut.cut()
    (topic, _), *_ = power_cut.places
    store = KafkaStore(power_cut.settings, NoDeletion())
    (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert f"topic={topic} partitions=1" in told.getMessage()
    power_cut.add(1, [0])
    (claim,) = store.acquire(power_cut.short)
    assert summary(claim) == (0, BEFORE, True)
    store.close()


@pytest.mark.slow
def test_log_that_has_grown_past_the_settled_offset_is_read_from_its_start(power_cut, caplog):
    power_cut.cut()
    power_cut.add(3)
    store, offsets = power_cut.store, power_cut.offsets
    short, _, claimed = power_cut.places
    epoch = power_cut.before[short].leader_epoch
    assert offsets.truncated(power_cut.before) == {short, claimed}
    assert offsets.truncated({short: Position(BEFORE - 1, epoch)}) == set()

    # The next leader, and the one that goes on.
    assert power_cut.claimed_of(power_cut.short) == (0, BEFORE + 2, True)
    assert power_cut.claimed_of(power_cut.whole) == (BEFORE, BEFORE + 3, False)
    (claim,) = store.acquire(power_cut.short)
    assert summary(claim) == (0, BEFORE + 2, True)
    (claim,) = store.acquire(power_cut.whole)
    assert summary(claim) == (BEFORE, BEFORE + 3, False)
    assert {each.levelno for each in caplog.records if each.name.startswith("duetime")} == {
        logging.ERROR
    }


@pytest.mark.slow
def test_what_a_log_has_grown_by_is_not_deleted_with_a_claim(power_cut):
    """The claim was sent before the cut: its offsets are those of other records by now."""
    power_cut.cut()
    power_cut.add(3)
    store, place = power_cut.store, power_cut.places[2]
    store._deletion_guard = DeletionGuard()
    store.settle(power_cut.claims)
    (claim,) = store.acquire(power_cut.claimed)
    assert summary(claim) == (0, BEFORE + 2, True)
    assert power_cut.offsets.starts([place]) == {place: 0}


@pytest.mark.slow
def test_claim_that_is_settled_while_the_next_one_is_made_is_checked(power_cut, monkeypatch):
    power_cut.cut()
    power_cut.add(3)
    store, latest = power_cut.store, power_cut.store._offsets.latest

    def latest_before_it_is_settled(places):
        found = latest(places)
        monkeypatch.undo()
        store.settle(power_cut.claims)
        return found

    monkeypatch.setattr(store._offsets, "latest", latest_before_it_is_settled)
    assert store.acquire(power_cut.claimed) == []
    (claim,) = store.acquire(power_cut.claimed)
    assert summary(claim) == (0, BEFORE + 2, True)
