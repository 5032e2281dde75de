"""What was accepted and is not in Kafka yet: a file that survives `kill -9`, in order of arrival.

```
claim     whose the records are; another Kafka gets none of them
put       a record is accepted: it is on the disk when this returns
find      one that is there
withdraw  one that was not taken yet is not to be sent any more; something else is, if need be
take      the next ones are handed to Kafka's client: noted before, because they may arrive
remove    Kafka has them
set_aside Kafka never will: they stay in the file, and nobody takes them; put again they are anew
taken     after a crash: those of which Kafka may have any
settle    and now it is known which
```
One thread at a time. SQLite in WAL mode, with an fsync for every write.
"""

import sqlite3
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from duetime.api.spool.errors import SpoolForeign, SpoolFull, failed
from duetime.api.spool.owner import SCHEMA as OWNER
from duetime.api.spool.owner import Owner, is_one, read_owner, write_owner
from duetime.api.spool.rows import COLUMNS, SCHEMA, Spooled, apart, headers_text, spooled
from duetime.errors import SetupError
from duetime.message import MessageId
from duetime.outgoing import Outgoing

#: Of how many bytes all that is taken at a time may be: they are in memory, and once more in
#: Kafka's client.
AT_ONCE_BYTES = 16 * 1024 * 1024

#: Room beyond the limit, in pages: what was accepted can be noted as taken, and removed.
NOTES_PAGES = 1_024


