"""What goes over the wire, with the examples that the OpenAPI document shows."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from duetime.clock import delay, format_instant, instant
from duetime.config import Settings
from duetime.dead import DeadLetter
from duetime.errors import InvalidMessage, Reason
from duetime.message import MessageId
from duetime.outgoing import Outgoing, Payload, Wanted, due_time_ms, new_unique, scheduled
from duetime.payload import from_base64, payload_json
from duetime.rejected import Rejected
from duetime.stores import Found, Pending

ID = "019ac9b6e2d4-order-17"

At = Annotated[
    str | None,
    Field(description="When it is due: ISO 8601 with a zone.", examples=["2026-12-24T18:00:00Z"]),
]
In = Annotated[
    str | None,
    Field(alias="in", description="Or how long from now: 250ms, 5s, 1h30m, 7d.", examples=["5s"]),
]


class Due(BaseModel):
    """When: `at` an instant or `in` a while, exactly one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"in": "1h30m"}]})

    at: At = None
    in_: In = None

    def due_ms(self, now_ms: int) -> int:
        """The instant in epoch ms. Raises InvalidMessage."""
        return due_time_ms(instant(self.at), delay(self.in_), now_ms)


class Header(BaseModel):
    """A header of the Kafka record."""

    model_config = ConfigDict(extra="forbid")

    name: str
    value: str | None = None
    value_base64: str | None = Field(None, description="In place of `value`, for other bytes.")


class NewMessage(Due):
    """A message to be delivered later."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"topic": "orders", "value": {"order": 17}, "key": "17", "in": "5s"},
                {
                    "topic": "orders",
                    "value": "text",
                    "at": "2026-12-24T18:00:00Z",
                    "id": "order-17",
                },
            ]
        },
    )

    topic: str = Field(description="Where it is to be delivered.", examples=["orders"])
    value: Any = Field(
        None, description="The payload: a string as its own bytes, null as none, else as JSON."
    )
    value_base64: str | None = Field(None, description="The payload, for other bytes.")
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str | None] | list[Header] = Field(
        default_factory=list, description="By name; or as a list, for names that come twice."
    )
    id: str | None = Field(
        None, description="Your own id, and the idempotency key.", examples=["order-17"]
    )
    partition: int | None = Field(None, description="The destination's partition.")
    cluster: str | None = Field(None, description="Another cluster, as the configuration has it.")

    def record(self, settings: Settings, now_ms: int, due_ms: int | None = None) -> Outgoing:
        """What is sent to the intake; due when its first try said, if there was one.

        Raises InvalidMessage.
        """
        wanted = Wanted(
            topic=self.topic,
            value=_either("value", _as_sent(self.value), self.value_base64),
            key=_either("key", self.key, self.key_base64),
            headers=_pairs(self.headers),
            partition=self.partition,
            cluster=self.cluster,
        )
        return scheduled(
            wanted,
            settings,
            due_ms=self.due_ms(now_ms) if due_ms is None else due_ms,
            now_ms=now_ms,
            unique=new_unique() if self.id is None else self.id,
        )


class Accepted(BaseModel):
    """A message that was taken."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": ID, "due": "2026-12-24T18:00:00.000Z"}]}
    )

    id: str = Field(description="Its full id, to ask for it, cancel it or reschedule it.")
    due: str


class AcceptedMany(BaseModel):
    """Messages that were taken, in the order in which they were given."""

    messages: list[Accepted]


class Body(BaseModel):
    """A record's parts; what is no UTF-8 is in `..._base64` instead."""

    key: str | None = None
    key_base64: str | None = None
    value: str | None = None
    value_base64: str | None = None
    headers: list[Header] = []


class Summary(BaseModel):
    """A message that waits, without what is in it."""

    id: str = Field(examples=[ID])
    topic: str
    due: str
    due_at_ms: int
    expires_ms: int | None = None
    partition: int | None
    cluster: str | None
    value_bytes: int | None
    cancelled: bool


class Waiting(Summary, Body):
    """A message that waits, with all its parts."""


class Page(BaseModel):
    """Some of the messages that wait, by due time; a page may be short, and not the last."""

    messages: list[Summary]
    cursor: str | None = Field(description="Give it to get the next page; null on the last one.")


class SlotCount(BaseModel):
    """How many records wait for one stretch of time."""

    from_ms: int
    to_ms: int
    count: int


