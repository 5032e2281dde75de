"""The parameters and bodies of requests, with their examples in the OpenAPI document."""

import json
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from duetime.core.clock import datetime_of, delay, instant
from duetime.core.cron import GRACE_MS, Misfire, Recurrence
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import END, from_base64
from duetime.core.records import (
    IntakeRecord,
    MessageSpec,
    Payload,
    intake_record,
    message_record,
    new_unique,
)
from duetime.core.settings import Settings

#: The longest list in one answer.
MAX_LIMIT = 1_000

#: More fields than any request has.
MAX_FIELDS = 100

#: The most dead letters that one request names.
MAX_OFFSETS = 10_000

From = Annotated[
    str | None,
    Query(
        alias="from",
        description="Due at this instant or later: ISO 8601 with a zone.",
        examples=["2026-12-24T00:00:00Z"],
    ),
]
To = Annotated[
    str | None,
    Query(
        description="Due before this instant: ISO 8601 with a zone.",
        examples=["2026-12-25T00:00:00+01:00"],
    ),
]
Topic = Annotated[str | None, Query(description="For this destination.", examples=["orders"])]
Limit = Annotated[
    int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of items.", examples=[10])
]
Offset = Annotated[int, Path(ge=0, description="Its offset, as the list has it.", examples=[3])]


def _check_field_count(body: object) -> object:
    """Refuse a body whose fields would make a list of errors that takes all memory."""
    for each in body if isinstance(body, list) else (body,):
        if isinstance(each, dict) and len(each) > MAX_FIELDS:
            raise PydanticCustomError("fields", f"there are over {MAX_FIELDS} fields")
    return body


#: Annotates a model in a body.
FewFields = BeforeValidator(_check_field_count)

#: The two forms of headers, as tags in the location of an error; they are no fields of a request.
HEADER_FORMS = MAPPING, PAIRS = "headers by name", "headers as a list"


class DueTime(BaseModel):
    """A due time: the instant `at` or the delay `in`, exactly one."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"in": "1h30m"}]})

    at: str | None = Field(
        None,
        description="The instant: ISO 8601 with a zone.",
        examples=["2026-12-24T18:00:00Z"],
    )
    in_: str | None = Field(
        None, alias="in", description="The delay from now: 250ms, 5s, 1h30m, 7d.", examples=["5s"]
    )

    def times(self, *, needed: bool = True) -> tuple[datetime | None, timedelta | None]:
        """Return both as values. Raises InvalidMessage unless exactly one is given.

        Without `needed`, none is allowed, too.
        """
        if self.at is not None and self.in_ is not None:
            raise InvalidMessage(Reason.TWO_DUE_TIMES, "both at and in are given: leave one")
        if needed and self.at is None and self.in_ is None:
            raise InvalidMessage(Reason.NO_DUE_TIME, "neither at nor in is given: add one")
        return instant(self.at), delay(self.in_)


class HeaderSpec(BaseModel):
    """A header of the Kafka record."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(examples=["source"])
    value: str | None = Field(None, description="The value as text; null is no value.")
    value_base64: str | None = Field(None, description="In place of `value`, for other bytes.")


