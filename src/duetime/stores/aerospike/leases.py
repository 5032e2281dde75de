"""Who has taken up which stretch of time: the arithmetic, without a server.

A reader *holds* a span of due times, under a lease that it extends while it works. What is due in a
span that nobody holds is free. All of it is one small record, replaced as a whole if nobody else
has replaced it meanwhile: so two readers never hold the same instant.

    held        [10:00:00, 10:00:01) by a     [10:00:01, 10:00:02) by a
    b asks for  [00:00:00, 10:00:03)
    b gets      [00:00:00, 10:00:00)          [10:00:02, 10:00:03)
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

#: How long a span is held without a word from its holder, in ms: as long as a leader may send
#: without one, so that who leads next finds what was left.
LEASE_MS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Due times from `start_ms` up to, not including, `end_ms`, that one reader holds."""

    start_ms: int
    end_ms: int
    owner: str
    until_ms: int
    #: Since when it is taken up, epoch ms; None is not yet.
    begun_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """All spans that are held, by name, and the term of who may save."""

    spans: Mapping[str, Span] = field(default_factory=dict)
    term: int = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Ledger":
        """As it was stored."""
        spans = {name: Span(**span) for name, span in stored["spans"].items()}
        return cls(spans, stored["term"])

    def stored(self) -> dict[str, Any]:
        """As it is stored."""
        spans = {name: _known(asdict(each)) for name, each in self.spans.items()}
        return {"spans": spans, "term": self.term}

    def free(self, start_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
        """What of the stretch nobody holds, in order."""
        for span in sorted(self.spans.values(), key=lambda each: each.start_ms):
            if span.start_ms > start_ms:
                yield start_ms, min(span.start_ms, end_ms)
            start_ms = max(start_ms, span.end_ms)
            if start_ms >= end_ms:
                return
        yield start_ms, end_ms

    def ended(self, now_ms: int, busy: Collection[str]) -> dict[str, Span]:
        """Spans whose lease has ended, but for those that somebody is known to work on."""
        return {
            name: span
            for name, span in self.spans.items()
            if span.until_ms <= now_ms and name not in busy
        }

    def with_spans(self, spans: Mapping[str, Span]) -> "Ledger":
        """These added, or replaced."""
        return replace(self, spans={**self.spans, **spans})

    def without(self, names: Collection[str], owner: str) -> "Ledger":
        """Those let go that the owner holds."""
        kept = {
            name: span
            for name, span in self.spans.items()
            if name not in names or span.owner != owner
        }
        return replace(self, spans=kept)

    def held(self, names: Collection[str], owner: str) -> dict[str, Span]:
        """Those of these names that the owner holds still."""
        return {
            name: span for name, span in self.spans.items() if name in names and span.owner == owner
        }


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
