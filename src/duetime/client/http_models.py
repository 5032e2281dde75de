"""The answers of the HTTP API: what the server sends, and what the HTTP clients return.

JSON has no bytes: what is UTF-8 is sent as text, anything else in base64 under `..._base64`. The
properties `key`, `value` and `headers` of a model have the bytes. A client ignores fields that it
does not know, and reads a missing nullable one as None, so that releases can be mixed. Each example
is shown in the OpenAPI document.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field

from duetime.core.clock import datetime_of, format_instant
from duetime.core.cron import Misfire
from duetime.core.messages import MessageId, payload_json

#: 24 December 2026, 18:00 UTC, in epoch ms, and one hour before.
EXAMPLE_DUE_MS = 1_798_135_200_000
EXAMPLE_NOW_MS = EXAMPLE_DUE_MS - 3_600_000

EXAMPLE_DUE = format_instant(EXAMPLE_DUE_MS)
EXAMPLE_ID = str(MessageId(due_ms=EXAMPLE_DUE_MS, unique="order-17"))


def example(**fields: Any) -> ConfigDict:  # noqa: ANN401 (as JSON)
    """Return the configuration of a model whose example has these fields."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the example of a model."""
    extra: Any = model.model_config["json_schema_extra"]
    shown: dict[str, Any] = extra["examples"][0]
    return shown


class Answer(BaseModel):
    """The base of every answer; the docstrings of fields are their descriptions in OpenAPI."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, serialize_by_alias=True)


class Accepted(Answer):
    """A message that was accepted."""

    model_config = example(id=EXAMPLE_ID, due=EXAMPLE_DUE)

    id: str
    """The full id, to show, cancel or reschedule the message; of a schedule, its name."""
    due_text: str = Field(alias="due")
    """When it is due, ISO 8601 in UTC; of a schedule, when its first run is due."""


class AcceptedMany(Answer):
    """Messages that were accepted, in the order of the request."""

    model_config = example(messages=[{"id": EXAMPLE_ID, "due": EXAMPLE_DUE}])

    messages: list[Accepted]


class Scheduled(Answer):
    """A message that was accepted, as the HTTP clients return it."""

    id: str
    """The full id, as in `Accepted`."""
    in_kafka: bool
    """True if Kafka has it (201); otherwise the API's disk has it until Kafka answers (202)."""


class RecordHeader(Answer):
    """A header of a Kafka record."""

    name: str
    value_text: str | None = Field(None, alias="value", repr=False)
    """The value as text; null is a header without a value."""
    value_binary: Base64Bytes | None = Field(None, alias="value_base64", repr=False)
    """The value in base64, where it is not UTF-8."""

    @property
    def value(self) -> bytes | None:
        """The value as bytes."""
        return _bytes(self.value_text, self.value_binary)


class RecordPayload(Answer):
    """The key, value and headers of a record."""

    model_config = example(
        key="17",
        key_base64=None,
        value='{"order":17}',
        value_base64=None,
        headers=[{"name": "source", "value": "shop", "value_base64": None}],
    )

    key_text: str | None = Field(None, alias="key", repr=False)
    """The key as text; null is a record without a key, or one whose key is not UTF-8."""
    key_binary: Base64Bytes | None = Field(None, alias="key_base64", repr=False)
    """The key in base64, where it is not UTF-8."""
    value_text: str | None = Field(None, alias="value", repr=False)
    """The value as text; null is a record without a value, or one whose value is not UTF-8."""
    value_binary: Base64Bytes | None = Field(None, alias="value_base64", repr=False)
    """The value in base64, where it is not UTF-8."""
    header_list: list[RecordHeader] = Field([], alias="headers", repr=False)
    """The sender's headers in their order; a name may occur more than once."""

    @property
    def key(self) -> bytes | None:
        """The key as bytes."""
        return _bytes(self.key_text, self.key_binary)

    @property
    def value(self) -> bytes | None:
        """The value as bytes."""
        return _bytes(self.value_text, self.value_binary)

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """The headers as pairs of name and value."""
        return tuple((each.name, each.value) for each in self.header_list)


def payload_fields(
    key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
) -> dict[str, Any]:
    """Return the JSON fields of a `RecordPayload` with these bytes."""
    rendered = [{"name": name, **payload_json("value", each)} for name, each in headers]
    return {**payload_json("key", key), **payload_json("value", value), "headers": rendered}


