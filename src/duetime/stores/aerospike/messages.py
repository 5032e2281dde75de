"""The set of messages: saves, reads, finds and removes them in batches, in any process."""

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

from duetime.core.clock import SystemClock
from duetime.core.errors import InvalidMessage, StoreError
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.kafka.offsets import ANY_TIME, DueTimes
from duetime.stores.aerospike.schema import (
    CACHE,
    FOREVER,
    IDS,
    Bins,
    LeaseTableRecord,
    aerospike_errors,
    bins_from_row,
    client,
    digest_of,
    foreign_id,
    read_record,
    record_name_in,
    server_address,
    ttl_s,
)
from duetime.stores.row_store import Record, Row, batches, missing_record

log = logging.getLogger(__name__)

#: The namespace of duetime whose sets have their published names.
NAMESPACE = "duetime"

#: The most records, and bytes of them, in one call: its time limit is a second.
BATCH_SIZE, BATCH_BYTES = 1_000, 8 * 1024 * 1024

#: The partitions of a namespace. The server has no other number.
PARTITIONS = 4_096

# The server's result codes for one record of a batch. Source: aerospike/as_status.h.
OK, NOT_FOUND, EXISTS = 0, 2, 5

#: Makes the server keep record names, and send them with its notifications.
SEND_KEY = {"key": aerospike.POLICY_KEY_SEND}

#: Never overwrites a record.
CREATE = SEND_KEY | {"exists": aerospike.POLICY_EXISTS_CREATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class DueName:
    """The name and due time of a record."""

    name: str
    due_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanClaim:
    """Messages by name, and the span that is leased for them; see `duetime.stores.Claim`."""

    span: str
    names: tuple[str, ...]
    started_ms: int | None = None
    due: DueTimes = ANY_TIME

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self.names)