class Counts(BaseModel):
    """How many records wait until when; cancels and what they cancel count until their time."""

    pending: int
    slots: list[SlotCount]


class DeadSummary(BaseModel):
    """A message that could not be delivered, without what is in it."""

    model_config = ConfigDict(from_attributes=True)

    number: int
    id: str
    topic: str
    partition: int | None
    cluster: str | None
    due_ms: int
    reason: str
    detail: str
    attempts: int
    first_ms: int
    last_ms: int


class Dead(DeadSummary, Body):
    """The same with all its parts."""


class DeadPage(BaseModel):
    """The latest dead letters that were not brought back, the oldest of them first."""

    letters: list[DeadSummary]


class RejectedSummary(BaseModel):
    """A record that could not be taken in, without what is in it."""

    model_config = ConfigDict(from_attributes=True)

    number: int
    at_ms: int
    reason: str
    detail: str
    source: str


class RejectedRecord(RejectedSummary, Body):
    """The same with all its parts."""


class RejectedPage(BaseModel):
    """The latest rejected records, the oldest of them first."""

    records: list[RejectedSummary]


class Redrive(BaseModel):
    """Which dead letters to bring back: what is given must all hold; `all` is every one."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"numbers": [3, 4]}, {"topic": "orders"}]}
    )

    numbers: list[Annotated[int, Field(ge=0)]] | None = None
    topic: str | None = None
    reason: str | None = None
    since: str | None = Field(None, description="Those that died then or later; with a zone.")
    all: bool = False


class Redriven(BaseModel):
    """How many were sent once more."""

    redriven: int


class State(BaseModel):
    """Who leads, who stands by, what waits and what is late; see `duetime status`."""

    leader: str | None
    since_ms: int | None
    standbys: list[str]
    waiting: int
    late: int
    lag_ms: int


class Sums(BaseModel):
    """How many there have been since the topics were created; null is what Kafka cannot tell."""

    taken_in: int | None
    cancels: int | None
    released: int | None
    rejected: int | None
    failed: int | None
    dead: int | None


class Look(BaseModel):
    """All that the dashboard shows by itself, at one instant."""

    at_ms: int
    status: State
    pending: Counts
    totals: Sums
    spooled: int


def accepted(id: MessageId) -> dict[str, str]:  # noqa: A002 (what all call it)
    """The parts of `Accepted`."""
    return {"id": str(id), "due": format_instant(id.due_ms)}


def summary(found: Found) -> dict[str, Any]:
    """The parts of `Summary`."""
    return {
        "id": str(found.id),
        "topic": found.topic,
        "due": format_instant(found.id.due_ms),
        "due_at_ms": found.id.due_ms,
        "expires_ms": found.expires_ms,
        "partition": found.partition,
        "cluster": found.cluster,
        "value_bytes": None if found.value is None else len(found.value),
        "cancelled": found.cancelled,
    }


def counts(slots: Sequence[Pending]) -> Counts:
    """What waits, slot by slot."""
    return Counts(
        pending=sum(each.count for each in slots),
        slots=[SlotCount(**slot_count(each)) for each in slots],
    )


def body(record: Found | DeadLetter | Rejected) -> dict[str, Any]:
    """The parts of `Body`."""
    headers = [{"name": name, **payload_json("value", each)} for name, each in record.headers]
    return {
        **payload_json("key", record.key),
        **payload_json("value", record.value),
        "headers": headers,
    }


def slot_count(slot: Pending) -> dict[str, int]:
    """The parts of `SlotCount`."""
    return {"from_ms": slot.start_ms, "to_ms": slot.end_ms, "count": slot.count}


def _as_sent(value: object) -> str | None:
    """A string is its own bytes, as in Airtel's envelope; the rest is the shortest JSON."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidMessage(
            Reason.UNREADABLE, "the value has a number that JSON does not: send it as text"
        ) from None


def _either(name: str, text: str | None, base64: str | None) -> Payload:
    if base64 is None:
        return text
    if text is not None:
        raise InvalidMessage(
            Reason.UNREADABLE, f"both {name} and {name}_base64 are given: leave one"
        )
    return from_base64(base64, f"{name}_base64")


def _pairs(headers: dict[str, str | None] | list[Header]) -> list[tuple[str, Payload]]:
    if isinstance(headers, dict):
        return list(headers.items())
    return [(each.name, _either("value", each.value, each.value_base64)) for each in headers]
