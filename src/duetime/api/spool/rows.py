"""Records as rows of the spool's file."""

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from secrets import token_hex

from duetime.message import MessageId
from duetime.outgoing import Header, Outgoing

#: `taken` and `aside` are tables of their own, so that noting does not write a payload once more.
SCHEMA = """
CREATE TABLE IF NOT EXISTS spool (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    topic TEXT NOT NULL,
    key BLOB,
    value BLOB,
    headers TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS taken (number INTEGER PRIMARY KEY, taken_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS aside (number INTEGER PRIMARY KEY);
CREATE TRIGGER IF NOT EXISTS removed DELETE ON spool
    BEGIN DELETE FROM taken WHERE number = OLD.number; END;
"""

COLUMNS = "number, id, topic, key, value, headers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """A record in the spool."""

    number: int
    record: Outgoing

    @property
    def size_bytes(self) -> int:
        """How large it is, roughly."""
        parts = self.record.key, self.record.value, *(value for _, value in self.record.headers)
        return sum(len(each or b"") for each in parts)


def apart(id: MessageId) -> MessageId:  # noqa: A002 (what all call it)
    """An id for what is no message: it is kept as often as it is asked for."""
    return MessageId(due_ms=id.due_ms, unique=f"@{token_hex(16)}")


def headers_text(headers: Iterable[Header]) -> str:
    """Headers as a row has them: JSON, their values in base64."""
    return json.dumps(
        [
            (name, None if value is None else base64.b64encode(value).decode())
            for name, value in headers
        ]
    )


def spooled(row: tuple[int, str, str, bytes | None, bytes | None, str]) -> Spooled:
    """The record of a row, of COLUMNS."""
    number, name, topic, key, value, headers = row
    return Spooled(
        number=number,
        record=Outgoing(
            id=MessageId.parse(name),
            topic=topic,
            key=key,
            value=value,
            headers=tuple(
                (each, None if text is None else base64.b64decode(text))
                for each, text in json.loads(headers)
            ),
        ),
    )
