"""The timer wheel and the delay lanes: the slot or lane of a due time, in integers.

The wheel. Time is cut into slots, and a slot is a Kafka partition, or several of them. Level 0 has
slots of one tick (1 s); a slot of a higher level is as wide as 64 slots of the level below:

    level   a slot is       64 slots reach
    0       1 s             64 s
    1       64 s            68 min
    2       68 min          3 days
    3       3 days          194 days
    4       194 days        34 years

A message goes to the lowest level that reaches its due time. Before a far slot's time begins, its
records are *cascaded*: routed again, now that lower levels reach them. So a message that is due in
five years is written at most five times, and nothing is read before its time.

Worked example, ticks of 1 s. At 00:00:00 a message due at 00:10:00 (600 s) comes in. Level 0
reaches 88 slots ahead, so it is too far; on level 1 it belongs to slot 600 // 64 = 9, which covers
576 s to 640 s. At 556 s slot 9 is cascaded: the message is 44 s away and goes to slot 600 of level
0, which is released at 600 s.

Why 88 and not 64: a far slot covers 64 s and is cascaded a little *before* it begins, so the level
below must reach a little further than 64 slots (`overlap`). A slot is cascaded when nothing new can
be routed to it any more, which the same overlap decides. Higher levels reach 68 slots: so a cascade
has 20 s on level 1, and on others 4 slots of the level below. And why 128 partitions a level and
not 64: slot numbers are taken modulo `ring`, and while one half of the ring is being filled, what
was written late into the other half can still be told apart by its age.

A slot may have several partitions, called *shards*, for more messages a second than one task sends.
A message goes to the shard of its id's hash, so that its cancels and its copies meet it there:
partition `slot % ring + ring x shard`. The number of shards may change at an instant: a slot that
messages could be routed to before it keeps the number that it had, and drains as it was.

The lanes. A lane is one partition in which every record waits for the same time, so that first in
is first out and nothing is sorted or held in memory. A message that is due soon goes down the lanes
like down a ladder:

    rung    lanes wait
    0       1..7 x 4 ms
    1       1..7 x 32 ms
    2       1..7 x 256 ms

It takes the longest wait that fits into the remaining time, is routed again, and so on. A remainder
below 4 ms is slept off on the way to the destination. Worked example: 1,000 ms = 3 x 256 (768) + 7
x 32 (224) + 2 x 4 (8): three lanes. Beyond 2,044 ms the longest lane (1,792 ms) is taken more than
once.

Source: Varghese and Lauck, "Hashed and hierarchical timing wheels" (1987); Kafka's
TimingWheel.java. `duetime.spark.columns` has the same arithmetic as Spark columns.
"""

import zlib
from dataclasses import dataclass

from duetime.core.clock import format_duration
from duetime.core.errors import ConfigError, InvalidMessage, Reason
from duetime.core.messages import LATEST_MS

