"""The cached messages: saved, read, looked for and removed, in batches, in any process."""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aerospike
from aerospike import predicates
from aerospike_helpers.batch.records import BatchRecords, Write
from aerospike_helpers.operations import operations

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import StoreError
from duetime.stores import ANY_TIME, DueTimes
from duetime.stores.aerospike.connect import address, answering, client
from duetime.stores.aerospike.fields import CACHE, IDS, Bins, bins_of, record_of, ttl_s
from duetime.stores.aerospike.ledger import FOREVER, LedgerRecord
from duetime.stores.rows import Record, Row, portions

#: The namespace of duetime's that has the sets by their published names.
NAMESPACE = "duetime"

#: The most records, and bytes of them, of one call: it has a second.
BATCH, BATCH_BYTES = 1_000, 8 * 1024 * 1024

#: How many a namespace has, always.
PARTITIONS = 4_096

# The server's answers for one record of a batch. Source: aerospike/as_status.h.
OK, NOT_FOUND, EXISTS = 0, 2, 5

#: The server keeps names, and sends them with its notices.
NAMED = {"key": aerospike.POLICY_KEY_SEND}

#: Never over a record that is there.
CREATE = NAMED | {"exists": aerospike.POLICY_EXISTS_CREATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What an index says of a message: its name and when it is due."""

    name: str
    due_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedClaim:
    """Messages by their names, and the name of the span that is held for them."""

    span: str
    names: tuple[str, ...]
    #: When they were first taken up, epoch ms, if that was before.
    begun_ms: int | None = None
    #: When they are due, of a claim by windows.
    due: DueTimes = ANY_TIME

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)


class MessageCache:
    """The cached messages of one namespace of duetime's. Thread-safe. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._at = address(settings)
        self.ledger = LedgerRecord(self._at, settings.namespace)

    def create_indexes(self) -> None:
        """Safe to repeat."""
        self._create_index("postTime", aerospike.INDEX_NUMERIC)
        if self._settings.aerospike_notices:
            self._create_index("idDigest", aerospike.INDEX_STRING)

    def begin_term(self) -> int:
        """From now on nobody saves who began before."""
        return self.ledger.change(lambda was: (replace(was, term=was.term + 1), was.term + 1))

    def save(self, rows: Iterable[Row], term: int) -> None:
        """Save them, each once. Raises StoreError where another term has begun."""
        for some in portions(rows, BATCH, BATCH_BYTES):
            if self.ledger.read().term != term:
                raise StoreError("another writer has begun since")
            self._save({row.name: row for row in some})

    def records(self, claim: CachedClaim) -> Iterator[list[Record]]:
        """What the claim names and is there: what is not, was delivered by who held it before."""
        for start in range(0, claim.count, BATCH):
            found = self.found(claim.names[start : start + BATCH])
            yield [record_of(bins) for bins in found.values()]

    def everything(self, part: int, parts: int) -> Iterator[list[Record]]:
        """One of so many parts of all that waits, held as a whole."""
        begin, end = (PARTITIONS * each // parts for each in (part, part + 1))
        share = {"partition_filter": {"begin": begin, "count": end - begin}}
        with answering(self._at):
            query = client(self._at).query(self._at.namespace, self._set(CACHE))
            found = query.results(share)
        yield [record_of(bins) for _, _, bins in found]

    def found(self, names: Sequence[str]) -> dict[str, Bins]:
        """The bins of those that are there."""
        with answering(self._at):
            batch = client(self._at).batch_read([self._key(CACHE, name) for name in names])
        _check(batch, OK, NOT_FOUND)
        return {
            name: each.record[2]
            for name, each in zip(names, batch.batch_records, strict=True)
            if each.result == OK
        }

    def waiting(self, names: Sequence[str]) -> list[Waiting]:
        """Those of these names that are there."""
        parts = (names[start : start + BATCH] for start in range(0, len(names), BATCH))
        found = ((name, bins) for part in parts for name, bins in self.found(part).items())
        return [Waiting(name=name, due_ms=bins["postTime"]) for name, bins in found]

    def due(self, start_ms: int, end_ms: int, most: int = 0) -> list[Waiting]:
        """What waits and is due then; if there is more, any of it, but so many at most."""
        return self._where(predicates.between("postTime", start_ms, end_ms - 1), most)

    def of_digest(self, digest: bytes) -> list[Waiting]:
        """The message whose id record had this digest."""
        return self._where(predicates.equals("idDigest", _text(digest)))

    def remove(self, names: Sequence[str]) -> None:
        """Remove them, and their ids. Safe to repeat."""
        sets = (CACHE, IDS) if self._settings.aerospike_notices else (CACHE,)
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            keys = [self._key(set_name, name) for set_name in sets for name in some]
            with answering(self._at):
                _check(client(self._at).batch_remove(keys), OK, NOT_FOUND)

    def _save(self, rows: Mapping[str, Row]) -> None:
        written = self._write(rows)
        there = self.found([name for name, result in written.items() if result == EXISTS])
        # Of another record with the id of one that is there, a turn takes one if they meet.
        others = {
            f"{name}~{place.hex()}": rows[name]
            for name, bins in there.items()
            if (place := bins_of(rows[name])["place"]) != bytes(bins["place"])
        }
        if others:
            self._write(others)

    def _write(self, rows: Mapping[str, Row]) -> dict[str, int]:
        """What became of each, OK or EXISTS. First what is to be said of them, then they."""
        if self._settings.aerospike_notices:
            self._write_ids(rows)
        batch = BatchRecords(
            [
                Write(
                    self._key(CACHE, name),
                    [operations.write(bin_name, value) for bin_name, value in bins.items()],
                    FOREVER,
                    CREATE,
                )
                for name, bins in ((name, self._bins(name, row)) for name, row in rows.items())
            ]
        )
        with answering(self._at):
            client(self._at).batch_write(batch)
        _check(batch, OK, EXISTS)
        return {name: each.result for name, each in zip(rows, batch.batch_records, strict=True)}

    def _bins(self, name: str, row: Row) -> Bins:
        bins = bins_of(row) | {"name": name}
        if self._settings.aerospike_notices:
            digest = aerospike.calc_digest(*self._key(IDS, name))
            bins["idDigest"] = _text(bytes(digest))
        return bins

    def _write_ids(self, rows: Mapping[str, Row]) -> None:
        now_ms = SystemClock().now_ms()
        batch = BatchRecords(
            [
                Write(
                    self._key(IDS, name),
                    [operations.write("id", row.id)],
                    {"ttl": ttl_s(row.due_ms, now_ms)},
                    NAMED,
                )
                for name, row in rows.items()
            ]
        )
        with answering(self._at):
            client(self._at).batch_write(batch)
        _check(batch, OK)

    def _where(self, predicate: tuple[Any, ...], most: int = 0) -> list[Waiting]:
        with answering(self._at):
            query = client(self._at).query(self._at.namespace, self._set(CACHE))
            query.select("name", "postTime")
            query.where(predicate)
            if most:
                query.max_records = most
            found = query.results()
        return [Waiting(name=bins["name"], due_ms=bins["postTime"]) for _, _, bins in found]

    def _create_index(self, bin_name: str, kind: int) -> None:
        name = f"{self._set(CACHE)}_{bin_name}"
        with answering(self._at):
            client(self._at).index_single_value_create(
                self._at.namespace, self._set(CACHE), bin_name, kind, name
            )

    def _key(self, set_name: str, name: str) -> tuple[str, str, str]:
        return self._at.namespace, self._set(set_name), name

    def _set(self, name: str) -> str:
        """As published; another namespace of duetime's has sets of its own."""
        own = self._settings.namespace
        return name if own == NAMESPACE else f"{name}_{own}"


def _check(batch: BatchRecords, *well: int) -> None:
    for each in batch.batch_records:
        if each.result not in well:
            raise StoreError(
                f"Aerospike refused a record (result {each.result}): see its log, and that the "
                "namespace has room"
            )


def _text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
