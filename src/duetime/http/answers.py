"""What the API says, as values: frozen, and with payloads as the bytes that they are.

What an API of another release does not say is None, and what it says besides is left out.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from duetime.standing import Rescue

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A message that the API took."""

    #: Its full id, which cancels and reschedules it; of one that comes again the series' name.
    id: str
    #: Whether Kafka has it; if not, the API's disk has, until Kafka answers.
    in_kafka: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A message that waits, without what is in it."""

    id: str
    topic: str
    #: Epoch ms; of one that failed, when it is tried again.
    due_at_ms: int
    #: After this instant it is not delivered any more, epoch ms; None is never.
    expires_ms: int | None
    #: None is by the key.
    partition: int | None
    #: The cluster that it is for; None is the one where duetime runs.
    cluster: str | None
    #: How large its value is; None is none.
    value_bytes: int | None
    #: Whether a cancel waits for it, too: it will not be delivered.
    cancelled: bool
    #: How often it was tried, and failed.
    attempts: int
    #: When it failed for the first time, epoch ms.
    failed_ms: int | None

    @property
    def due(self) -> datetime:
        """When it is due."""
        return _EPOCH + timedelta(milliseconds=self.due_at_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Listed):
    """A message that waits, with all its parts."""

    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    #: The sender's own, in order.
    headers: tuple[tuple[str, bytes | None], ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """How many records wait for one stretch of time."""

    from_ms: int
    to_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """How many records wait until when; cancels and what they cancel count until their time."""

    #: All of them together.
    pending: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A message that comes again, without what is in it."""

    name: str
    topic: str
    cron: str
    zone: str
    #: No run is later, ISO 8601; None is no end.
    until: str | None
    #: What becomes of runs that were missed.
    misfire: str
    partition: int | None
    cluster: str | None
    paused: bool
    #: When it comes next, epoch ms; None where it is paused, or over.
    next_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDead:
    """A message that could not be delivered, without what is in it."""

    #: What it is called by.
    number: int
    #: The full id under which it waited.
    id: str
    topic: str
    partition: int | None
    cluster: str | None
    due_ms: int
    reason: str
    detail: str
    attempts: int
    #: When it failed first and last, epoch ms.
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(ListedDead):
    """The same with all its parts."""

    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: tuple[tuple[str, bytes | None], ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRejected:
    """A record that could not be taken in, without what is in it."""

    #: What it is called by.
    number: int
    at_ms: int
    reason: str
    detail: str
    #: Where it came in: topic/partition/offset.
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRecord(ListedRejected):
    """The same with all its parts."""

    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: tuple[tuple[str, bytes | None], ...] = field(repr=False)


def read(kind: type[_Kind], said: Mapping[str, Any]) -> _Kind:
    """A value of this kind, of what the API says."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # all of ours are
    return kind(**{name: READ.get(name, _as_said)(said, name) for name in names})


def _as_said(said: Mapping[str, Any], name: str) -> object:
    return said.get(name)


def _payload(said: Mapping[str, Any], name: str) -> bytes | None:
    """As text, or in base64 under a name that says so."""
    if (encoded := said.get(f"{name}_base64")) is not None:
        return base64.b64decode(encoded)
    text: str | None = said.get(name)
    return None if text is None else text.encode()


def _headers(said: Mapping[str, Any], name: str) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((each["name"], _payload(each, "value")) for each in said.get(name, ()))


def _slots(said: Mapping[str, Any], name: str) -> tuple[Slot, ...]:
    return tuple(read(Slot, each) for each in said.get(name, ()))


def _rescues(said: Mapping[str, Any], name: str) -> tuple[Rescue, ...]:
    return tuple(read(Rescue, each) for each in said.get(name, ()))


def _tuple(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(said.get(name, ()))


#: How fields are read that are not as they are said.
READ: Mapping[str, Callable[[Mapping[str, Any], str], object]] = {
    "key": _payload,
    "value": _payload,
    "headers": _headers,
    "slots": _slots,
    "rescues": _rescues,
    "standbys": _tuple,
}
