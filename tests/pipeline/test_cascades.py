"""Far slots are routed on in time: in threads of their own, by deadline, and in chunks.

The store and the turns are stand-ins; the threads are real, and wait for events.
"""

import threading
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace

import pytest
from tests.conftest import SetClock, eventually

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.message import MessageId
from duetime.pipeline.cascades import CASCADES, CHUNK, CUT_UNTIL_MS, Cascades
from duetime.pipeline.claims import read_claims
from duetime.pipeline.release import BACKGROUND, Release
from duetime.pipeline.turn import Turn, readable
from duetime.pipeline.written import Written
from duetime.stores import DueTimes, OffsetRange
from duetime.stores.kafka import KafkaStore
from duetime.topics import TopicNames
from duetime.wheel import Slot

SETTINGS = Settings()
WHEEL = SETTINGS.wheel
NEAR, FAR, FARTHER = (f"duetime.wheel.{level}" for level in range(3))
NOW_MS = 1_800_000_000_000

#: Several seconds, and no test waits for them to be over.
SOON_S = 30


class OneSlot:
    """A store of one partition, which is claimed as a whole."""

    levels = WHEEL.levels

    def __init__(self, claim):
        self.claim, self.is_claimed, self.steps = claim, True, []

    def due(self, _slot):
        if self.is_claimed or self.claim.start == self.claim.end:
            return []
        self.is_claimed = True
        return [self.claim]

    def give_up(self, claims):
        assert claims == [self.claim]
        self.is_claimed = False

    def take_up(self, claims):
        (claim,) = claims
        assert self.is_claimed
        assert claim.start == self.claim.start
        self.steps.append((claim.start, claim.end))
        self.claim = replace(self.claim, start=claim.end)
        self.is_claimed = False

    def route_cancels(self, claims):
        self.steps.append(("cancels", *((each.start, each.end) for each in claims)))


class Turns:
    """Notes what is taken up; what is late is held up until `free` is set."""

    def __init__(self):
        self.taken, self.free = [], threading.Event()

    def __call__(self, claims):
        if all(each.topic == NEAR for each in claims):
            assert self.free.wait(SOON_S)
        self.taken.extend(claims)

    def route_cancels(self, claims):
        raise AssertionError(claims)


class Backlog:
    """A store with a large backlog, and far slots that are to be routed on now."""

    levels = 2

    def __init__(self, overdue):
        self._overdue, self.waiting = overdue, {}
        self.settled = []

    def overdue(self, _now_ms):
        claims, self._overdue = self._overdue, []
        return claims

    def due(self, slot):
        return self.waiting.pop(slot, [])

    def begin(self, _claims, _now_ms):
        pass

    def settle(self, claims):
        self.settled += claims


@pytest.fixture
def clock():
    return SetClock(NOW_MS)


@pytest.fixture
def turns():
    return Turns()


@pytest.fixture
def released(turns, clock):
    """Builds a release of a store, and ends it."""
    releases = []

    def build(store):
        releases.append(Release(settings=SETTINGS, store=store, turn=turns, clock=clock))
        return releases[-1]

    yield build
    turns.free.set()
    for each in releases:
        each.stop()
        each.join()


def late(number, *, begun_ms=None):
    """A claim of a backlog of one slot."""
    times = DueTimes(NOW_MS - 100_000, NOW_MS - 99_000)
    return OffsetRange(NEAR, number, 0, SETTINGS.job_messages, begun_ms, times)


def test_a_far_slot_is_routed_on_while_a_backlog_is_released(released, turns, clock):
    backlog = [late(number) for number in range(BACKGROUND * 4)]
    store = Backlog([*backlog, late(100, begun_ms=NOW_MS - 1)])
    far = OffsetRange(FAR, 9, 0, 1)
    slot = Slot(1, WHEEL.number(1, NOW_MS) + 1)
    store.waiting[slot] = [far]
    release = released(store)
    release.rescue_once()
    clock.ms = WHEEL.cascade_at_ms(slot)
    release.start(clock.ms - 1)
    # Nobody frees the backlog before.
    eventually(lambda: far in store.settled, within_s=SOON_S)
    assert turns.taken == [far]


def test_a_rescued_far_slot_with_messages_that_are_not_late_waits_for_no_backlog(released, turns):
    ahead = OffsetRange(FAR, 9, 0, 1, due=DueTimes(NOW_MS - 9_000, NOW_MS + 55_000))
    begun = replace(ahead, partition=10, begun_ms=NOW_MS - 1)
    over = replace(ahead, partition=8, due=DueTimes(NOW_MS - 99_000, NOW_MS - 35_000))
    store = Backlog([*(late(number) for number in range(BACKGROUND)), ahead, begun, over])
    release = released(store)
    taken = release.rescue_once()
    eventually(lambda: {ahead, begun} <= set(store.settled), within_s=SOON_S)
    assert over not in turns.taken
    turns.free.set()
    wait(taken, SOON_S)
    assert over in turns.taken


