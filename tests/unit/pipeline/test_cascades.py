"""Cascades: far slots are routed on in time, in threads of their own, by deadline, in chunks.

The store and the job are stand-ins; the threads are real, and wait for events.
"""

import threading
from concurrent.futures import Future, wait
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.support.clocks import SetClock, eventually

from duetime.core.errors import KafkaError, OutcomeKnown
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.kafka.offsets import DueTimes, OffsetRange
from duetime.pipeline.release import scheduler
from duetime.pipeline.release.cascades import CASCADES, CHUNK, CUT_UNTIL_MS, Cascades
from duetime.pipeline.release.scheduler import BACKGROUND, GATHER_S, RESCAN_S, ReleaseScheduler
from duetime.spark.kafka_io import RETRY_PAUSE_S

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

    def acquire(self, _slot):
        if self.is_claimed or self.claim.start == self.claim.end:
            return []
        self.is_claimed = True
        return [self.claim]

    def release(self, claims):
        assert claims == [self.claim]
        self.is_claimed = False

    def run(self, claims):
        (claim,) = claims
        assert self.is_claimed
        assert claim.start == self.claim.start
        self.steps.append((claim.start, claim.end))
        self.claim = replace(self.claim, start=claim.end)
        self.is_claimed = False

    def route_cancels(self, claims):
        self.steps.append(("cancels", *((each.start, each.end) for each in claims)))


class Shards:
    """A store of one slot with several partitions; some are held by another job at first."""

    def __init__(self, claims, held=()):
        self.claims = {each.place: each for each in claims}
        self.claimed = {each.place for each in claims}
        self._held, self.steps = {each.place for each in held}, []

    def acquire(self, _slot):
        left = [
            each
            for place, each in self.claims.items()
            if place not in self.claimed and each.start < each.end
        ]
        self.claimed |= {each.place for each in left}
        return left

    def release(self, claims):
        self.claimed -= {each.place for each in claims}

    def run(self, claims):
        (claim,) = claims
        self.steps.append((claim.partition, claim.start, claim.end))
        # A record that no level reaches comes back to its slot.
        last = self.claims[claim.place].end + 1
        self.claims[claim.place] = replace(claim, start=claim.end, end=last)
        self.claimed -= {claim.place, *self._held}
        self._held = set()

    def route_cancels(self, claims):
        self.steps += [("cancels", each.partition) for each in claims]


class Turns:
    """A release job that notes its claims, and holds up late ones until `free` is set."""

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

    def acquire_overdue(self, _now_ms):
        claims, self._overdue = self._overdue, []
        return claims

    def acquire(self, slot):
        return self.waiting.pop(slot, [])

    def mark_started(self, _claims, _now_ms):
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
        releases.append(ReleaseScheduler(settings=SETTINGS, store=store, job=turns, clock=clock))
        return releases[-1]

    yield build
    turns.free.set()
    for each in releases:
        each.stop()
        each.join()


def late(number, *, started_ms=None):
    """A claim of a backlog of one slot."""
    times = DueTimes(NOW_MS - 100_000, NOW_MS - 99_000)
    return OffsetRange(NEAR, number, 0, SETTINGS.max_messages_per_job, started_ms, times)


def test_far_slot_is_routed_on_while_a_backlog_is_released(released, turns, clock):
    backlog = [late(number) for number in range(BACKGROUND * 4)]
    store = Backlog([*backlog, late(100, started_ms=NOW_MS - 1)])
    far = OffsetRange(FAR, 9, 0, 1)
    slot = Slot(1, WHEEL.number(1, NOW_MS) + 1)
    store.waiting[slot] = [far]
    release = released(store)
    release.release_overdue()
    clock.ms = WHEEL.cascade_at_ms(slot)
    release.start(clock.ms - 1)
    # The backlog is still held up.
    eventually(lambda: far in store.settled, within_s=SOON_S)
    assert turns.taken == [far]


def test_overdue_far_slot_with_messages_not_late_waits_for_no_backlog(released, turns):
    ahead = OffsetRange(FAR, 9, 0, 1, due=DueTimes(NOW_MS - 9_000, NOW_MS + 55_000))
    begun = replace(ahead, partition=10, started_ms=NOW_MS - 1)
    over = replace(ahead, partition=8, due=DueTimes(NOW_MS - 99_000, NOW_MS - 35_000))
    store = Backlog([*(late(number) for number in range(BACKGROUND)), ahead, begun, over])
    release = released(store)
    taken = release.release_overdue()
    eventually(lambda: {ahead, begun} <= set(store.settled), within_s=SOON_S)
    assert over not in turns.taken
    turns.free.set()
    wait(taken, SOON_S)
    assert over in turns.taken


