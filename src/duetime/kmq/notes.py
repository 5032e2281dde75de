"""What the tracker knows of each partition, noted where everybody can read it.

The consumer group `duetime.redelivery` commits, on a queue's markers topic, the first start marker
that still counts, as kmq's tracker does; and with it a note in JSON. The tracker itself goes on
from its checkpoint.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How often is logged what was redelivered, in seconds.
TELL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is known of a partition, or of a whole queue."""

    #: Messages that somebody works on, or did when he was last heard of.
    open: int = 0
    #: Since when the oldest of them is, epoch ms; None where there is none.
    oldest_ms: int | None = None
    #: How often a message was delivered again or given up, ever.
    out: int = 0
    #: When the tracker is to look again, epoch ms; None where nothing is open.
    next_ms: int | None = None

    def text(self) -> str:
        """For a commit."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | None) -> Self:
        """What a commit says."""
        return cls(**json.loads(text)) if text else cls()

    def __add__(self, other: "Note") -> "Note":
        return Note(
            open=self.open + other.open,
            oldest_ms=_first(self.oldest_ms, other.oldest_ms),
            out=self.out + other.out,
            next_ms=_first(self.next_ms, other.next_ms),
        )


class Notes:
    """The notes of all queues, by the partitions of their markers topics. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._offsets = Offsets(settings, TopicNames(settings).redelivery_group)
        self._known: dict[Place, Note] = {}
        self._told = Note()
        self._told_s = time.monotonic()

    def of(self, queue: str) -> Note:
        """Of a whole queue, as of the last note. Raises KafkaError."""
        notes = self._offsets.notes(self._places(queue))
        return sum((Note.of(text) for text in notes.values()), Note())

    def note(self, rows: Iterable[Any]) -> None:
        """Note what a batch of the tracker has found."""
        found = {self._place(row): row for row in rows if row.offset is None}
        try:
            self._learn(found)
            for row in rows:
                if row.offset is not None:
                    self._known[self._place(row)] += Note(out=1)
            for place, row in found.items():
                known = self._known[place]
                self._known[place] = replace(
                    known, open=row.open, oldest_ms=row.oldest_ms, next_ms=row.next_ms
                )
            self._commit({place: row.position for place, row in found.items()})
        except KafkaError as error:
            # They are for people, and no reason to repeat a batch; the next one notes them again.
            log.warning("could not note how queues are doing: %s", error)
        self._tell()

    def next_ms(self) -> dict[Place, int | None]:
        """When to look again at each partition, as of what is noted. Raises KafkaError."""
        self._learn(place for queue in self._settings.queues for place in self._places(queue))
        return {place: note.next_ms for place, note in self._known.items()}

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _learn(self, places: Iterable[Place]) -> None:
        """What others have counted before us."""
        unknown = [place for place in places if place not in self._known]
        if unknown:
            notes = self._offsets.notes(unknown)
            learned = {place: Note.of(notes.get(place)) for place in unknown}
            self._told = sum(learned.values(), self._told)
            self._known |= learned

    def _commit(self, positions: Mapping[Place, int]) -> None:
        texts = {place: self._known[place].text() for place in positions}
        self._offsets.commit(positions, texts)

    def _tell(self) -> None:
        if time.monotonic() < self._told_s + TELL_S:
            return
        self._told_s = time.monotonic()
        total = sum(self._known.values(), Note())
        if more := total.out - self._told.out:
            log.info("redelivered messages=%d open=%d", more, total.open)
        self._told = total

    def _place(self, row: Any) -> Place:  # noqa: ANN401 (Spark's Row)
        return self._settings.queues[row.topic].markers_topic(row.topic), row.partition

    def _places(self, queue: str) -> list[Place]:
        own = self._settings.queues[queue]
        return [(own.markers_topic(queue), each) for each in range(own.partitions)]


def _first(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