#: The time that a record may take from the routing decision to its partition, in ms. A far slot is
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
    #: (epoch ms, partitions of a slot that is new since then), in order; the first from the start.
    shards: tuple[tuple[int, int], ...] = ((0, 1),)

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
        """Slots per level: two turns, so that late records differ from the next turn's."""
        return 2 * self.slots

    @property
    def partitions(self) -> int:
        """Partitions per level."""
        return self.ring * max(count for _, count in self.shards)

    def overlap(self, level: int) -> int:
        """Return how many slots a level reaches beyond one slot of the level above."""
        return self.slots * 3 // 8 if level == 0 else max(1, self.slots // 16)

    def reach(self, level: int) -> int:
        """Return how many slots ahead of the current one a level takes messages."""
        return self.slots + self.overlap(level)

    def width_ms(self, level: int) -> int:
        """Return the width of a slot of this level."""
        return int(self.tick_ms * self.slots**level)

    def filled_ms(self, level: int) -> int:
        """Return the longest time for which a partition of this level is filled for one slot."""
        return self.reach(level) * self.width_ms(level)

    def span_ms(self) -> int:
        """Return the longest delay that fits at any moment."""
        last = self.levels - 1
        return (self.reach(last) - 1) * self.width_ms(last)

    def number(self, level: int, instant_ms: int) -> int:
        """Return the number of the slot of this level that covers the instant."""
        return instant_ms // self.width_ms(level)

    def place(self, due_ms: int, now_ms: int) -> Slot:
        """Return the slot for a message that is due at `due_ms` and routed at `now_ms`.

        Raises InvalidMessage (delay-too-long) where no level reaches it: a due time never wraps.
        """
        self.check_reach(due_ms, now_ms)
        level = next(each for each in range(self.levels) if self._reaches(each, due_ms, now_ms))
        return Slot(level, self.number(level, due_ms))

    def higher_slots(self, due_ms: int, now_ms: int) -> list[Slot]:
        """Return the far slots, above `place`, where an earlier routing may have put a message.

        A cancel is routed to each of them too, so that it meets its message even if a cascade is
        late.
        """
        levels = range(self.place(due_ms, now_ms).level + 1, self.levels)
        slots = (Slot(level, self.number(level, due_ms)) for level in levels)
        return [each for each in slots if now_ms < self.accepts_until_ms(each)]

    def check_reach(self, due_ms: int, now_ms: int) -> None:
        """Raise InvalidMessage (delay-too-long) where no level reaches the due time."""
        if not self._reaches(self.levels - 1, due_ms, now_ms):
            raise InvalidMessage(
                Reason.DELAY_TOO_LONG,
                f"due in {format_duration(due_ms - now_ms)}, and the wheel ends after "
                f"{format_duration(self.span_ms())}: "
                "choose an earlier time, or configure more wheel_levels",
            )

    def _reaches(self, level: int, due_ms: int, now_ms: int) -> bool:
        return self.number(level, due_ms) - self.number(level, now_ms) < self.reach(level)

    def shard_count(self, slot: Slot) -> int:
        """Return how many partitions the slot has."""
        counts = [count for first, count in self.shard_counts(slot.level) if slot.number >= first]
        return counts[-1]

    def shard_counts(self, level: int) -> list[tuple[int, int]]:
        """Return (first slot number, partitions of a slot) for the level, in order.

        A slot keeps the number that it had when the first message could be routed to it.
        """
        (_, first), *later = self.shards
        reach = self.reach(level)
        return [
            (0, first),
            *((self.number(level, since_ms) + reach, count) for since_ms, count in later),
        ]

    def partition(self, slot: Slot, message_id: str) -> int:
        """Return the partition of the level's topic for a message of the slot."""
        return self._partition(slot, zlib.crc32(message_id.encode()) % self.shard_count(slot))

    def partitions_of(self, slot: Slot) -> list[int]:
        """Return the partitions of the level's topic that hold the slot."""
        return [self._partition(slot, each) for each in range(self.shard_count(slot))]

    def shard_of(self, partition: int) -> int:
        """Return the shard that a partition holds."""
        return partition // self.ring

    def _partition(self, slot: Slot, shard: int) -> int:
        return slot.number % self.ring + self.ring * shard

    def start_ms(self, slot: Slot) -> int:
        """Return the first instant of the slot."""
        return slot.number * self.width_ms(slot.level)

    def end_ms(self, slot: Slot) -> int:
        """Return the end of the slot; the instant itself belongs to the next one."""
        return self.start_ms(slot) + self.width_ms(slot.level)

    def accepts_until_ms(self, slot: Slot) -> int:
        """Return when routing to this far slot ends, because the level below reaches it."""
        below = slot.level - 1
        return self.start_ms(slot) - self.overlap(below) * self.width_ms(below)

    def cascade_at_ms(self, slot: Slot) -> int:
        """Return when this far slot can be cascaded, because all its records have arrived."""
        return self.accepts_until_ms(slot) + GRACE_MS

    def release_at_ms(self, slot: Slot, release_lead_ms: int) -> int:
        """Return when a slot is cascaded, or on level 0 planned `release_lead_ms` ahead."""
        if slot.level == 0:
            return self.start_ms(slot) - release_lead_ms
        return self.cascade_at_ms(slot)

    def current_slot(self, level: int, partition: int, now_ms: int, release_lead_ms: int) -> Slot:
        """Return the first slot in this partition that is not closed at `now_ms`."""
        now_number = self.number(level, now_ms)
        slot = Slot(level, now_number + (partition - now_number) % self.ring)
        while self.release_at_ms(slot, release_lead_ms) <= now_ms:
            slot = Slot(level, slot.number + self.ring)
        return slot

    def slot_filled(self, level: int, partition: int, appended_ms: int) -> Slot:
        """Return the slot of this partition that was filled then; see `earliest_append_ms`."""
        spare = self.ring - self.reach(level)
        last = self.number(level, appended_ms) + self.reach(level) - 1 + spare // 2
        return Slot(level, last - (last - partition) % self.ring)

    def earliest_append_ms(self, slot: Slot) -> int:
        """Return an instant before which records were appended for earlier turns of the ring only.

        It is half of the ring's spare slots away from either turn, so that clocks may differ by as
        much.
        """
        spare = self.ring - self.reach(slot.level)
        first = slot.number - self.reach(slot.level) + 1 - spare // 2
        return first * self.width_ms(slot.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLanes:
    """The lanes: waits of m x `unit_ms` x `base`**rung, for m from 1 to base - 1."""

    unit_ms: int = 4
    base: int = 8
    rungs: int = 3

    def __post_init__(self) -> None:
        if self.unit_ms < 1 or self.base < 2 or self.rungs < 1:
            raise ConfigError("delay lanes need unit_ms >= 1, base >= 2 and rungs >= 1")

    @property
    def lanes(self) -> int:
        """The number of lanes, that is of partitions."""
        return self.rungs * (self.base - 1)

    def step_ms(self, rung: int) -> int:
        """Return the shortest wait of a rung; its other waits are multiples of it."""
        return int(self.unit_ms * self.base**rung)

    def wait_ms(self, lane: int) -> int:
        """Return the time that a record waits in this lane."""
        rung, multiple = divmod(lane, self.base - 1)
        return (multiple + 1) * self.step_ms(rung)

    def lane(self, remaining_ms: int) -> int | None:
        """Return the lane with the longest wait that fits; None if not even the shortest does."""
        for rung in reversed(range(self.rungs)):
            if remaining_ms >= self.step_ms(rung):
                multiple = min(remaining_ms // self.step_ms(rung), self.base - 1)
                return rung * (self.base - 1) + multiple - 1
        return None
