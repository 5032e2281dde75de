"""The lease table: which scheduler has claimed which span of due times.

A scheduler *holds* a span under a lease that it extends while it works. Messages due in an unheld
span are free. The table is one small record. It is replaced as a whole, if no other process
has replaced it since it was read, so two schedulers never hold the same instant.

    held          [10:00:00, 10:00:01) by a     [10:00:01, 10:00:02) by a
    b asks for    [00:00:00, 10:00:03)
    b receives    [00:00:00, 10:00:00)          [10:00:02, 10:00:03)
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import aerospike
from aerospike.exception import RecordExistsError, RecordGenerationError, RecordNotFound

from duetime.stores.aerospike.schema import CLAIMS, ServerAddress, aerospike_errors, client

#: The metadata of a record that never expires.
FOREVER: dict[str, Any] = {"ttl": aerospike.TTL_NEVER_EXPIRE}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSpan:
    """Due times from `start_ms` up to, not including, `end_ms`, leased until `until_ms`."""

    start_ms: int
    end_ms: int
    owner: str
    until_ms: int
    #: When its delivery was started, epoch ms; None before that.
    started_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseTable:
    """The leased spans by name, and the term of the latest writer. Immutable."""

    spans: Mapping[str, LeasedSpan] = field(default_factory=dict)
    term: int = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "LeaseTable":
        """Return the table from its bin."""
        spans = {name: LeasedSpan(**span) for name, span in stored["spans"].items()}
        return cls(spans, stored["term"])

    def stored(self) -> dict[str, Any]:
        """Return the bin: plain values without nulls."""
        spans = {
            name: {key: value for key, value in asdict(span).items() if value is not None}
            for name, span in self.spans.items()
        }
        return {"spans": spans, "term": self.term}

    def free(self, start_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
        """Yield the unheld parts of a span, in order."""
        for span in sorted(self.spans.values(), key=lambda each: each.start_ms):
            if span.start_ms > start_ms:
                yield start_ms, min(span.start_ms, end_ms)
            start_ms = max(start_ms, span.end_ms)
            if start_ms >= end_ms:
                return
        yield start_ms, end_ms

    def expired(self, now_ms: int, busy: Collection[str]) -> dict[str, LeasedSpan]:
        """Return spans whose lease has ended, except the `busy` ones."""
        return {
            name: span
            for name, span in self.spans.items()
            if span.until_ms <= now_ms and name not in busy
        }

    def held(self, names: Collection[str], owner: str) -> dict[str, LeasedSpan]:
        """Return the named spans that the owner still holds."""
        return {
            name: span for name, span in self.spans.items() if name in names and span.owner == owner
        }

    def with_spans(self, spans: Mapping[str, LeasedSpan]) -> "LeaseTable":
        """Return the table with these spans added or replaced."""
        return replace(self, spans={**self.spans, **spans})

    def without(self, names: Collection[str], owner: str) -> "LeaseTable":
        """Return the table without the named spans that the owner holds."""
        removed = self.held(names, owner)
        return replace(self, spans={k: v for k, v in self.spans.items() if k not in removed})


_Result = TypeVar("_Result")


class LeaseTableRecord:
    """The stored table of one namespace of duetime. Thread-safe. Raises StoreError."""

    def __init__(self, at: ServerAddress, name: str) -> None:
        self._at = at
        self._key = (at.namespace, CLAIMS, name)

    def read(self) -> LeaseTable:
        """Return the current table."""
        return self._read()[0]

    def change(self, change: Callable[[LeaseTable], tuple[LeaseTable, _Result]]) -> _Result:
        """Replace the table by compare-and-swap, and return the result of `change`.

        `change` returns the new table and a result. It is called again after a conflict.
        """
        while True:
            table, generation = self._read()
            changed, result = change(table)
            if changed == table or self._replace(changed, generation):
                return result

    def _read(self) -> tuple[LeaseTable, int | None]:
        with aerospike_errors(self._at):
            try:
                _, meta, bins = client(self._at).get(self._key)
            except RecordNotFound:
                return LeaseTable(), None
        return LeaseTable.of(bins["ledger"]), meta["gen"]

    def _replace(self, table: LeaseTable, generation: int | None) -> bool:
        meta, policy = FOREVER, {"exists": aerospike.POLICY_EXISTS_CREATE}
        if generation is not None:
            meta, policy = FOREVER | {"gen": generation}, {"gen": aerospike.POLICY_GEN_EQ}
        with aerospike_errors(self._at):
            try:
                client(self._at).put(self._key, {"ledger": table.stored()}, meta, policy)
            except (RecordExistsError, RecordGenerationError):
                return False
        return True