def test_overdue_partitions_needed_by_the_next_windows_go_first(released, turns):
    now = WHEEL.number(0, NOW_MS + SETTINGS.release_lead_ms)
    ahead = [5, 120, 1, 60]
    claims = [late(WHEEL.partitions_of(Slot(0, now + each))[0]) for each in ahead]
    release = released(Backlog(claims))
    turns.free.set()
    group = release._settings.max_messages_per_job
    assert all(each.count == group for each in claims)
    release._background._max_workers = 1
    wait(release.release_overdue(), SOON_S)
    wanted = sorted(range(4), key=lambda each: ahead[each])
    assert turns.taken == [claims[each] for each in wanted]


def test_window_passed_over_by_an_overdue_release_is_released_after_it(released, turns, clock):
    slot = Slot(0, WHEEL.number(0, NOW_MS) + 5)
    store = Backlog([late(WHEEL.partitions_of(slot)[0]), late(WHEEL.partitions_of(slot)[0] + 1)])
    release = released(store)
    taken = release.release_overdue()
    # What came in since the claim. The window of the slot has passed it over meanwhile.
    since = OffsetRange(NEAR, WHEEL.partitions_of(slot)[0], SETTINGS.max_messages_per_job, 300_000)
    store.waiting[slot] = [since]
    clock.ms = WHEEL.release_at_ms(slot, SETTINGS.release_lead_ms)
    turns.free.set()
    wait(taken, SOON_S)
    eventually(lambda: since in store.settled, within_s=SOON_S)


def test_store_failure_after_an_overdue_release_stops_no_other_one(released, turns, clock, caplog):
    begun = [late(number, started_ms=NOW_MS - 1) for number in range(2)]
    store = Backlog(begun)
    release = released(store)

    def fail(_slot):
        raise OSError

    store.acquire = fail
    taken = release.release_overdue()
    clock.ms += WHEEL.ring * WHEEL.tick_ms
    turns.free.set()
    wait(taken, SOON_S)
    assert store.settled == begun
    assert caplog.text.count("could not plan slots passed over") == 2


def test_window_that_is_not_planned_yet_is_left_to_its_planner(released, turns, clock):
    slot = Slot(0, WHEEL.number(0, NOW_MS) + 5)
    store = Backlog([late(WHEEL.partitions_of(slot)[0])])
    release = released(store)
    store.waiting[slot] = [OffsetRange(NEAR, WHEEL.partitions_of(slot)[0], 0, 1)]
    clock.ms = WHEEL.release_at_ms(slot, SETTINGS.release_lead_ms) - 1
    turns.free.set()
    wait(release.release_overdue(), SOON_S)
    assert slot in store.waiting


@pytest.fixture
def cascades(clock):
    """Builds cascades of a store, and ends them."""
    built = []

    def build(store, release=None):
        built.append(
            Cascades(
                SETTINGS,
                store,
                release=release or store.run,
                route_cancels=store.route_cancels,
                clock=clock,
            )
        )
        return built[-1]

    yield build
    for each in built:
        each.stop()
        each.join()


def test_slot_that_is_needed_first_is_routed_on_first(cascades):
    free, taken = threading.Event(), []

    def release(claims):
        if not free.is_set():
            assert free.wait(SOON_S)
        taken.extend(each.partition for each in claims)

    found = cascades(OneSlot(None), release)
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
    """A slot of level 2 that is to be cascaded now, and a claim of some records of it."""
    slot = Slot(2, WHEEL.number(2, clock.ms) + 1)
    clock.ms = WHEEL.cascade_at_ms(slot)
    assert clock.ms + CUT_UNTIL_MS < WHEEL.start_ms(slot)
    return slot, OffsetRange(FARTHER, 7, 1_000, 1_000 + records, **others)


def steps_of(store, slot, cascades):
    cascades.submit(slot, store.claim)
    eventually(lambda: store.claim.start == store.claim.end, within_s=SOON_S)
    return store.steps


