"""The wheel: which slot a due time belongs to, in whole numbers and nothing else.

Time is cut into slots, and a slot is one Kafka partition. Level 0 has slots of one tick (1 s); a
slot of a higher level is as wide as 64 slots of the level below:

    level   a slot is       64 slots reach
    0       1 s             64 s
    1       64 s            68 min
    2       68 min          3 days
    3       3 days          194 days
    4       194 days        34 years

A message goes to the lowest level that reaches its due time. Before a far slot's time begins, its
records are *cascaded*: routed again, now that lower levels reach them. So a message that is due in
five years is written at most five times, and nothing is looked at before its time.

Worked example, ticks of 1 s. At 00:00:00 a message due at 00:10:00 (600 s) comes in. Level 0
reaches 88 slots ahead, so it is too far; on level 1 it belongs to slot 600 // 64 = 9, which covers
576 s to 640 s. At 556 s slot 9 is cascaded: the message is 44 s away and goes to slot 600 of level
0, which is released at 600 s.

Why 88 and not 64: a far slot covers 64 s and is cascaded a little *before* it begins, so the level
below must reach a little further than 64 slots (`overlap`). A slot is cascaded when nothing new can
be routed to it any more, which the same overlap decides. Higher levels reach 68 slots: so a cascade
has 20 s on level 1, and on others 4 slots of the level below. And why 128 partitions a level and
not 64: slot numbers are taken modulo `ring`, and while the ring's one half is being filled, what
was written late into the other half can still be told apart by its age.

Source: Varghese and Lauck, "Hashed and hierarchical timing wheels" (1987); Kafka's
TimingWheel.java.
"""

from dataclasses import dataclass

from duetime.clock import format_duration
from duetime.errors import ConfigError, InvalidMessage, Reason
from duetime.message import LATEST_MS

