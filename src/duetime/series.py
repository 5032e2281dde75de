"""The series of messages that come again, as a compacted topic has them: by name, as they are now.

A page of it is what is known of one name; `hearing` says what is written there.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from duetime.config import Settings
from duetime.errors import InvalidMessage
from duetime.message import LATEST_MS, RECURRENCE
from duetime.recurrence import LEAD_MS, Recurrence
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import RangeReader
from duetime.topics import TopicNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A message that comes again, without what is in it."""

    name: str
    #: The id under which it was taken in.
    since: str
    topic: str
    cron: str
    zone: str | None = None
    #: Epoch ms, as the sender wrote it.
    until: str | None = None
    misfire: str | None = None
    partition: str | None = None
    cluster: str | None = None
    is_paused: bool = False
    #: When it went on after a pause, epoch ms, and the offset of what said so: what was said before
    #: leads to no run, also where it is heard once more and the pause is not there any more.
    resumed_ms: int = 0
    resumed_at: int = 0
    #: It begins then, epoch ms; 0 where whoever wrote it down did not say.
    start_ms: int = 0
    #: When it was stopped, or over, epoch ms; None while it goes on.
    ended_ms: int | None = None
    #: Those whose place it took that may come back: their `since`, and when that was, epoch ms.
    replaced: tuple[tuple[str, int], ...] = ()

    @property
    def recurrence(self) -> Recurrence:
        """When it comes. Raises InvalidMessage (bad-cron, bad-zone)."""
        texts = (self.cron, self.zone, self.until, self.misfire)
        return Recurrence.parse(dict(zip(RECURRENCE, texts, strict=True)))

    @property
    def until_ms(self) -> int | None:
        """No run is later than this, epoch ms; None where it has no end."""
        until_ms = int(self.until) if self.until else LATEST_MS
        return until_ms if until_ms < LATEST_MS else None

    def next_ms(self, now_ms: int) -> int | None:
        """The next run that is not on its way yet, epoch ms; None where it is paused, or over.

        And where its zone is not known on this machine.
        """
        if self.is_paused:
            return None
        try:
            return self.recurrence.first(max(now_ms + LEAD_MS + 1, self.start_ms))
        except InvalidMessage:
            return None


@dataclass(frozen=True, slots=True)
class Page:
    """What the topic has of one name: the series now, and before the batch that changed it."""

    now: Series | None
    before: Series | None = None
    #: The first offset of that batch: hearing it again begins with what was before.
    batch: int = -1

    def encoded(self) -> bytes:
        """As the topic has it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> "Page":
        """What `encoded` gave."""
        found = json.loads(text)
        now, before = (_series(each) if each else None for each in (found["now"], found["before"]))
        return cls(now, before, found["batch"])

    def is_over(self, at_ms: int) -> bool:
        """Whether it is of no more use: whatever has its name comes when its last run has come."""
        ended_ms = self.now.ended_ms if self.now else 0
        return ended_ms is not None and ended_ms + LEAD_MS < at_ms


@dataclass(slots=True)
class Book:
    """All series by their names; heard batch by batch."""

    pages: dict[str, Page] = field(default_factory=dict)

    def all(self) -> list[Series]:
        """Those that go on, by name."""
        return [each for name in sorted(self.pages) if (each := self.find(name))]

    def find(self, name: str) -> Series | None:
        """The one with this name; None where there is none, or it was stopped, or is over."""
        page = self.pages.get(name)
        return page.now if page and page.now and page.now.ended_ms is None else None

    def note(self, pages: Mapping[str, Page | None]) -> None:
        """Keep these, once they are written down."""
        for name, page in pages.items():
            if page:
                self.pages[name] = page
            else:
                self.pages.pop(name, None)


class Watched:
    """The book, as the topic has it from time to time. Holds connections: close it."""

    def __init__(self, settings: Settings) -> None:
        self._place = TopicNames(settings).series, 0
        self._open = ExitStack()
        offsets = Offsets(settings, f"{settings.namespace}.reader")
        self._offsets = self._open.enter_context(closing(offsets))
        self._reader = self._open.enter_context(RangeReader(settings))
        self._book, self._read = Book(), 0

    def now(self) -> Book:
        """As it is now: only what is new is read. Raises KafkaError."""
        end = self._offsets.ends([self._place])[self._place]
        for record in self._reader.records([OffsetRange(*self._place, self._read, end)]):
            name, value = (record.key() or b"").decode(), record.value()
            self._book.note({name: None if value is None else Page.decoded(value)})
        self._read = end
        return self._book

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def read_book(settings: Settings) -> Book:
    """The book as the topic has it now. Raises KafkaError."""
    with Watched(settings) as watched:
        return watched.now()


def _series(written: dict[str, Any]) -> Series:
    replaced = tuple((since, at_ms) for since, at_ms in written.get("replaced", ()))
    return Series(**written | {"replaced": replaced})