def test_large_range_is_routed_on_in_chunks_behind_its_cancels(cascades, clock):
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
    ("records", "started_ms"), [(CHUNK, None), (3 * CHUNK, 17)], ids=["small", "begun before"]
)
def test_small_range_or_one_that_is_read_back_is_one_job(cascades, clock, records, started_ms):
    slot, claim = far_off(clock, records, started_ms=started_ms)
    store = OneSlot(claim)
    assert steps_of(store, slot, cascades(store)) == [(claim.start, claim.end)]


def test_rest_of_a_range_is_one_job_shortly_before_its_slot_begins(cascades, clock):
    slot, claim = far_off(clock, 3 * CHUNK)
    store = OneSlot(claim)

    def release(claims):
        store.run(claims)
        clock.ms = WHEEL.start_ms(slot) - CUT_UNTIL_MS + 1

    assert steps_of(store, slot, cascades(store, release))[1:] == [
        (1_000, 1_000 + CHUNK),
        (1_000 + CHUNK, claim.end),
    ]


def test_records_that_came_after_the_claim_are_in_no_chunk(cascades, clock):
    slot, claim = far_off(clock, CHUNK + 1)
    store = OneSlot(claim)

    def release(claims):
        store.run(claims)
        # A record that no level reaches comes back to its slot each time.
        store.claim = replace(store.claim, end=store.claim.end + 1)

    found = cascades(store, release)
    wait([found.submit(slot, claim)], SOON_S)
    eventually(lambda: len(store.steps) == 3, within_s=SOON_S)
    assert store.steps[-1] == (1_000 + CHUNK, claim.end)
    # The next scan for overdue messages has the rest.
    eventually(lambda: not store.is_claimed and found._waiting.empty(), within_s=SOON_S)


@pytest.mark.parametrize("is_held", [False, True], ids=["planned", "held when it is planned"])
def test_shards_are_cut_each_by_itself_behind_their_cancels(cascades, clock, is_held):
    slot, first = far_off(clock, 2 * CHUNK + 1)
    second = replace(first, partition=first.partition + WHEEL.ring, end=first.start + CHUNK + 2)
    store = Shards([first, second], [second] if is_held else [])
    found = cascades(store)
    wait([found.submit(slot, each) for each in ([first] if is_held else [first, second])], SOON_S)

    def steps(claim):
        return [each for each in store.steps if claim.partition in each[:2]]

    eventually(lambda: len(steps(first)) == 4 and len(steps(second)) == 3, within_s=SOON_S)
    eventually(lambda: found._waiting.empty() and not store.claimed, within_s=SOON_S)
    starts = [1_000, 1_000 + CHUNK, 1_000 + 2 * CHUNK]
    for claim in (first, second):
        cancels, *chunks = steps(claim)
        assert cancels == ("cancels", claim.partition)
        ends = [*starts[1 : len(chunks)], chunks[-1][2]]
        assert [each[1:] for each in chunks] == list(zip(starts, ends, strict=False))
    assert steps(first)[-1][2] == first.end


def test_claim_behind_the_range_is_released(cascades, clock):
    slot, claim = far_off(clock, CHUNK + 1)
    store = OneSlot(claim)

    def release(claims):
        store.run(claims)
        # The rest of the range was removed.
        store.claim = replace(claim, start=claim.end, end=claim.end + 1)

    wait([cascades(store, release).submit(slot, claim)], SOON_S)
    assert not store.is_claimed
    assert len(store.steps) == 2


def test_failed_chunk_is_the_last_until_the_overdue_scan(cascades, clock):
    slot, claim = far_off(clock, 3 * CHUNK)
    store, failed = OneSlot(claim), []
    found = cascades(store, failed.append)
    wait([found.submit(slot, claim)], SOON_S)
    assert [[one.end for one in each] for each in failed] == [[1_000 + CHUNK]]
    assert found._waiting.empty()


def test_range_whose_cancels_cannot_be_routed_first_is_one_job(cascades, clock, caplog):
    slot, claim = far_off(clock, 3 * CHUNK)
    store = OneSlot(claim)

    def fail(_claims):
        raise OSError

    store.route_cancels = fail
    assert steps_of(store, slot, cascades(store)) == [(claim.start, claim.end)]
    assert "could not route cancels first" in caplog.text


class Rests:
    """Timers that go off when a test says so, and a clock that it sets."""

    def __init__(self, monkeypatch):
        self.now_s, self.begun = 1_001.0, []
        monkeypatch.setattr(scheduler, "threading", SimpleNamespace(Timer=self))
        monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def __call__(self, interval_s, end, given):
        self.begun.append((self.now_s + interval_s, end, given))
        return self

    def start(self):
        pass


