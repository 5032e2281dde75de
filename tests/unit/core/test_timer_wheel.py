from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from duetime.core.errors import ConfigError, InvalidMessage, Reason
from duetime.core.timer_wheel import GRACE_MS, Slot, Wheel

YEAR_MS = 365 * 86_400_000
LEAD_MS = 1_000

#: Ticks for which a wheel of 16 slots and more can be cascaded in time.
wheels = st.builds(
    Wheel,
    tick_ms=st.sampled_from([1_000, 1_500, 60_000]),
    slots=st.sampled_from([16, 17, 64, 100]),
    levels=st.integers(1, 5),
)
instants = st.integers(0, 100 * YEAR_MS)


@st.composite
def delays(draw: st.DrawFn, wheel: Wheel, levels: range | None = None) -> int:
    """From 0 to the span, every level as likely as any other, with the edges of slots."""
    level = draw(st.sampled_from(levels or range(wheel.levels)))
    slots = draw(st.integers(0, wheel.reach(level) - 1))
    part_ms = draw(st.sampled_from([-1, 0, 1]) | st.integers(0, wheel.width_ms(level) - 1))
    delay_ms = slots * wheel.width_ms(level) + part_ms
    return min(max(delay_ms, 0), wheel.span_ms())


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Wheel, int, int]:
    """A wheel, an instant, and a due time that the wheel reaches from there."""
    wheel, now_ms = draw(wheels), draw(instants)
    return wheel, now_ms, now_ms + draw(delays(wheel))


@st.composite
def far_journeys(draw: st.DrawFn) -> tuple[Wheel, int, int]:
    """The same, with a due time that level 0 does not reach."""
    wheel, now_ms = draw(wheels.filter(lambda one: one.levels > 1)), draw(instants)
    due_ms = now_ms + draw(delays(wheel, range(1, wheel.levels)))
    assume(wheel.place(due_ms, now_ms).level > 0)
    return wheel, now_ms, due_ms


@st.composite
def slots(draw: st.DrawFn) -> tuple[Wheel, Slot]:
    wheel = draw(wheels)
    level = draw(st.integers(0, wheel.levels - 1))
    return wheel, Slot(level, draw(st.integers(3 * wheel.ring, 10**6)))


def walk(wheel: Wheel, now_ms: int, due_ms: int) -> Iterator[tuple[int, Slot]]:
    """Every place of a message and when it came there, each cascade on time."""
    slot = wheel.place(due_ms, now_ms)
    yield now_ms, slot
    while slot.level > 0:
        now_ms = max(now_ms, wheel.cascade_at_ms(slot))
        slot = wheel.place(due_ms, now_ms)
        yield now_ms, slot


@given(journeys())
def test_every_due_time_within_the_span_has_a_place_that_covers_it(journey):
    wheel, now_ms, due_ms = journey
    slot = wheel.place(due_ms, now_ms)
    assert wheel.start_ms(slot) <= due_ms < wheel.end_ms(slot)
    assert 0 <= wheel.partitions_of(slot)[0] < wheel.ring


@given(journeys())
def test_the_place_is_on_the_lowest_level_that_reaches_the_due_time(journey):
    wheel, now_ms, due_ms = journey
    chosen = wheel.place(due_ms, now_ms).level
    for level in range(chosen):
        ahead = wheel.number(level, due_ms) - wheel.number(level, now_ms)
        assert ahead >= wheel.reach(level)


@given(journeys())
def test_two_slots_that_fill_at_once_never_share_a_partition(journey):
    wheel, now_ms, due_ms = journey
    slot = wheel.place(due_ms, now_ms)
    present = wheel.number(slot.level, now_ms)
    filling = range(present, present + wheel.reach(slot.level))
    partitions = [wheel.partitions_of(Slot(slot.level, number))[0] for number in filling]
    assert len(set(partitions)) == len(partitions)


@given(journeys())
def test_a_message_walks_down_to_level_0_in_at_most_as_many_hops_as_levels(journey):
    wheel, now_ms, due_ms = journey
    hops = list(walk(wheel, now_ms, due_ms))
    assert len(hops) <= wheel.levels
    levels = [slot.level for _, slot in hops]
    assert levels == sorted(set(levels), reverse=True)
    assert levels[-1] == 0


