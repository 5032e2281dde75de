"""What is answered (`requests`: what is asked for; `examples`: what the document shows of it)."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from duetime.api import examples
from duetime.api.requests import Header
from duetime.clock import format_instant
from duetime.dead import DeadLetter
from duetime.payload import payload_json
from duetime.recurrence import Misfire
from duetime.rejected import Rejected
from duetime.stores import Found, Pending


class Answer(BaseModel):
    """What is answered; the docstrings of its fields are in the document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


def shown(example: examples.Example) -> ConfigDict:
    """With this example in the document."""
    return ConfigDict(json_schema_extra={"examples": [example]})


class Accepted(Answer):
    """A message that was taken."""

    model_config = shown(examples.ACCEPTED)

    id: str
    """Its full id, to ask for it, cancel it or reschedule it; of one that comes again the name of
    the series."""
    due: str
    """When it is due, or comes first."""


class AcceptedMany(Answer):
    """Messages that were taken, in the order in which they were given."""

    model_config = shown(examples.ACCEPTED_MANY)

    messages: list[Accepted]


class Body(Answer):
    """A record's parts; what is no UTF-8 is in `..._base64` instead."""

    key: str | None = None
    key_base64: str | None = None
    value: str | None = None
    value_base64: str | None = None
    headers: list[Header] = []
    """The sender's own, in order; a name may come twice."""


class Summary(Answer):
    """A message that waits, without what is in it."""

    model_config = shown(examples.SUMMARY)

    id: str
    """Its full id."""
    topic: str
    """Where it is to be delivered."""
    due: str
    """When: ISO 8601, UTC. Of one that failed, when it is tried again."""
    due_at_ms: int
    """The same in epoch ms."""
    expires_ms: int | None = None
    """After this instant it is not delivered any more, epoch ms; null is never."""
    partition: int | None
    """The destination's; null is by the key."""
    cluster: str | None
    """The cluster that it is for; null is the one where duetime runs."""
    value_bytes: int | None
    """How large its value is; null is none."""
    cancelled: bool
    """Whether a cancel waits for it, too: it will not be delivered."""
    attempts: int = 0
    """How often it was tried, and failed."""
    failed_ms: int | None = None
    """When it failed for the first time, epoch ms."""


class Waiting(Summary, Body):
    """A message that waits, with all its parts."""

    model_config = shown(examples.WAITING)


class Page(Answer):
    """Some of the messages that wait, by due time; a page may be short, and not the last."""

    model_config = shown(examples.PAGE)

    messages: list[Summary]
    cursor: str | None
    """Give it to get the next page; null on the last one."""


class SlotCount(Answer):
    """How many records wait for one stretch of time."""

    from_ms: int
    """Its beginning, epoch ms."""
    to_ms: int
    """Its end, not included."""
    count: int


class Counts(Answer):
    """How many records wait until when; cancels and what they cancel count until their time."""

    model_config = shown(examples.COUNTS)

    pending: int
    """All of them together."""
    slots: list[SlotCount]


class Recurring(Answer):
    """A message that comes again, without what is in it."""

    model_config = shown(examples.SERIES)

    name: str
    """The `id` that it was sent with."""
    topic: str
    """Where it is delivered."""
    cron: str
    """When: five fields, or @hourly and the like."""
    zone: str
    """Whose clocks `cron` means."""
    until: str | None
    """No run is later; null is no end."""
    until_ms: int | None
    """The same in epoch ms."""
    misfire: Misfire
    """What becomes of runs that were missed."""
    partition: int | None
    cluster: str | None
    paused: bool
    next: str | None
    """When it comes next; null where it is paused, or over."""
    next_ms: int | None
    """The same in epoch ms."""


class RecurringPage(Answer):
    """All of them, by name."""

    model_config = shown(examples.SERIES_PAGE)

    series: list[Recurring]


