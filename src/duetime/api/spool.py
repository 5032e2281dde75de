"""The spool: what the API accepted while Kafka did not answer, in a file that survives `kill -9`.

A record is `put` when it is accepted, and is on the disk then. It is noted as taken before it is
given to Kafka's client, because it may arrive from then on, and removed once Kafka has it. After a
crash, taken records are `unconfirmed`: those that the intake topic has are removed, the others are
taken again. A record that Kafka will never take is set aside: it stays in the file, and is sent
only if it is put again.

Records leave in the order of their arrival. SQLite in WAL mode, with an fsync for every write. The
file notes the Kafka that its records are for, and is refused for another one.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, Self, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import Base64Bytes, TypeAdapter

from duetime.api.errors import SpoolFailed, SpoolForeign, SpoolFull
from duetime.core.errors import DuetimeError, KafkaError, SetupError
from duetime.core.messages import MessageId
from duetime.core.records import IntakeRecord
from duetime.core.settings import Settings
from duetime.kafka.connection import librdkafka_properties

#: A row of `note` says when the record was taken, or null where it was set aside. It is a table of
#: its own, so that a note does not write the payload again. `owner` has one row, or none.
SCHEMA = """
CREATE TABLE IF NOT EXISTS spool (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    topic TEXT NOT NULL, key BLOB, value BLOB, headers TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS note (number INTEGER PRIMARY KEY, taken_ms INTEGER);
CREATE TRIGGER IF NOT EXISTS note_removed DELETE ON spool
    BEGIN DELETE FROM note WHERE number = OLD.number; END;
CREATE TABLE IF NOT EXISTS owner (
    bootstrap TEXT NOT NULL, namespace TEXT NOT NULL, cluster_id TEXT
);
"""

#: The headers as JSON: pairs of a name, and of a value in base64 or null.
HEADERS = TypeAdapter(tuple[tuple[str, Base64Bytes | None], ...])

SIZE = "ifnull(length(key), 0) + ifnull(length(value), 0) + length(headers)"
SELECT = f"SELECT number, {SIZE}, id, topic, key, value, headers FROM spool"  # noqa: S608 (a constant)
IS_NEW = "number NOT IN (SELECT number FROM note)"
IS_SET_ASIDE = "number IN (SELECT number FROM note WHERE taken_ms IS NULL)"

#: The most bytes that are taken at a time: they are in memory, and again in Kafka's client.
MAX_TAKEN_BYTES = 16 * 1024 * 1024

#: Pages beyond the limit of the file, so that accepted records can be taken and removed.
RESERVED_PAGES = 1_024

#: How often the cluster id is read, as another cluster may be at the old address; how soon again
#: while Kafka does not answer; and how long it may take; in seconds.
CLUSTER_ID_INTERVAL_S = 60.0
CLUSTER_ID_RETRY_S = 1.0
CLUSTER_ID_TIMEOUT_S = 4.0

ResultT = TypeVar("ResultT")


class Owner(NamedTuple):
    """A Kafka, and the namespace there."""

    bootstrap: str
    namespace: str
    #: None until the cluster has answered.
    cluster_id: str | None = None

    def __str__(self) -> str:
        cluster = f"cluster {self.cluster_id}, " if self.cluster_id else ""
        return f"Kafka at {self.bootstrap} ({cluster}namespace {self.namespace})"

    def matches(self, asking: "Owner") -> bool | None:
        """Return whether this noted owner is the other one; None if the cluster must answer."""
        if self.namespace != asking.namespace:
            return False
        if self.cluster_id and asking.cluster_id:
            return self.cluster_id == asking.cluster_id
        if self.bootstrap == asking.bootstrap:
            return True
        return None if self.cluster_id else False


class Spooled(NamedTuple):
    """A record in the spool, with its approximate size."""

    number: int
    record: IntakeRecord
    size_bytes: int

    @classmethod
    def of(cls, row: tuple[int, int, str, str, bytes | None, bytes | None, str]) -> Self:
        """Return the record of a row of SELECT."""
        number, size_bytes, id_, topic, key, value, text = row
        identity, headers = MessageId.parse(id_), HEADERS.validate_json(text)
        record = IntakeRecord(id=identity, topic=topic, key=key, value=value, headers=headers)
        return cls(number, record, size_bytes)


#: A record for the spool, and when it was given to Kafka's client, epoch ms; None if it was not.
SpoolEntry = tuple[IntakeRecord, int | None]


class Spool:
    """The file, for one thread at a time. Raises SetupError where it cannot be opened."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        #: Why the last `claim` was refused.
        self.refusal: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # It contains payloads; SQLite gives its other files the same mode.
            path.touch(mode=0o600)
            # A write begins a transaction, which ends with the block `with self._db`.
            self._db = sqlite3.connect(
                path, isolation_level="IMMEDIATE", check_same_thread=False, timeout=1
            )
            # Exclusive: two processes would both send its records.
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self._db.execute(f"PRAGMA {pragma}").fetchall()
            self._db.executescript(SCHEMA)
            (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise SetupError(
                f"the spool {path} cannot be used ({error}): where another duetime api has it, or "
                "that of a duetime up, name a file for this one, with api_spool or as "
                "DUETIME_API_SPOOL=..."
            ) from error
        self._max_pages = max(1, max_bytes // page_bytes)

    def claim(self, asking: Owner) -> None:
        """Note the owner of the records. Raises SpoolForeign if they are another one's.

        An empty spool, and one without a note, is claimed by any owner. Safe to repeat.
        """
        row = self._db.execute("SELECT bootstrap, namespace, cluster_id FROM owner").fetchone()
        noted = Owner(*row) if row else None
        if noted and (count := self.depth()):
            matches = noted.matches(asking)
            if not matches:
                unsure = "" if matches is False else ", which does not answer yet"
                self.refusal = (
                    f"the spool {self._path} has {count} messages for {noted}, and takes none for "
                    f"{asking}{unsure}: name another file, with api_spool or as DUETIME_API_SPOOL="
                    "...; this one's are sent by a duetime api for their own Kafka"
                )
                raise SpoolForeign(self.refusal, is_certain=matches is False)
            # Until it answers again, it is the cluster that it was.
            asking = asking._replace(cluster_id=asking.cluster_id or noted.cluster_id)
        if asking != noted:
            with self._db:
                self._db.execute("DELETE FROM owner")
                self._db.execute("INSERT INTO owner VALUES (?, ?, ?)", asking)
        self.refusal = None

    def put(self, entries: Iterable[SpoolEntry]) -> list[int | None]:
        """Put records with one write to the disk, all or none. Raises SpoolFull.

        Returns the number of each; None where a record with its id is in the spool already.
        """
        self._db.execute(f"PRAGMA max_page_count = {self._max_pages}")
        try:
            with self._db:
                return [self._insert(*each) for each in entries]
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise SpoolFull("Kafka does not answer, and the spool is full: try later") from error
        finally:
            self._db.execute(f"PRAGMA max_page_count = {self._max_pages + RESERVED_PAGES}")

    def find(self, id: MessageId) -> IntakeRecord | None:  # noqa: A002 (the field's name)
        """Return the message with this id, taken or not, unless it was set aside."""
        select = f"{SELECT} WHERE id = ? AND NOT {IS_SET_ASIDE}"
        row = self._db.execute(select, (str(id),)).fetchone()
        return Spooled.of(row).record if row else None

    def withdraw(self, id: MessageId, replacement: IntakeRecord | None = None) -> bool:  # noqa: A002 (the field's name)
        """Remove a message that was not taken, and put the replacement; return whether it was."""
        with self._db:
            delete = f"DELETE FROM spool WHERE id = ? AND {IS_NEW}"  # noqa: S608 (a constant)
            withdrawn = self._db.execute(delete, (str(id),)).rowcount > 0
            if replacement and withdrawn:
                self._insert(replacement, has_own_id=False)
        return withdrawn

    def take(
        self, max_records: int, now_ms: int, max_bytes: int = MAX_TAKEN_BYTES
    ) -> list[Spooled]:
        """Note the next records as taken, and return them, up to a number or a size."""
        select = f"{SELECT} WHERE {IS_NEW} ORDER BY number LIMIT ?"
        taken = list[Spooled]()
        # Rows are read one by one, so that no others are in memory.
        with closing(self._db.execute(select, (max_records,))) as rows:
            for row in rows:
                taken.append(Spooled.of(row))
                max_bytes -= taken[-1].size_bytes
                if max_bytes <= 0:
                    break
        with self._db:
            self._note([each.number for each in taken], now_ms)
        return taken

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove what Kafka has. Safe to repeat."""
        with self._db:
            self._db.executemany("DELETE FROM spool WHERE number = ?", [(n,) for n in numbers])

    def set_aside(self, number: int) -> None:
        """Keep a record that Kafka refuses in the file, without sending it. Safe to repeat."""
        with self._db:
            self._note([number], None)

    def unconfirmed(self) -> dict[str, int]:
        """Return when each taken record was taken first, in epoch ms, by id."""
        select = "SELECT id, taken_ms FROM spool JOIN note USING (number) WHERE taken_ms NOT NULL"
        return dict(self._db.execute(select).fetchall())

    def settle(self, unconfirmed: Iterable[str], arrived: Container[str]) -> None:
        """Remove the unconfirmed records that arrived, and release the others.

        Records that were taken since `unconfirmed` was called stay taken.
        """
        numbers = "number IN (SELECT number FROM spool JOIN note USING (number) WHERE id = ?)"
        with self._db:
            for each in unconfirmed:
                table = "spool" if each in arrived else "note"
                self._db.execute(f"DELETE FROM {table} WHERE {numbers}", (each,))  # noqa: S608 (constants)

    def depth(self) -> int:
        """Return the number of records that are to be sent."""
        count = f"SELECT count(*) FROM spool WHERE NOT {IS_SET_ASIDE}"  # noqa: S608 (a constant)
        return int(self._db.execute(count).fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _insert(
        self, record: IntakeRecord, taken_ms: int | None = None, *, has_own_id: bool = True
    ) -> int | None:
        # Two definitions of one schedule may have the same first run, and both count.
        unique = f"@{token_hex(16)}" if record.schedule or not has_own_id else record.id.unique
        id_ = str(MessageId(due_ms=record.id.due_ms, unique=unique))
        # A record that was set aside is sent again where it is put again.
        self._db.execute(f"DELETE FROM spool WHERE id = ? AND {IS_SET_ASIDE}", (id_,))  # noqa: S608 (a constant)
        headers = HEADERS.dump_json(record.headers).decode()
        done = self._db.execute(
            "INSERT OR IGNORE INTO spool (id, topic, key, value, headers) VALUES (?, ?, ?, ?, ?)",
            (id_, record.topic, record.key, record.value, headers),
        )
        number = done.lastrowid if done.rowcount else None
        if number is not None and taken_ms is not None:
            self._note([number], taken_ms)
        return number

    def _note(self, numbers: Iterable[int], taken_ms: int | None) -> None:
        rows = [(each, taken_ms) for each in numbers]
        self._db.executemany("INSERT OR REPLACE INTO note VALUES (?, ?)", rows)


class AsyncSpool:
    """The spool for the event loop, and for one Kafka: it takes no records for another.

    The methods of the spool run in one thread, in the order of the calls.
    """

    def __init__(self, settings: Settings, spool: Spool) -> None:
        self._settings, self._spool = settings, spool
        properties = librdkafka_properties(settings) | {"reconnect.backoff.max.ms": 1_000}
        self._admin = AdminClient(properties)
        self._executor = ThreadPoolExecutor(1, "spool")
        #: What the next write puts, and that write. It waits for the last one.
        self._waiting: list[SpoolEntry] = []
        self._write: asyncio.Task[list[int | None]]
        self._is_writing = asyncio.Lock()

    async def run(self, method: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Return what this method of the spool returns. Raises SpoolFailed."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, method, *arguments)
        except sqlite3.Error as error:
            # SQLite's text contains nothing of a message.
            raise SpoolFailed(
                f"the spool's file cannot be used ({error}): see its disk, and api_spool"
            ) from error

    async def put(self, entries: Sequence[SpoolEntry]) -> list[int | None]:
        """Put records as `Spool.put`. Raises SpoolForeign as well."""
        if self._spool.refusal:
            raise SpoolForeign(self._spool.refusal)
        start = len(self._waiting)
        self._waiting += entries
        if not start:
            self._write = asyncio.create_task(self._put_waiting())
        numbers = await asyncio.shield(self._write)
        return numbers[start : start + len(entries)]

    def close(self) -> None:
        """Wait for all calls, and close the file."""
        self._executor.shutdown()
        self._spool.close()

    async def claim(self) -> None:
        """Claim the spool for the cluster that answers now.

        Raises KafkaError, SpoolForeign, SpoolFailed.
        """
        owner = Owner(self._settings.bootstrap, self._settings.namespace, await self._cluster_id())
        await self.run(self._spool.claim, owner)

    async def claim_regularly(self, is_spooling: Callable[[], bool]) -> None:
        """Note the cluster that answers, for ever, before it goes away and records are spooled."""
        while True:
            interval_s = CLUSTER_ID_INTERVAL_S
            try:
                if not is_spooling():
                    await self.claim()
            except DuetimeError:
                interval_s = CLUSTER_ID_RETRY_S
            await asyncio.sleep(interval_s)

    async def _put_waiting(self) -> list[int | None]:
        """Put, with one write to the disk, all that came during the last write."""
        async with self._is_writing:
            waiting, self._waiting = self._waiting, []
            return await self.run(self._spool.put, waiting)

    async def _cluster_id(self) -> str:
        try:
            asked = self._admin.describe_cluster(request_timeout=CLUSTER_ID_TIMEOUT_S)
            return str((await asyncio.wrap_future(asked)).cluster_id)
        except KafkaException as error:
            raise KafkaError(
                f"Kafka at {self._settings.bootstrap} does not say which cluster it is "
                f"({error.args[0].str()}): see that it is up"
            ) from error
