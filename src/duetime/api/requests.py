"""What is asked for, with the examples that the OpenAPI document shows (`responses`: answers)."""

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from duetime.clock import delay, instant
from duetime.config import Settings
from duetime.errors import InvalidMessage, Reason
from duetime.outgoing import Outgoing, Payload, Wanted, new_unique, scheduled
from duetime.payload import from_base64
from duetime.recurrence import GRACE_MS, Misfire, Recurrence
from duetime.recurring import record_of

At = Annotated[
    str | None,
    Field(description="When it is due: ISO 8601 with a zone.", examples=["2026-12-24T18:00:00Z"]),
]
In = Annotated[
    str | None,
    Field(alias="in", description="Or how long from now: 250ms, 5s, 1h30m, 7d.", examples=["5s"]),
]

From = Annotated[
    str | None,
    Query(
        alias="from",
        description="Due then or later: ISO 8601 with a zone.",
        examples=["2026-12-24T00:00:00Z"],
    ),
]
To = Annotated[
    str | None,
    Query(
        description="Due before then: ISO 8601 with a zone.", examples=["2026-12-25T00:00:00+01:00"]
    ),
]
Topic = Annotated[str | None, Query(description="Those for this destination.", examples=["orders"])]
#: The most that is listed in one answer.
MOST = 1_000

Limit = Annotated[int, Query(ge=1, le=MOST, description="So many at most.", examples=[10])]
Number = Annotated[int, Path(ge=0, description="What it is called by in the list.", examples=[3])]


#: More fields than anything has that is asked for.
MOST_FIELDS = 100

#: The most dead letters that are named in one request.
MOST_NUMBERS = 10_000


def few_fields(given: object) -> object:
    """The same, unless it has so many fields that to tell of each would take all memory."""
    for each in given if isinstance(given, list) else (given,):
        if isinstance(each, dict) and len(each) > MOST_FIELDS:
            raise PydanticCustomError("fields", f"there are over {MOST_FIELDS} fields")
    return given


#: Of a model in a body.
FewFields = BeforeValidator(few_fields)


#: The two ways to give headers. No field is called so: they are not shown where one is wrong.
UNSHOWN = BY_NAME, LISTED = "headers by name", "headers as a list"


def _how_given(headers: object) -> str:
    return LISTED if isinstance(headers, list) else BY_NAME


class Due(BaseModel):
    """When: `at` an instant or `in` a while, exactly one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"in": "1h30m"}]})

    at: At = None
    in_: In = None

    def times(self, *, needed: bool = True) -> tuple[datetime | None, timedelta | None]:
        """Both, of which one is None. Raises InvalidMessage, in the words of HTTP's fields."""
        if self.at is not None and self.in_ is not None:
            raise InvalidMessage(Reason.TWO_DUE_TIMES, "both at and in are given: leave one")
        if needed and self.at is None and self.in_ is None:
            raise InvalidMessage(Reason.NO_DUE_TIME, "neither at nor in is given: add one")
        return instant(self.at), delay(self.in_)


class Header(BaseModel):
    """A header of the Kafka record."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(examples=["source"])
    value: str | None = Field(None, description="As text; null is none.")
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
                {"topic": "reports", "cron": "0 9 * * 1-5", "zone": "Europe/Berlin", "id": "daily"},
            ]
        },
    )

    topic: str = Field(description="Where it is to be delivered.", examples=["orders"])
    value: Any = Field(
        None, description="The payload: a string as its own bytes, null as none, else as JSON."
    )
    value_base64: str | None = Field(None, description="The payload, for other bytes.")
    key: str | None = Field(None, description="As text; it chooses the partition.")
    key_base64: str | None = Field(None, description="The key, for other bytes.")
    headers: (
        Annotated[dict[str, str | None], Field(fail_fast=True), Tag(BY_NAME)]
        | Annotated[list[Annotated[Header, FewFields]], Field(fail_fast=True), Tag(LISTED)]
    ) = Field(
        default_factory=list,
        description="By name; or as a list, for names that come twice.",
        discriminator=Discriminator(_how_given),
    )
    id: str | None = Field(
        None, description="Your own id, and the idempotency key.", examples=["order-17"]
    )
    partition: int | None = Field(None, description="The destination's partition.")
    cluster: str | None = Field(None, description="Another cluster, as the configuration has it.")
    cron: str | None = Field(
        None,
        description="It comes again: five fields, or @hourly ..; from `at` on, a minute ago at the "
        "earliest, or from now.",
    )
    zone: str | None = Field(None, description="Whose clocks `cron` means; UTC.")
    until: str | None = Field(None, description="No run is later: ISO 8601 with a zone.")
    misfire: Misfire | None = Field(None, description="What becomes of missed runs; `once`.")

    def record(
        self, settings: Settings, now_ms: int, due_ms: int | None = None, drawn: str | None = None
    ) -> Outgoing:
        """What is sent to the intake; due when its first try said, if there was one.

        `drawn` is for a message without an id of its own; None draws one. Raises InvalidMessage.
        """
        unique = (drawn or new_unique()) if self.id is None else self.id
        wanted, recurrence = self._wanted(), self._recurrence()
        if recurrence is None and due_ms is not None:
            return scheduled(wanted, settings, due_ms=due_ms, now_ms=now_ms, unique=unique)
        at, in_ = self.times(needed=recurrence is None)
        if recurrence is not None and at is not None:
            at = max(at, _earliest(now_ms))
        return record_of(wanted, recurrence, settings, at=at, in_=in_, now_ms=now_ms, unique=unique)

    def _recurrence(self) -> Recurrence | None:
        if self.cron is None:
            if self.zone or self.until or self.misfire:
                raise InvalidMessage(
                    Reason.BAD_CRON, "zone, until and misfire belong to cron: add it"
                )
            return None
        until = instant(self.until)
        return Recurrence.of(self.cron, zone=self.zone, until=until, misfire=self.misfire)

    def _wanted(self) -> Wanted:
        return Wanted(
            topic=self.topic,
            value=_either("value", _as_sent(self.value), self.value_base64),
            key=_either("key", self.key, self.key_base64),
            headers=_pairs(self.headers) if self.headers else None,
            partition=self.partition,
            cluster=self.cluster,
        )


class Redrive(BaseModel):
    """Which dead letters to bring back: what is given must all hold; `all` is every one."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"numbers": [3, 4]}, {"topic": "orders"}]}
    )

    numbers: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_NUMBERS, fail_fast=True)]
        | None
    ) = Field(None, description="With these.")
    topic: str | None = Field(None, description="For this destination.")
    reason: str | None = Field(None, description="That died of this.")
    since: str | None = Field(None, description="That died then or later; with a zone.")
    all: bool = Field(default=False, description="Whether all are meant, if nothing else is said.")


def _earliest(now_ms: int) -> datetime:
    """When a series may begin: of years that are over, one message would make millions."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=now_ms - GRACE_MS)


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