class DeadSummary(Answer):
    """A message that could not be delivered, without what is in it."""

    model_config = shown(examples.DEAD_SUMMARY) | ConfigDict(from_attributes=True)

    number: int
    """What it is called by."""
    id: str
    """The full id under which it waited."""
    topic: str
    """Where it was to be delivered."""
    partition: int | None
    cluster: str | None
    due_ms: int
    """When it was due, epoch ms."""
    reason: str
    """Why it could not be: a fixed word."""
    detail: str
    """The same as a sentence."""
    attempts: int
    """How often it was tried."""
    first_ms: int
    """When that failed first, epoch ms."""
    last_ms: int
    """When it failed last."""


class Dead(DeadSummary, Body):
    """A message that could not be delivered, with all its parts."""

    model_config = shown(examples.DEAD)


class DeadPage(Answer):
    """The latest dead letters that were not brought back, the oldest of them first."""

    model_config = shown(examples.DEAD_PAGE)

    letters: list[DeadSummary]


class RejectedSummary(Answer):
    """A record that could not be taken in, without what is in it."""

    model_config = shown(examples.REJECTED_SUMMARY) | ConfigDict(from_attributes=True)

    number: int
    """What it is called by."""
    at_ms: int
    """When it was rejected, epoch ms."""
    reason: str
    """Why: a fixed word."""
    detail: str
    """The same as a sentence."""
    source: str
    """Where it came in: topic/partition/offset."""


class RejectedRecord(RejectedSummary, Body):
    """A record that could not be taken in, with all its parts."""

    model_config = shown(examples.REJECTED)


class RejectedPage(Answer):
    """The latest rejected records, the oldest of them first."""

    model_config = shown(examples.REJECTED_PAGE)

    records: list[RejectedSummary]


class Redriven(Answer):
    """How many were sent once more."""

    model_config = shown(examples.REDRIVEN)

    redriven: int


class Rescue(Answer):
    """Messages that were past due before a window took them up, as they were found at one look."""

    at_ms: int
    """When, epoch ms."""
    messages: int
    """How many."""
    from_ms: int
    """When they were due, epoch ms: from then on, as far as the store knows it unread."""
    to_ms: int
    """And up to then, not included."""


class State(Answer):
    """Who leads, who stands by, what waits and what is late; see `duetime status`."""

    model_config = shown(examples.STATE)

    leader: str | None
    """`host:process` of the pipeline that delivers; null where none does."""
    since_ms: int | None
    """Since when it leads, epoch ms."""
    standbys: list[str]
    """The pipelines that would take over."""
    waiting: int | None
    """Records that wait; null in an event while the store does not answer, and so are the next."""
    late: int | None
    """Those of them whose time is over."""
    lag_ms: int | None
    """For how long the oldest of these is."""
    rescued: int | None
    """Messages that were past due before a window took them up, since it leads."""
    rescues: list[Rescue]
    """The latest looks that found some of those, eight at most, oldest first."""
    queries: dict[str, str]
    """How each query of the leader fares: `runs`, or what keeps it from that."""


class Well(Answer):
    """That all is well."""

    model_config = shown({"status": "ok"})

    status: Literal["ok"] = "ok"


class Sums(Answer):
    """How many there have been since the topics were created; null is what Kafka cannot tell."""

    taken_in: int | None
    cancels: int | None
    released: int | None
    rejected: int | None
    failed: int | None
    dead: int | None


class Lateness(Answer):
    """How late messages of the API's own came in the last minute, through lanes and store; ms."""

    samples: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    overdue_ms: int
    """For how long the oldest is due that has not come."""


class Look(Answer):
    """All that the dashboard shows by itself, at one instant."""

    at_ms: int
    since_ms: int
    """When this process began to look: from then on `totals` leave out its own messages."""
    lateness: Lateness | None
    """Null where its own messages cannot be read."""
    status: State
    pending: Counts | None
    """Null while the store does not answer."""
    store_trouble: str | None
    """What is wrong with the store then, in a sentence."""
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
        "due": format_instant(found.due_ms),
        "due_at_ms": found.due_ms,
        "expires_ms": found.expires_ms,
        "partition": found.partition,
        "cluster": found.cluster,
        "value_bytes": None if found.value is None else len(found.value),
        "cancelled": found.cancelled,
        "attempts": found.retry.attempts if found.retry else 0,
        "failed_ms": found.retry.failed_ms if found.retry else None,
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
