"""What is said of series, and what follows from it: records in their order, nothing else.

What is said of a series, and when its next run is due, comes as records of one partition, in the
order in which it is to be heard. Times are the records' own, so whoever hears the same again says
the same again.

A series comes back LEAD_MS before each run, sends it on its way, and waits for the next. It carries
the instant after its last run, and the next one is computed when it comes back, by the rules that
its time zone has then. It comes back each WAKE_MS, too, so that changed rules are seen before the
run.

Whatever takes its place has the runs that are due later than LEAD_MS after that. In an outage one
may be replaced before it comes back, and what it has missed is still its own:

    11:59:45  down       the series waits for its run of 12:00
    12:05:00  up         it was sent anew meanwhile, and that is heard first: its runs are those
                         after 12:05:10
    12:05:02             the old one comes back, and sends what it has up to then: the run of 12:00
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from duetime.errors import InvalidMessage, Reason
from duetime.message import DEFINE, NEXT, OF_SERIES, PAUSE, STOP
from duetime.recurrence import LEAD_MS, MOST, Recurrence
from duetime.series import Book, Page, Series

#: The most runs that a batch leads to, about: each is a row that the driver makes.
BATCH_RUNS = 100_000

#: So much later a series is heard of again whose zone is not known on this machine, in ms.
AGAIN_MS = 60_000

#: The longest that a series waits without being computed again, in ms.
WAKE_MS = 30 * 86_400_000

#: How many of a name that are replaced are remembered: they come back some seconds later.
REPLACED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A record of the recurring topic, without what is to be sent."""

    offset: int
    #: When it came there, epoch ms.
    at_ms: int
    #: DEFINE, NEXT, or one of OF_SERIES; None of what is none of duetime's.
    operation: str | None
    #: The series as it is defined, or as it was when it was sent on its way; else its name counts.
    series: Series
    #: When a series that is defined begins, epoch ms.
    start_ms: int = 0
    #: The instant from which its next run is sought, epoch ms; of NEXT alone.
    next_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a record leads to: a run, another look, or a refusal."""

    offset: int
    #: RUN, NEXT or REFUSED.
    kind: str
    #: The run, epoch ms; of NEXT the instant from which the next run is sought; 0 of a refusal.
    run_ms: int = 0
    #: When it is due, epoch ms: a look at the next run is before that.
    due_ms: int = 0
    #: Why it is refused, or is looked at again and no run is sent.
    reason: str = ""
    detail: str = ""


RUN, REFUSED = "run", "refused"


def heard(book: Book, batch: Iterable[Said]) -> tuple[list[Outcome], dict[str, Page | None]]:
    """What the records of a batch lead to, in order, and the pages that they change.

    Of one that is over, the page is None in a later batch. The book is as it was: `note` them.
    """
    said = sorted(batch, key=lambda each: each.offset)
    if not said:
        return [], {}
    first, hearing = said[0].offset, Hearing(most=max(1, min(MOST, BATCH_RUNS // len(said))))
    before, now = dict[str, Series | None](), dict[str, Series | None]()
    for each in said:
        name = each.series.name
        if name not in before:
            before[name] = now[name] = _before(book, name, first)
        now[name] = hearing.after(each, now[name])
    changed = {name for name, series in now.items() if series != before[name]}
    pages = {name: Page(now[name], before[name], first) for name in changed}
    latest_ms = max(each.at_ms for each in said)
    over = {name for name, page in book.pages.items() if page.is_over(latest_ms)}
    return hearing.outcomes, dict.fromkeys(over - now.keys()) | pages


@dataclass(slots=True)
class Hearing:
    """Follows what is said in a batch."""

    #: So many runs are sent at a time.
    most: int
    outcomes: list[Outcome] = field(default_factory=list)

    def after(self, said: Said, series: Series | None) -> Series | None:
        """The series after this was said; what follows from it is added to the outcomes."""
        if said.operation == DEFINE:
            return self._defined(said, series)
        if said.operation not in (NEXT, *OF_SERIES):
            detail = "no record of a series: who wrote it?"
            return self._refused(said, series, Reason.UNREADABLE, detail)
        if series is None or series.ended_ms is not None:
            return series
        if said.operation == NEXT:
            return self._came_back(said, series, said.next_ms) if said.next_ms else series
        if said.operation == STOP:
            return replace(series, ended_ms=said.at_ms, replaced=())
        return _paused_or_resumed(series, said)

    def _defined(self, said: Said, was: Series | None) -> Series | None:
        before = was if was and was.ended_ms is None else None
        start_ms = max(said.start_ms, _free_from_ms(was, said.at_ms))
        new = _like(before, said) if before else said.series
        new = replace(new, start_ms=start_ms)
        try:
            first_ms = new.recurrence.first(start_ms)
        except InvalidMessage as error:
            return self._refused(said, was, error.reason, error.detail)
        if first_ms is None:
            detail = f"{new.cron!r} never comes before its end, or at all: nothing is to be sent"
            return self._refused(said, was, Reason.BAD_CRON, detail)
        return self._goes_on(said, new, start_ms)

    def _came_back(self, said: Said, series: Series, from_ms: int) -> Series:
        since, replaced = said.series.since, dict(series.replaced)
        try:
            if since == series.since:
                return self._goes_on(said, series, from_ms)
            if since in replaced:
                return self._left_over(said, series, from_ms, replaced[since] + LEAD_MS)
        except InvalidMessage as error:
            # With other time zones than those of the machine where it was defined.
            due_ms = said.at_ms + AGAIN_MS
            again = Outcome(said.offset, NEXT, from_ms, due_ms, error.reason, error.detail)
            self.outcomes.append(again)
        return series

    def _goes_on(self, said: Said, series: Series, from_ms: int) -> Series:
        is_left = self._send(said, series.recurrence, series, from_ms)
        return series if is_left else replace(series, ended_ms=said.at_ms)

    def _left_over(self, said: Said, series: Series, from_ms: int, until_ms: int) -> Series:
        """What is left of one that was replaced: it is on its way once more at most."""
        rest = tuple(each for each in series.replaced if each[0] != said.series.since)
        over = replace(series, replaced=rest)
        recurrence = said.series.recurrence
        recurrence = replace(recurrence, until_ms=min(recurrence.until_ms, until_ms))
        return series if self._send(said, recurrence, series, from_ms) else over

    def _send(self, said: Said, recurrence: Recurrence, series: Series, from_ms: int) -> bool:
        """Send the runs from an instant on that are to be sent now; returns whether more follow."""
        next_ms = recurrence.first(from_ms)
        if next_ms is None:
            return False
        runs = recurrence.runs(next_ms, said.at_ms, self.most)
        for run_ms in [] if _is_left_out(said, series) else runs.due_ms:
            self.outcomes.append(Outcome(said.offset, RUN, run_ms, run_ms))
        if runs.next_ms is None:
            return False
        if runs.due_ms:
            from_ms = runs.due_ms[-1] + 1
        due_ms = min(max(0, runs.next_ms - LEAD_MS), said.at_ms + WAKE_MS)
        self.outcomes.append(Outcome(said.offset, NEXT, from_ms, due_ms))
        return True

    def _refused(
        self, said: Said, series: Series | None, reason: str, detail: str
    ) -> Series | None:
        self.outcomes.append(Outcome(said.offset, REFUSED, reason=reason, detail=detail))
        return series


def _paused_or_resumed(series: Series, said: Said) -> Series:
    is_paused = said.operation == PAUSE
    if is_paused or not series.is_paused:
        return replace(series, is_paused=is_paused)
    return replace(series, is_paused=False, resumed_ms=said.at_ms, resumed_at=said.offset)


def _is_left_out(said: Said, series: Series) -> bool:
    # Not by offsets alone, because they begin anew where the topic is made anew; and not by times
    # alone, because two brokers' clocks differ.
    was_paused = said.at_ms <= series.resumed_ms and said.offset < series.resumed_at
    return series.is_paused or was_paused


def _like(was: Series, said: Said) -> Series:
    """The one that takes the place of another, with what stays as it was."""
    # A pause is its operator's: whoever sends the series once more does not end it.
    return replace(
        said.series,
        is_paused=was.is_paused,
        resumed_ms=was.resumed_ms,
        resumed_at=was.resumed_at,
        replaced=_replaced(was, said),
    )


def _before(book: Book, name: str, batch: int) -> Series | None:
    page = book.pages.get(name)
    if page is None:
        return None
    return page.before if page.batch == batch else page.now


def _free_from_ms(was: Series | None, at_ms: int) -> int:
    """From when on no run is on its way that has its name, epoch ms."""
    if was is None:
        return 0
    last_ms = at_ms if was.ended_ms is None else was.ended_ms
    return last_ms + LEAD_MS + 1 if at_ms <= last_ms + LEAD_MS else 0


def _replaced(was: Series, said: Said) -> tuple[tuple[str, int], ...]:
    """Those that may come back, this one among them where it may have missed a run."""
    others = tuple(each for each in was.replaced if each[0] != said.series.since)
    if was.since == said.series.since or not _may_be_late(was, said.at_ms):
        return others
    return (*others, (was.since, said.at_ms))[-REPLACED:]


def _may_be_late(series: Series, at_ms: int) -> bool:
    try:
        first_ms = series.recurrence.first(series.start_ms)
    except InvalidMessage:
        return True
    return first_ms is not None and first_ms <= at_ms + LEAD_MS
