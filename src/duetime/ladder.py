"""The ladder: how long each lane makes a record wait.

A lane is one partition in which every record waits the same time, so that first in is first out and
nothing is sorted or kept in memory. A message that is due soon goes down the lanes like a ladder:

    rung    lanes wait
    0       1..7 x 4 ms
    1       1..7 x 32 ms
    2       1..7 x 256 ms

It takes the longest wait that fits in what remains, is looked at again, and so on. What is left
below 4 ms is slept off on the way to the destination. Worked example: 1,000 ms = 3 x 256 (768) + 7
x 32 (224) + 2 x 4 (8): three lanes. Beyond 2,044 ms the longest lane (1,792 ms) is taken more than
once.
"""

from dataclasses import dataclass

from duetime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The lanes: `unit_ms` times `base` to the power of the rung, times 1 to base - 1."""

    unit_ms: int = 4
    base: int = 8
    rungs: int = 3

    def __post_init__(self) -> None:
        if self.unit_ms < 1 or self.base < 2 or self.rungs < 1:
            raise ConfigError("a ladder needs unit_ms >= 1, base >= 2 and rungs >= 1")

    @property
    def lanes(self) -> int:
        """How many lanes, that is partitions, there are."""
        return self.rungs * (self.base - 1)

    def step_ms(self, rung: int) -> int:
        """The shortest wait of a rung, in ms; its other waits are multiples of it."""
        return int(self.unit_ms * self.base**rung)

    def wait_ms(self, lane: int) -> int:
        """How long a record waits in this lane, in ms."""
        rung, multiple = divmod(lane, self.base - 1)
        return (multiple + 1) * self.step_ms(rung)

    def lane(self, remaining_ms: int) -> int | None:
        """The lane with the longest wait that fits; None where even the shortest is too long."""
        for rung in reversed(range(self.rungs)):
            if remaining_ms >= self.step_ms(rung):
                multiple = min(remaining_ms // self.step_ms(rung), self.base - 1)
                return rung * (self.base - 1) + multiple - 1
        return None
