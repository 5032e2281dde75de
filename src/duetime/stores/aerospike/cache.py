"""The cached messages: saved, read, looked for and removed, in batches, in any process."""

import base64
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aerospike
from aerospike import predicates
from aerospike.exception import IndexFoundError
from aerospike_helpers.batch.records import BatchRecords, Write
from aerospike_helpers.operations import operations

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import InvalidMessage, StoreError
from duetime.message import MessageId
from duetime.stores import ANY_TIME, DueTimes
from duetime.stores.aerospike.connect import address, answering, client
from duetime.stores.aerospike.fields import (
    CACHE,
    IDS,
    Bins,
    bins_of,
    digest_of,
    foreign_id,
    name_here,
    read_record,
    ttl_s,
)
from duetime.stores.aerospike.ledger import FOREVER, LedgerRecord
from duetime.stores.rows import Record, Row, lost, portions

log = logging.getLogger(__name__)

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
            # The store claims nothing that it cannot read: only what changed since is lost.
            yield [self.read(name, bins) or lost(name) for name, bins in found.items()]

    def everything(self, part: int, parts: int) -> Iterator[list[Record]]:
        """One of so many parts of all that waits, held as a whole."""
        begin, end = (PARTITIONS * each // parts for each in (part, part + 1))
        share = {"partition_filter": {"begin": begin, "count": end - begin}}
        with answering(self._at):
            query = client(self._at).query(self._at.namespace, self._set(CACHE))
            found = query.results(share)
        named = ((name_here(bins, key[3]), bins) for key, _, bins in found)
        yield [record for name, bins in named if (record := self.read(name, bins))]

    def read(self, name: str, bins: Bins) -> Record | None:
        """Return the record, and None where it cannot be understood."""
        try:
            return read_record(name, bins, self._settings.namespace)
        except InvalidMessage:
            return None

    def unreadable(self, names: Sequence[str]) -> set[str]:
        """Return those of these records that are there and cannot be understood; log each."""
        refused = set[str]()
        for start in range(0, len(names), BATCH):
            for name, bins in self.found(names[start : start + BATCH]).items():
                try:
                    read_record(name, bins, self._settings.namespace)
                except InvalidMessage as error:
                    refused.add(name)
                    log.warning(
                        "passed over an unreadable record set=%s id=%.200r digest=%s reason=%s: %s",
                        self._set(CACHE),
                        bins.get("id"),
                        name[1:],
                        error.reason,
                        error.detail,
                    )
        return refused

    def foreign_ids(self, names: Sequence[str]) -> dict[str, MessageId]:
        """Return the ids of those of these foreign records that are there and have one."""
        found = dict[str, MessageId]()
        for start in range(0, len(names), BATCH):
            for name, bins in self.found(names[start : start + BATCH], "id", "postTime").items():
                with suppress(InvalidMessage):
                    found[name] = foreign_id(bins, digest_of(name) or b"")
        return found

    def found(self, names: Sequence[str], *bins: str) -> dict[str, Bins]:
        """The bins of those that are there, all or those named."""
        keys = [self._key(CACHE, name) for name in names]
        with answering(self._at):
            one = client(self._at)
            batch = one.batch_read(keys, list(bins)) if bins else one.batch_read(keys)
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
        return [
            Waiting(name=name_here(bins, self._digest(name)), due_ms=bins["postTime"])
            for name, bins in found
            # The published service's notices name foreign records, whose bins may be anything.
            if isinstance(bins.get("postTime"), int)
        ]

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
            keys = [
                self._key(set_name, name)
                for set_name in sets
                for name in some
                # A foreign id's record is another service's, and expires.
                if set_name == CACHE or digest_of(name) is None
            ]
            with answering(self._at):
                _check(client(self._at).batch_remove(keys), OK, NOT_FOUND)

    def _save(self, rows: Mapping[str, Row]) -> None:
        written = self._write(rows)
        there = self.found([name for name, result in written.items() if result == EXISTS])
        # Of another record with the id of one that is there, a turn takes one if they meet.
        others = {
            f"{name}~{place.hex()}": rows[name]
            for name, bins in there.items()
            if (place := bins_of(rows[name])["place"]) != bytes(bins.get("place", b""))
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
            query.select("name", "place", "postTime")
            query.where(predicate)
            if most:
                query.max_records = most
            found = query.results()
        return [
            Waiting(name=name_here(bins, bytes(key[3])), due_ms=bins["postTime"])
            for key, _, bins in found
        ]

    def _create_index(self, bin_name: str, kind: int) -> None:
        name = f"{self._set(CACHE)}_{bin_name}"
        # The published service may have indexed the bin under another name.
        with answering(self._at), suppress(IndexFoundError):
            client(self._at).index_single_value_create(
                self._at.namespace, self._set(CACHE), bin_name, kind, name
            )

    def _key(self, set_name: str, name: str) -> tuple[Any, ...]:
        if digest := digest_of(name):
            return self._at.namespace, self._set(set_name), None, bytearray(digest)
        return self._at.namespace, self._set(set_name), name

    def _digest(self, name: str) -> bytes:
        """Return the digest of the cached message with this key."""
        return digest_of(name) or bytes(aerospike.calc_digest(*self._key(CACHE, name)))

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