class Failing(Backlog):
    """A store whose released claims are overdue."""

    def release(self, claims):
        self._overdue = [replace(each, started_ms=NOW_MS) for each in claims]


@pytest.fixture
def failed(released, monkeypatch):
    """Return a release, its jobs, which fail at first, their rests, and what is settled."""
    release, jobs = released(store := Failing([])), []

    def job(claims):
        jobs.append(sorted(each.partition for each in claims))
        if not turns.is_set():
            raise KafkaError("a broker has died")

    turns = threading.Event()
    release._job = job
    return release, jobs, turns, Rests(monkeypatch), store.settled


def window(number):
    return replace(late(number), end=1)


def test_windows_that_fail_at_about_the_same_time_are_repeated_together(failed):
    release, jobs, mended, rests, settled = failed
    failed_s = []
    for number, pause_s in enumerate((0, GATHER_S / 4, GATHER_S)):
        rests.now_s += pause_s
        failed_s.append(rests.now_s)
        release._release([window(number)])
    (first_s, first, given), (second_s, *_) = rests.begun
    longest_s, shortest_s = (first_s - each for each in failed_s[:2])
    assert RETRY_PAUSE_S <= shortest_s < longest_s <= RETRY_PAUSE_S + GATHER_S
    assert second_s == first_s + GATHER_S
    mended.set()
    first(*given)
    eventually(lambda: len(settled) == 2, within_s=SOON_S)
    assert jobs == [[0], [1], [2], [0, 1]]


def test_windows_that_fail_together_again_are_repeated_alone(failed):
    release, jobs, mended, rests, settled = failed
    release._release([replace(window(number), started_ms=NOW_MS) for number in range(2)])
    mended.set()
    ((_, end, given),) = rests.begun
    end(*given)
    eventually(lambda: len(settled) == 2, within_s=SOON_S)
    assert jobs == [[0, 1], [0], [1]]


def test_window_that_is_refused_is_repeated_before_a_backlog(released, turns):
    release = released(store := Failing([late(number) for number in range(BACKGROUND * 4)]))
    release.release_overdue()
    tries = iter([OutcomeKnown("a topic has refused a record"), None])

    def job(claims):
        if claims[0].partition < 100:
            turns(claims)
        elif error := next(tries):
            raise error

    release._job = job
    release._release([window(100)])
    # The backlog is still held up.
    eventually(lambda: store.settled, within_s=SOON_S)
    assert [each.partition for each in store.settled] == [100]
    assert not turns.taken


def test_release_ends_in_the_midst_of_a_backlog(released, turns):
    backlog = [late(number) for number in range(BACKGROUND * 4)]
    release = released(Backlog([*backlog, late(100, started_ms=NOW_MS - 1)]))
    release.release_overdue()
    release.stop()
    turns.free.set()
    ended = threading.Thread(target=release.join, daemon=True)
    ended.start()
    ended.join(SOON_S)
    assert not ended.is_alive()


def test_a_far_slot_that_fails_waits_for_no_window(failed):
    release, _, _, rests, _ = failed
    rests.now_s += GATHER_S / 4
    release._release([OffsetRange(FAR, 9, 0, 1)])
    ((end_s, *_),) = rests.begun
    assert end_s == rests.now_s + RETRY_PAUSE_S


def test_overdue_scans_come_sooner_while_they_find_some_or_fail(failed, monkeypatch):
    """A broker is replaced: records come into slots whose windows were planned before."""
    release, _, _, rests, _ = failed
    waits = []

    def no_answer():
        raise KafkaError("no answer")

    def slow():
        rests.now_s += RESCAN_S
        return []

    scans = [list, no_answer, slow, lambda: [Future()], list]

    def scan():
        return scans[len(waits) - 1]()

    class Stopping:
        def wait(self, seconds):
            waits.append(seconds)
            return len(waits) > len(scans)

    with monkeypatch.context() as patches:
        patches.setattr(release, "_stopping", Stopping())
        patches.setattr(release, "release_overdue", scan)
        release._scan_overdue()
    interval_s = SETTINGS.overdue_scan_interval_ms / 1_000
    assert waits == [interval_s, interval_s, RESCAN_S, RESCAN_S, RESCAN_S, interval_s]
