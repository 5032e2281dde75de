"""What Prometheus is told of each queue: from the tracker's notes, and the ends of dead letters.

Read from Kafka and not told by the tracker: that sleeps while nothing is overdue, and the oldest
message grows older all the same, above all where the tracker stands still.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from duetime import metrics
from duetime.clock import Clock
from duetime.config import Settings
from duetime.kmq.notes import Note, Notes
from duetime.stores.offsets import Offsets


@dataclass(slots=True)
class Counted:
    """What was counted of a queue so far."""

    #: How often a message was delivered again or given up, ever.
    out: int
    #: How many were given up, ever.
    dead: int
    #: Redeliveries that are not told yet; below 0 where a dead letter is not noted yet.
    untold: int = 0

    def more(self, out: int, dead: int) -> tuple[int, int]:
        """How many more were delivered again, and given up. Never too many."""
        more_dead = more_than(self.dead, dead)
        self.untold += more_than(self.out, out) - more_dead
        # A topic that cannot be looked at for once has none: its letters are not new after that.
        self.out, self.dead = out, dead or self.dead
        redelivered = max(0, self.untold)
        self.untold -= redelivered
        return redelivered, more_dead


class QueueHealth:
    """Looks at all queues. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        offsets: Offsets,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        """`tell` says what only one that leads can say, or does not. Raises KafkaError."""
        self._clock, self._offsets, self._tell = clock, offsets, tell
        self._dead = {name: own.dead_topic(name) for name, own in settings.queues.items()}
        self._notes = Notes(settings)
        self._counted = {
            queue: Counted(note.out, dead) for queue, (note, dead) in self._known().items()
        }

    def look(self) -> None:
        """Look once. Raises KafkaError."""
        now_ms = self._clock.now_ms()
        for queue, (note, dead) in self._known().items():
            self._tell(partial(_say, queue, note, now_ms))
            more_out, more_dead = self._counted[queue].more(note.out, dead)
            metrics.QUEUE_REDELIVERED.labels(queue).inc(more_out)
            metrics.QUEUE_DEAD.labels(queue).inc(more_dead)

    def close(self) -> None:
        """Close the connection."""
        self._notes.close()

    def _known(self) -> dict[str, tuple[Note, int]]:
        """Of each queue, what is noted, and how many dead letters it ever had."""
        # In this order: a letter is there before it is noted, and counts for no redelivery.
        notes = {queue: self._notes.of(queue) for queue in self._dead}
        ends = self._offsets.appended(self._dead.values())
        return {queue: (note, ends[self._dead[queue]] or 0) for queue, note in notes.items()}


def _say(queue: str, note: Note, now_ms: int) -> None:
    oldest_ms = now_ms if note.oldest_ms is None else min(note.oldest_ms, now_ms)
    metrics.QUEUE_IN_FLIGHT.labels(queue).set(note.open)
    metrics.QUEUE_OLDEST_SECONDS.labels(queue).set((now_ms - oldest_ms) / 1_000)


def forget() -> None:
    """Take back what only the one that leads can say."""
    metrics.QUEUE_IN_FLIGHT.clear()
    metrics.QUEUE_OLDEST_SECONDS.clear()


def more_than(before: int, now: int) -> int:
    """How many more there are now, by a count that begins anew with what is made anew."""
    return now - before if now >= before else now