def _bytes(text: str | None, binary: bytes | None) -> bytes | None:
    return binary if text is None else text.encode()


class Destination(Answer):
    """The destination of a message."""

    topic: str
    """The destination topic."""
    partition: int | None = None
    """The destination partition; null is chosen by the key."""
    cluster: str | None = None
    """The destination cluster; null is the cluster where duetime runs."""


class MessageSummary(Destination):
    """A scheduled message without its payload."""

    model_config = example(
        id=EXAMPLE_ID,
        topic="orders",
        due=EXAMPLE_DUE,
        due_at_ms=EXAMPLE_DUE_MS,
        expires_ms=None,
        partition=None,
        cluster=None,
        value_bytes=12,
        cancelled=False,
        attempts=0,
        failed_ms=None,
    )

    id: str
    """The full id."""
    due_text: str = Field(alias="due")
    """When it is due, ISO 8601 in UTC; after a failed attempt, when it is retried."""
    due_at_ms: int
    """`due` in epoch ms."""
    expires_ms: int | None = None
    """It is not delivered after this instant, epoch ms; null is no expiration."""
    value_bytes: int | None = None
    """The size of the value in bytes; null is no value."""
    cancelled: bool
    """True if a cancellation is pending for it: it will not be delivered."""
    attempts: int = 0
    """The number of failed attempts."""
    failed_ms: int | None = None
    """When the first attempt failed, epoch ms."""

    @property
    def due(self) -> datetime:
        """The instant `due_at_ms` as a datetime in UTC."""
        return datetime_of(self.due_at_ms)


class ScheduledMessage(MessageSummary, RecordPayload):
    """A scheduled message with its payload."""

    model_config = example(**example_of(MessageSummary), **example_of(RecordPayload))


class MessagePage(Answer):
    """Scheduled messages by due time; a page may be short without being the last one."""

    model_config = example(messages=[example_of(MessageSummary)], cursor=EXAMPLE_ID)

    messages: list[MessageSummary]
    cursor: str | None
    """Send it to get the next page; null on the last page."""


class SlotCount(Answer):
    """The number of records in one slot of the timer wheel."""

    from_ms: int
    """The beginning of the slot, epoch ms."""
    to_ms: int
    """The end of the slot, epoch ms, not included."""
    count: int


class PendingCounts(Answer):
    """Pending records by slot; cancellations and what they cancel count until they are due."""

    model_config = example(
        pending=17,
        slots=[{"from_ms": EXAMPLE_DUE_MS, "to_ms": EXAMPLE_DUE_MS + 1_000, "count": 17}],
    )

    pending: int
    """The sum of all slots."""
    slots: list[SlotCount]


class ScheduleSummary(Destination):
    """A schedule: a message that is delivered at each run of a cron expression."""

    model_config = example(
        name="daily-report",
        topic="reports",
        cron="0 9 * * 1-5",
        zone="Europe/Berlin",
        until="2027-12-31T23:00:00.000Z",
        until_ms=1_830_294_000_000,
        misfire="once",
        partition=None,
        cluster=None,
        paused=False,
        next="2026-12-25T08:00:00.000Z",
        next_ms=1_798_185_600_000,
    )

    name: str
    """The `id` of the message that defined it."""
    cron: str
    """Five fields, or a word such as @hourly."""
    zone: str
    """The time zone of `cron`."""
    until: str | None = None
    """The end, ISO 8601 in UTC: no run is later; null is no end."""
    until_ms: int | None = None
    """`until` in epoch ms."""
    misfire: Misfire
    """The treatment of missed runs."""
    paused: bool
    next: str | None = None
    """The next run, ISO 8601 in UTC; null while it is paused, and after its end."""
    next_ms: int | None = None
    """`next` in epoch ms."""


class ScheduleList(Answer):
    """All schedules by name."""

    model_config = example(schedules=[example_of(ScheduleSummary)])

    schedules: list[ScheduleSummary]