@given(far_journeys())
def test_a_far_message_reaches_its_last_slot_before_that_is_planned(journey):
    wheel, now_ms, due_ms = journey
    *_, (arrived_ms, last) = walk(wheel, now_ms, due_ms)
    assert arrived_ms <= wheel.start_ms(last) - LEAD_MS
    assert arrived_ms < due_ms


@given(far_journeys(), st.data())
def test_cancel_goes_to_every_slot_where_its_message_may_be(journey, data):
    wheel, now_ms, due_ms = journey
    asked_ms = data.draw(st.integers(now_ms, due_ms))
    slot = [slot for at_ms, slot in walk(wheel, now_ms, due_ms) if at_ms <= asked_ms][-1]
    # What is cascaded now is on its way to where cancels go.
    assume(slot.level == 0 or asked_ms < wheel.accepts_until_ms(slot))
    own = wheel.place(due_ms, asked_ms)
    above = wheel.higher_slots(due_ms, asked_ms)
    assert slot in (own, *above)
    assert all(each.level > own.level for each in above)


@given(far_journeys())
def test_far_slot_takes_no_record_in_the_grace_time_before_cascade(journey):
    wheel, now_ms, due_ms = journey
    slot = wheel.place(due_ms, now_ms)
    closed_ms = wheel.cascade_at_ms(slot) - GRACE_MS
    assert now_ms < closed_ms
    assert wheel.place(due_ms, closed_ms).level < slot.level


@given(far_journeys())
def test_a_far_slot_is_cascaded_before_its_time_begins(journey):
    wheel, now_ms, due_ms = journey
    slot = wheel.place(due_ms, now_ms)
    assert wheel.cascade_at_ms(slot) < wheel.start_ms(slot)


@given(far_journeys(), st.integers(0, 3_600_000))
def test_a_cascade_that_is_late_still_finds_a_nearer_place(journey, late_ms):
    wheel, now_ms, due_ms = journey
    slot = wheel.place(due_ms, now_ms)
    assert wheel.place(due_ms, wheel.cascade_at_ms(slot) + late_ms).level < slot.level


@given(wheels, instants, st.integers(0, 10 * YEAR_MS))
def test_due_time_in_the_past_belongs_to_level_0(wheel, due_ms, late_ms):
    assert wheel.place(due_ms, due_ms + late_ms).level == 0


@given(wheels, instants, st.integers(1, 100 * YEAR_MS))
def test_a_due_time_beyond_the_last_level_is_refused_and_never_wrapped(wheel, now_ms, more_ms):
    last = wheel.levels - 1
    end_ms = (wheel.number(last, now_ms) + wheel.reach(last)) * wheel.width_ms(last)
    with pytest.raises(InvalidMessage, match="the wheel ends after") as refusal:
        wheel.place(end_ms + more_ms, now_ms)
    assert refusal.value.reason == Reason.DELAY_TOO_LONG


@given(slots(), st.integers(0, 2 * 10**9))
def test_partition_fills_its_first_slot_that_is_not_closed(place, ago_ms):
    wheel, slot = place
    now_ms = max(0, wheel.release_at_ms(slot, LEAD_MS) - ago_ms - 1)
    filling = wheel.current_slot(slot.level, wheel.partitions_of(slot)[0], now_ms, LEAD_MS)
    before = Slot(filling.level, filling.number - wheel.ring)
    assert wheel.partitions_of(filling)[0] == wheel.partitions_of(slot)[0]
    assert wheel.release_at_ms(before, LEAD_MS) <= now_ms < wheel.release_at_ms(filling, LEAD_MS)


@given(slots())
def test_slot_fills_until_it_closes_and_then_the_next_turn_fills(place):
    wheel, slot = place
    partition, closes_ms = wheel.partitions_of(slot)[0], wheel.release_at_ms(slot, LEAD_MS)
    at = [
        wheel.current_slot(slot.level, partition, each, LEAD_MS)
        for each in (closes_ms - 1, closes_ms)
    ]
    assert at == [slot, Slot(slot.level, slot.number + wheel.ring)]