class NewMessage(DueTime):
    """A message to be delivered later, or a schedule."""

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

    topic: str = Field(description="The destination topic.", examples=["orders"])
    value: Any = Field(
        None,
        description="The payload: a string as its own bytes, null as none, anything else as JSON.",
    )
    value_base64: str | None = Field(None, description="In place of `value`, for other bytes.")
    key: str | None = Field(None, description="The key as text; it chooses the partition.")
    key_base64: str | None = Field(None, description="In place of `key`, for other bytes.")
    headers: (
        Annotated[dict[str, str | None], Field(fail_fast=True), Tag(MAPPING)]
        | Annotated[list[Annotated[HeaderSpec, FewFields]], Field(fail_fast=True), Tag(PAIRS)]
    ) = Field(
        default_factory=list,
        description="By name; or as a list, where a name occurs more than once.",
        discriminator=Discriminator(
            lambda headers: PAIRS if isinstance(headers, list) else MAPPING
        ),
    )
    id: str | None = Field(
        None,
        description="Your own id, which is the idempotency key; of a schedule, its name.",
        examples=["order-17"],
    )
    partition: int | None = Field(None, description="The destination partition.")
    cluster: str | None = Field(None, description="Another cluster, by its name in the settings.")
    cron: str | None = Field(
        None,
        description="Makes a schedule: five fields, or a word such as @hourly. It starts at `at`, "
        "but at the earliest a minute ago, or else now.",
    )
    zone: str | None = Field(None, description="The time zone of `cron`; UTC by default.")
    until: str | None = Field(None, description="No run is later: ISO 8601 with a zone.")
    misfire: Misfire | None = Field(
        None, description="The treatment of missed runs; `once` by default."
    )

    def record(
        self, settings: Settings, now_ms: int, due_ms: int | None = None, drawn: str | None = None
    ) -> IntakeRecord:
        """Return the record for the intake. Raises InvalidMessage.

        `due_ms` is the due time of an earlier try of this message, if there was one. `drawn` is
        the id of a message without an `id`; None draws one.
        """
        unique = (drawn or new_unique()) if self.id is None else self.id
        spec, recurrence = self._spec(), self._recurrence()
        if recurrence is None and due_ms is not None:
            return message_record(spec, settings, due_ms=due_ms, now_ms=now_ms, unique=unique)
        at, in_ = self.times(needed=recurrence is None)
        if recurrence is not None and at is not None:
            # The runs of years that are over would be millions of messages.
            at = max(at, datetime_of(now_ms - GRACE_MS))
        return intake_record(
            spec, recurrence, settings, at=at, in_=in_, now_ms=now_ms, unique=unique
        )

    def _recurrence(self) -> Recurrence | None:
        if self.cron is not None:
            until = instant(self.until)
            return Recurrence.of(self.cron, zone=self.zone, until=until, misfire=self.misfire)
        if self.zone or self.until or self.misfire:
            raise InvalidMessage(Reason.BAD_CRON, "zone, until and misfire belong to cron: add it")
        return None

    def _spec(self) -> MessageSpec:
        headers: list[tuple[str, Payload]] | None
        if isinstance(self.headers, dict):
            headers = list(self.headers.items())
        else:
            headers = [
                (each.name, _either("value", each.value, each.value_base64))
                for each in self.headers
            ]
        return MessageSpec(
            topic=self.topic,
            value=_either("value", _as_text(self.value), self.value_base64),
            key=_either("key", self.key, self.key_base64),
            headers=headers or None,
            partition=self.partition,
            cluster=self.cluster,
        )


class RedriveRequest(BaseModel):
    """The dead letters to redrive: all conditions hold; `all` selects every dead letter."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"offsets": [3, 4]}, {"topic": "orders"}]}
    )

    offsets: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_OFFSETS, fail_fast=True)]
        | None
    ) = Field(None, description="With these offsets.")
    topic: str | None = Field(None, description="For this destination.")
    reason: str | None = Field(None, description="With this reason.")
    since: str | None = Field(
        None, description="Failed for the last time at this instant or later; with a zone."
    )
    all: bool = Field(default=False, description="Every dead letter, where nothing else is given.")


def _as_text(value: object) -> str | None:
    """Return a string as it is, as in Airtel's envelope, and anything else as the shortest JSON."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidMessage(
            Reason.MALFORMED, "the value has a number that JSON does not: send it as text"
        ) from None


def _either(name: str, text: str | None, base64: str | None) -> Payload:
    if base64 is None:
        return text
    if text is not None:
        raise InvalidMessage(
            Reason.MALFORMED, f"both {name} and {name}_base64 are given: leave one"
        )
    return from_base64(base64, f"{name}_base64")


def portable_pattern(pattern: str) -> str:
    """Return the pattern with an end that every dialect of regular expressions has."""
    return pattern.replace(END, "$")
