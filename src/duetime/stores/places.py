"""Which partition is which slot: the wheel's arithmetic, in the names of Kafka's topics."""

from duetime.config import Settings
from duetime.stores import DueTimes
from duetime.topics import TopicNames
from duetime.wheel import Slot

#: A partition of a topic.
Place = tuple[str, int]


class WheelPlaces:
    """The wheel's partitions under these settings."""

    def __init__(self, settings: Settings) -> None:
        self._names = TopicNames(settings)
        self._wheel = settings.wheel
        self._lead_ms = settings.lead_ms

    def all(self) -> list[Place]:
        """Every partition of the wheel."""
        levels = range(self._wheel.levels)
        ring = range(self._wheel.ring)
        return [(self._names.wheel(level), each) for level in levels for each in ring]

    def of(self, slot: Slot) -> Place:
        """Where this slot is."""
        return self._names.wheel(slot.level), self._wheel.partition(slot)

    def covering(self, instant_ms: int) -> list[Place]:
        """On each level, the partition whose slot covers the instant."""
        levels = range(self._wheel.levels)
        return [self.of(Slot(level, self._wheel.number(level, instant_ms))) for level in levels]

    def slot_filling(self, place: Place, now_ms: int) -> Slot:
        """The first slot in the partition that is not taken up yet."""
        level, partition = _level_and_partition(place)
        return self._wheel.slot_filling(level, partition, now_ms, self._lead_ms)

    def rests(self, place: Place, now_ms: int, ms: int) -> bool:
        """Return whether no slot of the partition is taken up within so many ms."""
        slot = self.slot_filling(place, now_ms)
        return self._wheel.closes_at_ms(slot, self._lead_ms) > now_ms + ms

    def left_over(self, place: Place, appended_ms: int, now_ms: int) -> DueTimes:
        """When messages are due that the partition should not hold any more.

        The first of them was appended then. Each is of a turn of the ring before the present one.
        """
        level, partition = _level_and_partition(place)
        first = self._wheel.slot_filled(level, partition, appended_ms)
        last = Slot(level, self.slot_filling(place, now_ms).number - self._wheel.ring)
        return DueTimes(self._wheel.start_ms(first), self._wheel.end_ms(last))


def _level_and_partition(place: Place) -> tuple[int, int]:
    topic, partition = place
    return int(topic.rpartition(".")[2]), partition