def test_of_what_is_late_goes_first_whose_partition_is_wanted_for_a_window_first(released, turns):
    now = WHEEL.number(0, NOW_MS + SETTINGS.lead_ms)
    ahead = [5, 120, 1, 60]
    claims = [late(WHEEL.partition(Slot(0, now + each))) for each in ahead]
    release = released(Backlog(claims))
    turns.free.set()
    group = release._settings.job_messages
    assert all(each.count == group for each in claims)
    release._background._max_workers = 1
    wait(release.rescue_once(), SOON_S)
    wanted = sorted(range(4), key=lambda each: ahead[each])
    assert turns.taken == [claims[each] for each in wanted]


def test_a_window_that_found_its_partition_in_a_rescue_is_taken_up_after_it(released, turns, clock):
    slot = Slot(0, WHEEL.number(0, NOW_MS) + 5)
    store = Backlog([late(WHEEL.partition(slot)), late(WHEEL.partition(slot) + 1)])
    release = released(store)
    taken = release.rescue_once()
    # What came in since the claim. The window of the slot has passed it over meanwhile.
    since = OffsetRange(NEAR, WHEEL.partition(slot), SETTINGS.job_messages, 300_000)
    store.waiting[slot] = [since]
    clock.ms = WHEEL.closes_at_ms(slot, SETTINGS.lead_ms)
    turns.free.set()
    wait(taken, SOON_S)
    eventually(lambda: since in store.settled, within_s=SOON_S)


def test_a_store_that_does_not_answer_after_a_rescue_keeps_no_other_from_it(
    released, turns, clock, caplog
):
    begun = [late(number, begun_ms=NOW_MS - 1) for number in range(2)]
    store = Backlog(begun)
    release = released(store)

    def fail(_slot):
        raise OSError

    store.due = fail
    taken = release.rescue_once()
    clock.ms += WHEEL.ring * WHEEL.tick_ms
    turns.free.set()
    wait(taken, SOON_S)
    assert store.settled == begun
    assert caplog.text.count("could not plan what came in during a rescue") == 2


def test_a_window_that_is_not_planned_yet_is_left_to_its_planner(released, turns, clock):
    slot = Slot(0, WHEEL.number(0, NOW_MS) + 5)
    store = Backlog([late(WHEEL.partition(slot))])
    release = released(store)
    store.waiting[slot] = [OffsetRange(NEAR, WHEEL.partition(slot), 0, 1)]
    clock.ms = WHEEL.closes_at_ms(slot, SETTINGS.lead_ms) - 1
    turns.free.set()
    wait(release.rescue_once(), SOON_S)
    assert slot in store.waiting


@pytest.fixture
def cascades(clock):
    """Builds cascades of a store, and ends them."""
    built = []

    def build(store, take_up=None):
        built.append(
            Cascades(
                SETTINGS,
                store,
                take_up=take_up or store.take_up,
                route_cancels=store.route_cancels,
                clock=clock,
            )
        )
        return built[-1]

    yield build
    for each in built:
        each.stop()
        each.join()


def test_the_slot_that_is_needed_first_is_routed_on_first(cascades):
    free, taken = threading.Event(), []

    def take_up(claims):
        if not free.is_set():
            assert free.wait(SOON_S)
        taken.extend(each.partition for each in claims)

    found = cascades(OneSlot(None), take_up)
    busy = [found.submit(Slot(1, 0), OffsetRange(FAR, 200, 0, 1)) for _ in range(CASCADES)]
    eventually(found._waiting.empty, within_s=SOON_S)
    number = WHEEL.number(1, NOW_MS)
    later = [
        found.submit(Slot(2, WHEEL.number(2, NOW_MS) + 2), OffsetRange(FARTHER, 3, 0, 1)),
        found.submit(Slot(1, number + 2), OffsetRange(FAR, 2, 0, 1)),
        found.submit(Slot(1, number + 1), OffsetRange(FAR, 1, 0, 1)),
    ]
    # What was submitted last is needed first.
    assert [found._waiting.get_nowait().claim.partition for _ in later] == [1, 2, 3]
    free.set()
    wait(busy, SOON_S)
    assert taken == [200] * CASCADES


def far_off(clock, records, **others):
    """A slot of level 2 that is to be cascaded now, and a claim of so many records of it."""
    slot = Slot(2, WHEEL.number(2, clock.ms) + 1)
    clock.ms = WHEEL.cascade_at_ms(slot)
    assert clock.ms + CUT_UNTIL_MS < WHEEL.start_ms(slot)
    return slot, OffsetRange(FARTHER, 7, 1_000, 1_000 + records, **others)


def steps_of(store, slot, cascades):
    cascades.submit(slot, store.claim)
    eventually(lambda: store.claim.start == store.claim.end, within_s=SOON_S)
    return store.steps


def test_a_large_range_is_routed_on_chunk_by_chunk_behind_its_cancels(cascades, clock):
    slot, claim = far_off(clock, 2 * CHUNK + 1)
    store = OneSlot(claim)
    first, second, end = 1_000 + CHUNK, 1_000 + 2 * CHUNK, claim.end
    assert steps_of(store, slot, cascades(store)) == [
        ("cancels", (1_000, end)),
        (1_000, first),
        (first, second),
        (second, end),
    ]