class DeadLetterSummary(Destination):
    """A message that could not be delivered, without its payload."""

    model_config = example(
        offset=3,
        id=EXAMPLE_ID,
        topic="orders",
        partition=7,
        cluster=None,
        due_ms=EXAMPLE_DUE_MS,
        reason="no-such-partition",
        detail="the destination has fewer partitions than due-partition asks for",
        attempts=10,
        first_ms=EXAMPLE_DUE_MS + 2,
        last_ms=EXAMPLE_DUE_MS + 411_906,
    )

    offset: int
    """The offset in the topic of dead letters, by which it is shown and redriven."""
    id: str
    """The full id under which it was scheduled."""
    due_ms: int
    """When it was due, epoch ms."""
    reason: str
    """The reason of the last failure: a fixed word."""
    detail: str
    """The reason as a sentence."""
    attempts: int
    """The number of attempts."""
    first_ms: int
    """When the first attempt failed, epoch ms."""
    last_ms: int
    """When the last attempt failed, epoch ms."""


class DeadLetterDetail(DeadLetterSummary, RecordPayload):
    """A message that could not be delivered, with its payload."""

    model_config = example(**example_of(DeadLetterSummary), **example_of(RecordPayload))


class DeadLetterList(Answer):
    """The latest dead letters that were not redriven, oldest first."""

    model_config = example(letters=[example_of(DeadLetterSummary)])

    letters: list[DeadLetterSummary]


class RedriveCount(Answer):
    """The number of dead letters that were redriven."""

    model_config = example(redriven=2)

    redriven: int


class RejectedSummary(Answer):
    """A record that the intake rejected, without its payload."""

    model_config = example(
        offset=5,
        at_ms=EXAMPLE_NOW_MS,
        reason="bad-topic",
        detail="the destination is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -",
        source="duetime.in/0/4711",
    )

    offset: int
    """The offset in the topic of rejected records, by which it is shown."""
    at_ms: int
    """When it was rejected, epoch ms."""
    reason: str
    """The reason: a fixed word."""
    detail: str
    """The reason as a sentence."""
    source: str
    """The record in the intake topic: topic/partition/offset."""


class RejectedDetail(RejectedSummary, RecordPayload):
    """A record that the intake rejected, with its payload."""

    model_config = example(**example_of(RejectedSummary), **example_of(RecordPayload))


class RejectedList(Answer):
    """The latest rejected records, oldest first."""

    model_config = example(records=[example_of(RejectedSummary)])

    records: list[RejectedSummary]


class OverdueRelease(Answer):
    """Messages past due that one overdue scan found and released."""

    at_ms: int
    """When the scan found them, epoch ms."""
    messages: int
    """How many it found."""
    from_ms: int
    """The earliest due time, epoch ms, as far as the store knows it without reading."""
    to_ms: int
    """The latest due time, epoch ms, not included."""


class PipelineStatus(Answer):
    """The leader, the standbys, and what is pending and late."""

    model_config = example(
        leader="worker-1:4711",
        since_ms=EXAMPLE_NOW_MS - 86_400_000,
        standbys=["worker-2:1234"],
        waiting=17,
        late=0,
        lag_ms=0,
        overdue_released=3,
        overdue_releases=[
            {
                "at_ms": EXAMPLE_NOW_MS,
                "messages": 3,
                "from_ms": EXAMPLE_NOW_MS - 21_000,
                "to_ms": EXAMPLE_NOW_MS - 11_000,
            }
        ],
        queries={"intake": "runs", "lanes": "runs", "retries": "runs"},
    )

    leader: str | None = None
    """`host:process` of the pipeline that delivers; null where none does."""
    since_ms: int | None = None
    """Since when it leads, epoch ms."""
    standbys: list[str]
    """The pipelines that would take over."""
    waiting: int | None = None
    """Pending records; null, as are `late` and `lag_ms`, in an event without a store."""
    late: int | None = None
    """Pending records whose slot is over."""
    lag_ms: int | None = None
    """For how long the oldest of those slots is over."""
    overdue_released: int | None = None
    """Messages that were released past due since the leader leads."""
    overdue_releases: list[OverdueRelease]
    """The latest eight scans that found such messages, oldest first."""
    queries: dict[str, str]
    """The state of each query of the leader: `runs`, or what prevents that."""


class Totals(Answer):
    """Counts since the topics were created; null is what Kafka's offsets do not tell."""

    taken_in: int | None
    """Records in the intake topics, without cancellations."""
    cancels: int | None
    """Cancellations."""
    released: int | None
    """Records that left the timer wheel."""
    rejected: int | None
    """Rejected records."""
    failed: int | None
    """Failed attempts."""
    dead: int | None
    """Dead letters."""