@given(slots(), st.data())
def test_filled_from_separates_a_slot_from_the_turn_before(place, data):
    wheel, slot = place
    due_ms = data.draw(st.integers(wheel.start_ms(slot), wheel.end_ms(slot) - 1))
    first = slot.number - wheel.reach(slot.level) + 1
    first_ms = wheel.start_ms(Slot(slot.level, first))
    before = Slot(slot.level, slot.number - wheel.ring)
    # No earlier than this can the slot's level be chosen for this due time ...
    number = wheel.number(slot.level, due_ms) - wheel.number(slot.level, first_ms - 1)
    assert number >= wheel.reach(slot.level)
    # ... and the age of a record tells the two turns apart, with room for clocks that differ.
    filled_ms, room_ms = wheel.earliest_append_ms(slot), wheel.width_ms(slot.level)
    assert wheel.end_ms(before) + room_ms <= filled_ms <= first_ms - room_ms


@given(journeys())
def test_the_slot_that_a_record_was_put_into_is_told_by_when_that_was(journey):
    wheel, now_ms, due_ms = journey
    slot = wheel.place(due_ms, now_ms)
    assert wheel.slot_filled(slot.level, wheel.partitions_of(slot)[0], now_ms) == slot


@given(slots())
def test_the_slot_that_is_filled_changes_at_filled_from(place):
    wheel, slot = place
    filled_ms, partition = wheel.earliest_append_ms(slot), wheel.partitions_of(slot)[0]
    at = [wheel.slot_filled(slot.level, partition, each) for each in (filled_ms - 1, filled_ms)]
    assert at == [Slot(slot.level, slot.number - wheel.ring), slot]


def test_the_worked_example_of_the_module():
    wheel, due_ms = Wheel(), 600_000
    slot = wheel.place(due_ms, 0)
    assert slot == Slot(1, 9)
    assert (wheel.start_ms(slot), wheel.end_ms(slot)) == (576_000, 640_000)
    assert wheel.cascade_at_ms(slot) == 556_000
    assert wheel.place(due_ms, 556_000) == Slot(0, 600)


def test_a_message_due_in_five_years_walks_every_level_in_five_hops():
    wheel, now_ms = Wheel(), 1_800_000_000_000
    hops = list(walk(wheel, now_ms, now_ms + 5 * YEAR_MS))
    assert [slot.level for _, slot in hops] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "shape",
    [{"tick_ms": 0}, {"slots": 1}, {"levels": 0}, {"slots": 8}, {"tick_ms": 100}, {"levels": 9}],
    ids=str,
)
def test_a_wheel_that_cannot_turn_is_refused(shape):
    with pytest.raises(ConfigError):
        Wheel(**shape)


def test_a_wheel_of_one_level_may_be_of_any_size():
    assert Wheel(slots=2, levels=1).place(1_999, 0) == Slot(0, 1)


SHARDS = st.lists(st.tuples(st.integers(10**12, 2 * 10**12), st.integers(1, 8)), max_size=3)


@given(st.text(), SHARDS, st.integers(0, 4), st.integers(10**12, 2 * 10**12))
def test_message_is_in_one_of_its_slots_own_partitions(identity, later, level, due_ms):
    wheel = Wheel(shards=((0, 2), *sorted(later)))
    slot = Slot(level, wheel.number(level, due_ms))
    partitions = wheel.partitions_of(slot)
    assert wheel.partition(slot, identity) in partitions
    assert [wheel.shard_of(each) for each in partitions] == list(range(wheel.shard_count(slot)))
    assert max(partitions) < wheel.partitions
    # Before a slot of level 0 is released, and a far one cascaded.
    now_ms = wheel.release_at_ms(slot, 0) - 1
    for each in partitions:
        assert wheel.current_slot(level, each, now_ms, 0) == slot


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**10), st.integers(0, 10**9))
def test_slot_keeps_its_partitions_when_others_get_more(before, after, ahead_ms, age_ms):
    """What was routed before the change is found by who knows of it."""
    since_ms = 10**12
    old, new = Wheel(shards=((0, before),)), Wheel(shards=((0, before), (since_ms, after)))
    routed_ms = since_ms - 1 - age_ms
    slot = old.place(routed_ms + ahead_ms, routed_ms)
    assert new.partition(slot, "m") == old.partition(slot, "m")
    assert new.partitions_of(slot) == old.partitions_of(slot)


def test_new_slots_have_the_new_partitions_at_once():
    since_ms = 10**12
    wheel = Wheel(shards=((0, 1), (since_ms, 4)))
    first = wheel.number(0, since_ms) + wheel.reach(0)
    assert [wheel.shard_count(Slot(0, first + each)) for each in (-1, 0)] == [1, 4]