@pytest.mark.parametrize(
    ("records", "begun_ms"), [(CHUNK, None), (3 * CHUNK, 17)], ids=["small", "begun before"]
)
def test_a_small_range_and_one_that_is_read_back_are_one_turn(cascades, clock, records, begun_ms):
    slot, claim = far_off(clock, records, begun_ms=begun_ms)
    store = OneSlot(claim)
    assert steps_of(store, slot, cascades(store)) == [(claim.start, claim.end)]


def test_shortly_before_its_slot_begins_what_is_left_of_a_range_is_one_turn(cascades, clock):
    slot, claim = far_off(clock, 3 * CHUNK)
    store = OneSlot(claim)

    def take_up(claims):
        store.take_up(claims)
        clock.ms = WHEEL.start_ms(slot) - CUT_UNTIL_MS + 1

    assert steps_of(store, slot, cascades(store, take_up))[1:] == [
        (1_000, 1_000 + CHUNK),
        (1_000 + CHUNK, claim.end),
    ]


def test_what_came_in_after_the_claim_is_not_of_its_chunks(cascades, clock):
    slot, claim = far_off(clock, CHUNK + 1)
    store = OneSlot(claim)

    def take_up(claims):
        store.take_up(claims)
        # A record that no level reaches comes back to its slot each time.
        store.claim = replace(store.claim, end=store.claim.end + 1)

    found = cascades(store, take_up)
    wait([found.submit(slot, claim)], SOON_S)
    eventually(lambda: len(store.steps) == 3, within_s=SOON_S)
    assert store.steps[-1] == (1_000 + CHUNK, claim.end)
    # Rescue has the rest.
    eventually(lambda: not store.is_claimed and found._waiting.empty(), within_s=SOON_S)


def test_what_lies_behind_the_range_is_given_up(cascades, clock):
    slot, claim = far_off(clock, CHUNK + 1)
    store = OneSlot(claim)

    def take_up(claims):
        store.take_up(claims)
        # Somebody has removed the rest of the range.
        store.claim = replace(claim, start=claim.end, end=claim.end + 1)

    wait([cascades(store, take_up).submit(slot, claim)], SOON_S)
    assert not store.is_claimed
    assert len(store.steps) == 2


def test_a_chunk_that_fails_is_the_last_until_rescue_has_it(cascades, clock):
    slot, claim = far_off(clock, 3 * CHUNK)
    store, failed = OneSlot(claim), []
    found = cascades(store, failed.append)
    wait([found.submit(slot, claim)], SOON_S)
    assert [[one.end for one in each] for each in failed] == [[1_000 + CHUNK]]
    assert found._waiting.empty()


def test_a_range_whose_cancels_cannot_be_routed_on_first_is_one_turn(cascades, clock, caplog):
    slot, claim = far_off(clock, 3 * CHUNK)
    store = OneSlot(claim)

    def fail(_claims):
        raise OSError

    store.route_cancels = fail
    assert steps_of(store, slot, cascades(store)) == [(claim.start, claim.end)]
    assert "could not route cancels on first" in caplog.text


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_cancel_meets_its_message_though_they_are_in_different_chunks(
    spark, settings, wheel, monkeypatch
):
    monkeypatch.setattr("duetime.pipeline.cascades.CHUNK", 2)
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
    with closing(KafkaStore(settings)) as store, closing(Written(spark, settings)) as written:
        turn = Turn(spark, settings, written)
        claims = store.due(slots[2])
        chunks = _routed_on(settings, store, turn, slots[2], claims)
        assert [(each.start, each.end) for each in chunks] == [(0, 2), (2, 4), (4, 6), (6, 7)]
        (below,) = store.due(slots[1])
        records = read_claims(spark, settings, [below])
        arrived = [row.is_cancel for row in records.select("*", *readable()).collect()]
        # Every cancel is there before the first message is.
        assert arrived[:3] == [True] * 3
        assert sum(not each for each in arrived) == 4
        left = turn.rows(records).where(f"topic = '{names.wheel(1)}'").collect()
    kept = {dict(row.headers)["due-id"].decode() for row in left if dict(row.headers)["due-topic"]}
    assert kept == {str(each) for each in messages[1:]}


def _routed_on(settings, store, turn, slot, claims):
    """Cascade the claims of a slot; returns what was begun and settled, in order."""
    done = []

    def take_up(some):
        store.begin(some, 1)
        turn(some)
        store.settle(some)
        done.extend(some)

    # An early instant: it is cut, although it is near for so small a wheel.
    clock = SetClock(settings.wheel.start_ms(slot) - CUT_UNTIL_MS)
    found = Cascades(
        settings, store, take_up=take_up, route_cancels=turn.route_cancels, clock=clock
    )
    for each in claims:
        found.submit(slot, each)
    eventually(lambda: done and done[-1].end == claims[-1].end)
    found.stop()
    found.join()
    return done