class Spool:
    """The file. Raises SetupError where it cannot be opened."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Payloads are in it: SQLite gives the files beside it the same mode.
            path.touch(mode=0o600)
            # Used by one thread at a time, but not always by the same one.
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=1
            )
            self._prepare(most_bytes)
        except (OSError, sqlite3.Error) as error:
            raise SetupError(
                f"the spool {path} cannot be used ({error}): where another duetime api has it, or "
                "that of a duetime up, name a file for this one, with api_spool or as "
                "DUETIME_API_SPOOL=..."
            ) from error

    def claim(self, asking: Owner) -> None:
        """Note whose the records are from now on. Raises SpoolForeign where they are another's.

        Those of nobody, and an empty spool, are whose it is that asks. Safe to repeat.
        """
        noted, count = read_owner(self._db), self.depth()
        if noted and count:
            self._require_one(noted, asking, count)
            # Until it answers again, it is the one that it was.
            asking = replace(asking, cluster_id=asking.cluster_id or noted.cluster_id)
        if asking != noted:
            with self._transaction():
                write_owner(self._db, asking)

    def put(self, records: Sequence[Outgoing], taken_ms: int | None = None) -> list[int]:
        """Keep them, all or none; returns the numbers of new ones. Raises SpoolFull, SpoolFailed.

        `taken_ms` is when they were handed to Kafka's client, if they were.
        """
        return self.put_all([(records, taken_ms)])[0]

    def put_all(self, puts: Sequence[tuple[Sequence[Outgoing], int | None]]) -> list[list[int]]:
        """The same for several, with one write to the disk."""
        try:
            with self._transaction(self._pages):
                return [self._put(records, taken_ms) for records, taken_ms in puts]
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise failed(error) from error
            raise SpoolFull("Kafka does not answer, and the spool is full: try later") from error

    def find(self, id: MessageId) -> Outgoing | None:  # noqa: A002 (what all call it)
        """The message with this id, taken or not."""
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM spool "  # noqa: S608 (a constant)
            "WHERE id = ? AND number NOT IN (SELECT number FROM aside)",
            (str(id),),
        ).fetchall()
        return spooled(rows[0]).record if rows else None

    def withdraw(self, id: MessageId, instead: Outgoing | None = None) -> bool:  # noqa: A002 (what all call it)
        """Take out the message with this id, unless it was taken; returns whether it was there.

        Where it was, `instead` is kept, in the same write.
        """
        with self._transaction():
            done = self._db.execute(
                "DELETE FROM spool WHERE id = ? AND number NOT IN (SELECT number FROM taken) "
                "AND number NOT IN (SELECT number FROM aside)",
                (str(id),),
            )
            if instead and done.rowcount:
                self._put([instead], None)
        return done.rowcount > 0

    def take(self, most: int, now_ms: int, most_bytes: int = AT_ONCE_BYTES) -> list[Spooled]:
        """The next ones that were not taken yet, in order: so many, or of so many bytes."""
        taken, size = list[Spooled](), 0
        # They are read one by one: what is not taken is not in memory.
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM spool "  # noqa: S608 (a constant)
            "WHERE number NOT IN (SELECT number FROM taken) "
            "AND number NOT IN (SELECT number FROM aside) ORDER BY number LIMIT ?",
            (most,),
        )
        for row in rows:
            taken.append(spooled(row))
            size += taken[-1].size_bytes
            if size >= most_bytes:
                break
        rows.close()
        with self._transaction():
            self._note([each.number for each in taken], now_ms)
        return taken

    def remove(self, numbers: Iterable[int]) -> None:
        """Kafka has these. Safe to repeat."""
        with self._transaction():
            self._each("DELETE FROM spool WHERE number = ?", [(each,) for each in numbers])

    def set_aside(self, number: int) -> None:
        """Kafka refuses this one: it stays in the file, for whoever runs it. Safe to repeat."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO aside VALUES (?)", (number,))
            self._db.execute("DELETE FROM taken WHERE number = ?", (number,))

    def taken(self) -> dict[str, int]:
        """When each that was taken was first taken, epoch ms, by its id."""
        rows = self._db.execute("SELECT id, taken_ms FROM spool JOIN taken USING (number)")
        return dict(rows.fetchall())

    def settle(self, taken: Iterable[str], arrived: Container[str]) -> None:
        """Of these that were taken, some have arrived; the others are to be taken again."""
        # What was taken since then is under way, and its notes stay.
        there, missing = list[tuple[str]](), list[tuple[str]]()
        for each in taken:
            (there if each in arrived else missing).append((each,))
        with self._transaction():
            self._each(
                "DELETE FROM spool WHERE id = ? AND number IN (SELECT number FROM taken)", there
            )
            self._each(
                "DELETE FROM taken WHERE number IN (SELECT number FROM spool WHERE id = ?)", missing
            )

    def depth(self) -> int:
        """How many there are to be sent."""
        (count,) = self._db.execute(
            "SELECT (SELECT count(*) FROM spool) - (SELECT count(*) FROM aside)"
        ).fetchone()
        return int(count)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _prepare(self, most_bytes: int) -> None:
        # No other process may have it: what one takes the other would take as well.
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}").fetchall()
        self._db.executescript(SCHEMA + OWNER)
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        self._pages = max(1, most_bytes // page_bytes)

    def _require_one(self, noted: Owner, asking: Owner, count: int) -> None:
        if is_theirs := is_one(noted, asking):
            return
        unsure = "" if is_theirs is False else ", which does not answer yet"
        raise SpoolForeign(
            f"the spool {self._path} has {count} messages for {noted}, and takes none for "
            f"{asking}{unsure}: name another file, with api_spool or as DUETIME_API_SPOOL=...; "
            "this one's are sent by a duetime api for their own Kafka",
            is_certain=is_theirs is False,
        )

    def _put(self, records: Sequence[Outgoing], taken_ms: int | None) -> list[int]:
        inserted = [self._insert(each) for each in records]
        numbers = [each for each in inserted if each is not None]
        self._note(numbers, taken_ms)
        return numbers

    def _insert(self, record: Outgoing) -> int | None:
        """Its number; None where one with this id is there."""
        # Of two definitions of a series both count, also where their first run is the same.
        name = str(apart(record.id) if record.series else record.id)
        row = (name, record.topic, record.key, record.value, headers_text(record.headers))
        insert = "INSERT OR IGNORE INTO spool (id, topic, key, value, headers) VALUES (?,?,?,?,?)"
        done = self._db.execute(insert, row)
        if not done.rowcount and self._drop_aside(name):
            done = self._db.execute(insert, row)
        return done.lastrowid if done.rowcount else None

    def _drop_aside(self, name: str) -> bool:
        """Whether it was set aside: who gives it again wants it tried again."""
        aside = "SELECT number FROM spool JOIN aside USING (number) WHERE id = ?"
        found = self._db.execute(aside, (name,)).fetchall()
        self._each("DELETE FROM spool WHERE number = ?", found)
        self._each("DELETE FROM aside WHERE number = ?", found)
        return bool(found)

    def _note(self, numbers: Iterable[int], taken_ms: int | None) -> None:
        if taken_ms is not None:
            self._each("INSERT INTO taken VALUES (?, ?)", [(each, taken_ms) for each in numbers])

    def _each(self, statement: str, rows: Sequence[tuple[int | str, ...]]) -> None:
        self._db.executemany(statement, rows)

    @contextmanager
    def _transaction(self, pages: int | None = None) -> Iterator[None]:
        """All or nothing, in a file of at most so many pages."""
        most = self._pages + NOTES_PAGES if pages is None else pages
        self._db.execute(f"PRAGMA max_page_count = {most}").fetchall()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back already where the disk is full.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
