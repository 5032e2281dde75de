"""What is answered, with the examples that the OpenAPI document shows (`wanted`: what is asked)."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from duetime.api.wanted import Header
from duetime.clock import format_instant
from duetime.dead import DeadLetter
from duetime.payload import payload_json
from duetime.rejected import Rejected
from duetime.stores import Found, Pending

ID = "019ac9b6e2d4-order-17"


class Accepted(BaseModel):
    """A message that was taken."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": ID, "due": "2026-12-24T18:00:00.000Z"}]}
    )

    id: str = Field(
        description="Its full id, to ask for it, cancel it or reschedule it; of one that comes "
        "again the name of the series."
    )
    due: str = Field(description="When it is due, or comes first.")


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
    #: Messages that were past due before a window took them up, since it leads.
    rescued: int | None
    #: How each query of the leader fares: `runs`, or what keeps it from that.
    queries: dict[str, str]


class Sums(BaseModel):
    """How many there have been since the topics were created; null is what Kafka cannot tell."""

    taken_in: int | None
    cancels: int | None
    released: int | None
    rejected: int | None
    failed: int | None
    dead: int | None


class Lateness(BaseModel):
    """How late messages of the API's own came in the last minute, through lanes and store; ms."""

    samples: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    #: For how long the oldest is due that has not come.
    overdue_ms: int


class Look(BaseModel):
    """All that the dashboard shows by itself, at one instant."""

    at_ms: int
    lateness: Lateness | None = Field(description="Null where its own messages cannot be read.")
    status: State
    pending: Counts
    totals: Sums
    spooled: int


def accepted(name: str, due_ms: int) -> dict[str, str]:
    """The parts of `Accepted`."""
    return {"id": name, "due": format_instant(due_ms)}


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
