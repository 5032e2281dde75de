"""The series of messages that come again, as a compacted topic has them: by name, as they are now.

What is said of a series, and when its next run is due, comes as records of one partition, in the
order in which it is to be heard. `Book` follows them, and says of each record what it leads to.
Times are the records' own, so whoever hears the same again says the same again.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from duetime.config import Settings
from duetime.errors import InvalidMessage, Reason
from duetime.message import DEFINE, NEXT, OF_SERIES, PAUSE, RECURRENCE, STOP
from duetime.recurrence import LEAD_MS, Recurrence
from duetime.stores.offsets import whole
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
    #: It begins then, epoch ms; 0 where whoever wrote it down did not say.
    start_ms: int = 0

    @property
    def recurrence(self) -> Recurrence:
        """When it comes. Raises InvalidMessage (bad-cron, bad-zone)."""
        texts = (self.cron, self.zone, self.until, self.misfire)
        return Recurrence.parse(dict(zip(RECURRENCE, texts, strict=True)))

    def next_ms(self, now_ms: int) -> int | None:
        """When it comes next, epoch ms; None where it is paused, or over."""
        return None if self.is_paused else self.recurrence.first(max(now_ms, self.start_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A record of the recurring topic, without what is to be sent."""

    offset: int
    #: When it came there, epoch ms.
    at_ms: int
    #: DEFINE, NEXT, or one of OF_SERIES; None of what is none of duetime's.
    operation: str | None
    #: The series as it is defined, of a definition; of others its name and `since` count.
    series: Series
    #: When a definition is due: its series begins then; epoch ms.
    due_ms: int
    #: The run that is to be sent on its way, epoch ms; of NEXT alone.
    next_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a record leads to: a run, another look, or a refusal."""

    offset: int
    #: RUN, NEXT or REFUSED.
    kind: str
    #: The run, epoch ms; 0 of a refusal.
    run_ms: int = 0
    reason: str = ""
    detail: str = ""


RUN, REFUSED = "run", "refused"


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
        now, before = (Series(**each) if each else None for each in (found["now"], found["before"]))
        return cls(now, before, found["batch"])


@dataclass(slots=True)
class Book:
    """All series by their names; heard batch by batch."""

    pages: dict[str, Page] = field(default_factory=dict)

    def heard(self, batch: Iterable[Said]) -> tuple[list[Outcome], dict[str, Page]]:
        """What the records of a batch lead to, in order, and the pages that they change.

        Nothing is changed here: see `note`.
        """
        said = sorted(batch, key=lambda each: each.offset)
        first = said[0].offset if said else -1
        before, now = dict[str, Series | None](), dict[str, Series | None]()
        outcomes = list[Outcome]()
        for each in said:
            name = each.series.name
            if name not in before:
                before[name] = now[name] = self._before(name, first)
            now[name] = _after(each, now[name], outcomes)
        changed = {name for name, series in now.items() if series != before[name]}
        return outcomes, {name: Page(now[name], before[name], first) for name in changed}

    def note(self, pages: Mapping[str, Page]) -> None:
        """Keep these, once they are written down."""
        self.pages |= pages

    def _before(self, name: str, batch: int) -> Series | None:
        page = self.pages.get(name)
        if page is None:
            return None
        return page.before if page.batch == batch else page.now


def read_book(settings: Settings) -> Book:
    """The book as the topic has it now. Raises KafkaError."""
    pages = dict[str, Page]()
    with RangeReader(settings) as reader:
        for record in reader.records([whole(settings, TopicNames(settings).series)]):
            if (value := record.value()) is not None:
                pages[(record.key() or b"").decode()] = Page.decoded(value)
    return Book(pages)


def _after(said: Said, series: Series | None, outcomes: list[Outcome]) -> Series | None:
    """The series after this was said; what follows from it is added to the outcomes."""
    if said.operation == DEFINE:
        return _defined(said, series, outcomes)
    if said.operation == NEXT:
        # What was defined anew or stopped meanwhile has another next one, or none.
        if series and series.since == said.series.since and said.next_ms is not None:
            outcomes += _runs(said, series, said.next_ms)
        return series
    if said.operation not in OF_SERIES:
        detail = "no record of a series: who wrote it?"
        outcomes.append(Outcome(said.offset, REFUSED, 0, Reason.UNREADABLE, detail))
        return series
    if series is None or said.operation == STOP:
        return None
    return replace(series, is_paused=said.operation == PAUSE)


def _defined(said: Said, was: Series | None, outcomes: list[Outcome]) -> Series | None:
    # A pause is its operator's: whoever sends the series once more does not end it.
    is_paused = was is not None and was.is_paused
    new = replace(said.series, start_ms=said.due_ms, is_paused=is_paused)
    # The runs up to there are on their way, as they were said before.
    from_ms = max(said.due_ms, said.at_ms + LEAD_MS + 1) if was else said.due_ms
    try:
        first_ms = new.recurrence.first(from_ms)
    except InvalidMessage as error:
        outcomes.append(Outcome(said.offset, REFUSED, 0, error.reason, error.detail))
        return was
    if first_ms is None:
        detail = f"{new.cron!r} never comes before its end, or at all: nothing is to be sent"
        outcomes.append(Outcome(said.offset, REFUSED, 0, Reason.BAD_CRON, detail))
        return was
    outcomes += _runs(said, new, first_ms)
    return new


def _runs(said: Said, series: Series, next_ms: int) -> Iterator[Outcome]:
    runs = series.recurrence.runs(next_ms, said.at_ms)
    if not series.is_paused:
        for run_ms in runs.due_ms:
            yield Outcome(said.offset, RUN, run_ms)
    if runs.next_ms is not None:
        yield Outcome(said.offset, NEXT, runs.next_ms)
