"""How punctual and how complete a run was."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from duetime.bench.reader import Arrivals, read_arrivals
from duetime.config import Settings

#: The figures of a report that are counts of messages.
COUNTS = ("sent", "delivered", "lost", "duplicated", "early")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts of messages, and lateness (append time minus due) in ms; None where nothing came."""

    sent: int
    #: Different messages that came.
    delivered: int
    lost: int
    #: Records beyond each message's first.
    duplicated: int
    early: int
    p50_ms: int | None
    p99_ms: int | None
    p999_ms: int | None
    max_ms: int | None

    @property
    def flawless(self) -> bool:
        """Whether each message came once, and none early."""
        return not (self.lost or self.duplicated or self.early)


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """The messages that were due in one second of a run."""

    second: int
    messages: int
    p50_ms: int
    p99_ms: int
    max_ms: int


def measure(settings: Settings, topics: Sequence[str], sent: int) -> Report:
    """Read the destinations from their beginning, and compare with what was sent.

    Raises as `read_arrivals` does.
    """
    return report(read_arrivals(settings, topics), sent)


def report(arrivals: Arrivals, sent: int) -> Report:
    """What the arrivals say."""
    late_ms = sorted(arrivals.late_ms)
    delivered = len(arrivals.ids)
    return Report(
        sent=sent,
        delivered=delivered,
        lost=max(sent - delivered, 0),
        duplicated=len(late_ms) - delivered,
        early=sum(1 for each in late_ms if each < 0),
        p50_ms=percentile(late_ms, 50),
        p99_ms=percentile(late_ms, 99),
        p999_ms=percentile(late_ms, 99.9),
        max_ms=late_ms[-1] if late_ms else None,
    )


def percentile(ordered: Sequence[int], percent: float) -> int | None:
    """The smallest value that at least so many per cent do not exceed; None of nothing."""
    if not ordered:
        return None
    # Rounded first: 99.9 % of 1,000 is 999 and not 999.0000000000001.
    rank = math.ceil(round(len(ordered) * percent / 100, 6))
    return ordered[max(rank, 1) - 1]


def timeline(arrivals: Arrivals) -> list[Second]:
    """Second by second of due time, to see when a run was late."""
    seconds: dict[int, list[int]] = {}
    for due_ms, late_ms in zip(arrivals.due_ms, arrivals.late_ms, strict=True):
        seconds.setdefault(due_ms // 1_000, []).append(late_ms)
    first = min(seconds, default=0)
    return [_second(each - first, sorted(seconds[each])) for each in sorted(seconds)]


def _second(second: int, ordered: Sequence[int]) -> Second:
    return Second(
        second=second,
        messages=len(ordered),
        p50_ms=percentile(ordered, 50) or 0,
        p99_ms=percentile(ordered, 99) or 0,
        max_ms=ordered[-1],
    )