#: How long a record may take from the routing decision to its partition, in ms. A far slot is
#: cascaded this long after the last moment at which something could be routed to it.
GRACE_MS = 4_000


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One stretch of time on one level; `number` counts slots since the epoch."""

    level: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """The shape of the wheel. Every instant and duration is in milliseconds."""

    tick_ms: int = 1_000
    slots: int = 64
    levels: int = 5

    def __post_init__(self) -> None:
        if self.tick_ms < 1 or self.slots < 2 or self.levels < 1:
            raise ConfigError("a wheel needs tick_ms >= 1, slots >= 2 and levels >= 1")
        if self.levels > 1 and self.overlap(0) * self.tick_ms <= GRACE_MS:
            raise ConfigError(
                f"3/8 of the slots, rounded down, x tick_ms must be over {GRACE_MS} ms, or a far "
                "slot could not be cascaded in time: raise wheel_slots or wheel_tick_ms"
            )
        if self.width_ms(self.levels - 1) > LATEST_MS:
            raise ConfigError("a slot would be wider than all time: lower wheel_levels")

    @property
    def ring(self) -> int:
        """Partitions a level: two turns, so that late records are told from the next turn's."""
        return 2 * self.slots

    def overlap(self, level: int) -> int:
        """How many slots a level reaches beyond one slot of the level above."""
        return self.slots * 3 // 8 if level == 0 else max(1, self.slots // 16)

    def reach(self, level: int) -> int:
        """How many slots ahead of the present one a level takes messages."""
        return self.slots + self.overlap(level)

    def width_ms(self, level: int) -> int:
        """How long a slot of this level is."""
        return int(self.tick_ms * self.slots**level)

    def filled_ms(self, level: int) -> int:
        """How long a partition of this level is filled for one slot, at most."""
        return self.reach(level) * self.width_ms(level)

    def span_ms(self) -> int:
        """The longest delay that certainly fits."""
        last = self.levels - 1
        return (self.reach(last) - 1) * self.width_ms(last)

    def number(self, level: int, instant_ms: int) -> int:
        """The number of the slot of this level that covers the instant."""
        return instant_ms // self.width_ms(level)

    def place(self, due_ms: int, now_ms: int) -> Slot:
        """Where a message due then belongs if it is routed now.

        Raises InvalidMessage (beyond-wheel) where no level reaches it: a due time is never wrapped.
        """
        self.check_reach(due_ms, now_ms)
        level = next(each for each in range(self.levels) if self._reaches(each, due_ms, now_ms))
        return Slot(level, self.number(level, due_ms))

    def open_above(self, due_ms: int, now_ms: int) -> list[Slot]:
        """Where else what is due then may wait, which was routed before: far slots to be cascaded.

        On the levels above that of `place`. A cancel goes there, too: so it is beside its message
        whatever holds up the cascade between the two.
        """
        levels = range(self.place(due_ms, now_ms).level + 1, self.levels)
        slots = (Slot(level, self.number(level, due_ms)) for level in levels)
        return [each for each in slots if now_ms < self.routed_until_ms(each)]

    def check_reach(self, due_ms: int, now_ms: int) -> None:
        """Raise InvalidMessage (beyond-wheel) where no level reaches it."""
        if not self._reaches(self.levels - 1, due_ms, now_ms):
            raise InvalidMessage(
                Reason.BEYOND_WHEEL,
                f"due in {format_duration(due_ms - now_ms)}, and the wheel ends after "
                f"{format_duration(self.span_ms())}: "
                "choose an earlier time, or configure more wheel_levels",
            )

    def _reaches(self, level: int, due_ms: int, now_ms: int) -> bool:
        width_ms = self.width_ms(level)
        return due_ms // width_ms - now_ms // width_ms < self.reach(level)

    def partition(self, slot: Slot) -> int:
        """The partition of the level's topic that holds the slot."""
        return slot.number % self.ring

    def start_ms(self, slot: Slot) -> int:
        """When the slot's time begins."""
        return slot.number * self.width_ms(slot.level)

    def end_ms(self, slot: Slot) -> int:
        """When the slot's time ends; the instant itself belongs to the next slot."""
        return self.start_ms(slot) + self.width_ms(slot.level)

    def routed_until_ms(self, slot: Slot) -> int:
        """Until when something may be routed to this far slot: then the level below reaches it."""
        below = slot.level - 1
        return self.start_ms(slot) - self.overlap(below) * self.width_ms(below)

    def cascade_at_ms(self, slot: Slot) -> int:
        """When everything that was routed to this far slot is there, so that it can be cascaded."""
        return self.routed_until_ms(slot) + GRACE_MS

    def closes_at_ms(self, slot: Slot, lead_ms: int) -> int:
        """When the slot is taken up: cascaded, or on level 0 planned `lead_ms` ahead."""
        return self.start_ms(slot) - lead_ms if slot.level == 0 else self.cascade_at_ms(slot)

    def slot_filling(self, level: int, partition: int, now_ms: int, lead_ms: int) -> Slot:
        """The first slot in this partition that is not taken up yet at `now_ms`."""
        now_number = self.number(level, now_ms)
        slot = Slot(level, now_number + (partition - now_number) % self.ring)
        while self.closes_at_ms(slot, lead_ms) <= now_ms:
            slot = Slot(level, slot.number + self.ring)
        return slot

    def filled_from_ms(self, slot: Slot) -> int:
        """An instant before which nothing was appended for this slot, only for an earlier turn.

        Half of the ring's spare slots away from either, so that clocks may differ by as much.
        """
        spare = self.ring - self.reach(slot.level)
        first = slot.number - self.reach(slot.level) + 1 - spare // 2
        return first * self.width_ms(slot.level)

    def slot_filled(self, level: int, partition: int, appended_ms: int) -> Slot:
        """The slot of this partition that was being filled then: the other way round."""
        spare = self.ring - self.reach(level)
        last = self.number(level, appended_ms) + self.reach(level) - 1 + spare // 2
        return Slot(level, last - (last - partition) % self.ring)