class MessageSet:
    """The saved messages of one namespace of duetime. Thread-safe. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._at = server_address(settings)
        self.leases = LeaseTableRecord(self._at, settings.namespace)

    def create_indexes(self) -> None:
        """Create the indexes that queries need. Idempotent."""
        kinds: dict[str, int] = {"postTime": aerospike.INDEX_NUMERIC}
        if self._settings.aerospike_expiry_notifications:
            kinds["idDigest"] = aerospike.INDEX_STRING
        set_name = self._set(CACHE)
        for bin_name, kind in kinds.items():
            # The published service may have indexed the bin under another name.
            with aerospike_errors(self._at), suppress(IndexFoundError):
                client(self._at).index_single_value_create(
                    self._at.namespace, set_name, bin_name, kind, f"{set_name}_{bin_name}"
                )

    def begin_term(self) -> int:
        """See `RowStore.begin_term`."""
        return self.leases.change(
            lambda table: (replace(table, term=table.term + 1), table.term + 1)
        )

    def save(self, rows: Iterable[Row], term: int) -> None:
        """See `RowStore.save`."""
        for batch in batches(rows, BATCH_SIZE, BATCH_BYTES):
            if self.leases.read().term != term:
                raise StoreError("another writer has begun since")
            self._save({row.name: row for row in batch})

    def records(self, claim: SpanClaim) -> Iterator[list[Record]]:
        """Yield the claim's records. A missing one was delivered by the previous owner."""
        for start in range(0, claim.count, BATCH_SIZE):
            found = self.found(claim.names[start : start + BATCH_SIZE])
            # Only readable records are claimed: one is unreadable only if it changed since then.
            yield [self.read(name, bins) or missing_record(name) for name, bins in found]

    def all_records(self, part: int, parts: int) -> Iterator[list[Record]]:
        """See `RowStore.all_records`. A part is held in memory as a whole."""
        begin, end = (PARTITIONS * each // parts for each in (part, part + 1))
        with aerospike_errors(self._at):
            query = client(self._at).query(self._at.namespace, self._set(CACHE))
            found = query.results({"partition_filter": {"begin": begin, "count": end - begin}})
        records = (self.read(record_name_in(bins, key[3]), bins) for key, _, bins in found)
        yield [each for each in records if each]

    def read(self, name: str, bins: Bins) -> Record | None:
        """Return the record, or None if its bins cannot be read."""
        with suppress(InvalidMessage):
            return read_record(name, bins, self._settings.namespace)
        return None

    def unreadable(self, names: Sequence[str]) -> set[str]:
        """Return the names of records whose bins cannot be read; log each."""
        unreadable = set[str]()
        for name, bins in self.found(names):
            try:
                read_record(name, bins, self._settings.namespace)
            except InvalidMessage as error:
                unreadable.add(name)
                log.warning(
                    "skipped an unreadable record set=%s id=%.200r digest=%s reason=%s: %s",
                    self._set(CACHE),
                    bins.get("id"),
                    name[1:],
                    error.reason,
                    error.detail,
                )
        return unreadable

    def foreign_ids(self, names: Sequence[str]) -> dict[str, MessageId]:
        """Return the ids of the foreign records with these names, where they have one."""
        ids = dict[str, MessageId]()
        for name, bins in self.found(names, "id", "postTime"):
            with suppress(InvalidMessage):
                ids[name] = foreign_id(bins, digest_of(name) or b"")
        return ids

    def found(self, names: Sequence[str], *bins: str) -> Iterator[tuple[str, Bins]]:
        """Yield the name and bins of each record that exists: the given bins, or all."""
        for start in range(0, len(names), BATCH_SIZE):
            some = names[start : start + BATCH_SIZE]
            keys = [self._key(CACHE, name) for name in some]
            with aerospike_errors(self._at):
                read = client(self._at).batch_read
                batch = read(keys, list(bins)) if bins else read(keys)
            _check(batch, OK, NOT_FOUND)
            for name, each in zip(some, batch.batch_records, strict=True):
                if each.result == OK:
                    yield name, each.record[2]

    def waiting(self, names: Sequence[str]) -> list[DueName]:
        """Return the due times of the records with these names that exist."""
        return [
            DueName(
                name=record_name_in(bins, digest_of(name) or self._calc_digest(CACHE, name)),
                due_ms=bins["postTime"],
            )
            for name, bins in self.found(names)
            # Notifications may name foreign records, whose bins may hold anything.
            if isinstance(bins.get("postTime"), int)
        ]

    def due(self, start_ms: int, end_ms: int, limit: int = 0) -> list[DueName]:
        """Return records due from `start_ms` up to, not including, `end_ms`.

        If there are more than `limit`, any of them. 0 is no limit.
        """
        return self._where(predicates.between("postTime", start_ms, end_ms - 1), limit)

    def with_id_digest(self, digest: bytes) -> list[DueName]:
        """Return the record whose id record has, or had, this digest."""
        return self._where(predicates.equals("idDigest", _base64(digest)))

    def remove(self, names: Sequence[str]) -> None:
        """Remove records and their ids. Idempotent."""
        keys = [self._key(CACHE, name) for name in names]
        if self._settings.aerospike_expiry_notifications:
            # The id of a foreign record belongs to another service, and expires.
            keys += [self._key(IDS, name) for name in names if digest_of(name) is None]
        for start in range(0, len(keys), BATCH_SIZE):
            with aerospike_errors(self._at):
                batch = client(self._at).batch_remove(keys[start : start + BATCH_SIZE])
            _check(batch, OK, NOT_FOUND)

    def _save(self, rows: Mapping[str, Row]) -> None:
        results = self._write(rows)
        existing = self.found([name for name, result in results.items() if result == EXISTS])
        # Another record with the same id is kept. If both are due at once, a release job sends one.
        others = {
            f"{name}~{place.hex()}": rows[name]
            for name, bins in existing
            if (place := bins_from_row(rows[name])["place"]) != bytes(bins.get("place", b""))
        }
        if others:
            self._write(others)

    def _write(self, rows: Mapping[str, Row]) -> dict[str, int]:
        """Write records, and their ids first; return OK or EXISTS for each."""
        if self._settings.aerospike_expiry_notifications:
            now_ms = SystemClock().now_ms()
            self._batch_write(
                [
                    Write(
                        self._key(IDS, name),
                        [operations.write("id", row.id)],
                        {"ttl": ttl_s(row.due_ms, now_ms)},
                        SEND_KEY,
                    )
                    for name, row in rows.items()
                ],
                OK,
            )
        writes = [
            Write(
                self._key(CACHE, name),
                [operations.write(*each) for each in self._bins(name, row).items()],
                FOREVER,
                CREATE,
            )
            for name, row in rows.items()
        ]
        return dict(zip(rows, self._batch_write(writes, OK, EXISTS), strict=True))

    def _bins(self, name: str, row: Row) -> Bins:
        bins = bins_from_row(row) | {"name": name}
        if self._settings.aerospike_expiry_notifications:
            bins["idDigest"] = _base64(self._calc_digest(IDS, name))
        return bins

    def _batch_write(self, writes: Sequence[Write], *accepted: int) -> list[int]:
        batch = BatchRecords(list(writes))
        with aerospike_errors(self._at):
            client(self._at).batch_write(batch)
        _check(batch, *accepted)
        return [each.result for each in batch.batch_records]

    def _where(self, predicate: tuple[Any, ...], limit: int = 0) -> list[DueName]:
        with aerospike_errors(self._at):
            query = client(self._at).query(self._at.namespace, self._set(CACHE))
            query.select("name", "place", "postTime")
            query.where(predicate)
            if limit:
                query.max_records = limit
            found = query.results()
        return [
            DueName(name=record_name_in(bins, bytes(key[3])), due_ms=bins["postTime"])
            for key, _, bins in found
        ]

    def _key(self, set_name: str, name: str) -> tuple[Any, ...]:
        if digest := digest_of(name):
            return self._at.namespace, self._set(set_name), None, bytearray(digest)
        return self._at.namespace, self._set(set_name), name

    def _calc_digest(self, set_name: str, name: str) -> bytes:
        return bytes(aerospike.calc_digest(*self._key(set_name, name)))

    def _set(self, name: str) -> str:
        """Return the published name of a set; with a suffix for other namespaces of duetime."""
        namespace = self._settings.namespace
        return name if namespace == NAMESPACE else f"{name}_{namespace}"


def _check(batch: BatchRecords, *accepted: int) -> None:
    for each in batch.batch_records:
        if each.result not in accepted:
            raise StoreError(
                f"Aerospike refused a record (result {each.result}): see its log, and check that "
                "the namespace has room"
            )


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
