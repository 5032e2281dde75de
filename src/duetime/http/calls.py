"""What each call asks for, and what it gives: written once, for the client that blocks and asyncio.

What is scheduled gets an id and an instant before the first try: the API knows it again, so that
trying again is safe.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote

import httpx

from duetime.clock import SystemClock, format_instant, instant_ms
from duetime.errors import InvalidMessage, Reason
from duetime.http.answers import (
    DeadLetter,
    Listed,
    ListedDead,
    ListedRejected,
    Pending,
    RejectedRecord,
    Scheduled,
    Series,
    Waiting,
    read,
)
from duetime.http.steps import Request, Steps, done, read_of, told, tried
from duetime.message import SERIES_PATTERN, MessageId
from duetime.outgoing import Headers, due_time_ms, new_unique
from duetime.standing import Status

_Kind = TypeVar("_Kind")


class Message(TypedDict, total=False):
    """What may be given with a message besides its topic and value."""

    key: str | bytes | None
    #: By name; or as pairs, where one comes twice.
    headers: Headers
    at: datetime
    in_: timedelta
    id: str
    partition: int
    cluster: str
    #: It comes again; `id` is the name of the series, and `at` or `in_` its start, if it has one.
    cron: str
    #: Whose clocks `cron` means.
    zone: str
    #: No run is later.
    until: datetime
    #: What becomes of missed runs: `skip`, `once` or `all`.
    misfire: str


class Selection(TypedDict, total=False):
    """Which messages are listed."""

    topic: str
    key: str
    #: Due then or later.
    from_: datetime
    #: Due before then.
    to: datetime
    #: Those alone that are tried again.
    failed: bool


class DeadSelection(TypedDict, total=False):
    """Which dead letters are listed: of this topic and reason, and dead since then."""

    topic: str
    reason: str
    since: datetime


class Redrive(DeadSelection, total=False):
    """Which dead letters are brought back; `all` is every one."""

    numbers: Sequence[int]
    all: bool


def schedule(messages: Sequence[dict[str, Any]]) -> Steps[list[Scheduled]]:
    """What was taken, in the order in which it was given."""
    response = yield from tried(Request(method="POST", path="/v1/messages", json=messages))
    in_kafka = response.status_code == httpx.codes.CREATED

    def taken(said: dict[str, Any]) -> list[Scheduled]:
        # As many as were given.
        pairs = zip(said["messages"], messages, strict=True)
        return [Scheduled(id=each["id"], in_kafka=in_kafka) for each, _ in pairs]

    return read_of(response, taken)


def find(id: str, retry_ms: int | None) -> Steps[Waiting]:  # noqa: A002 (what all call it)
    """All about a message that waits, or that is tried again then."""
    return _one(Waiting, _message_path(id), as_json({"retry_ms": retry_ms}))


def cancel(id: str) -> Steps[None]:  # noqa: A002 (as above)
    """Safe to repeat."""
    yield from done(Request(method="DELETE", path=_message_path(id)))


def reschedule(id: str, at: datetime | None, in_: timedelta | None) -> Steps[str]:  # noqa: A002 (as above)
    """The new id."""
    due = format_instant(due_time_ms(at, in_, SystemClock().now_ms()))
    return _moved(f"{_message_path(id)}/reschedule", {"at": due})


def deliver_now(id: str) -> Steps[str]:  # noqa: A002 (as above)
    """The new id."""
    return _moved(f"{_message_path(id)}/deliver-now")


def page(query: Mapping[str, Any]) -> Steps[tuple[list[Listed], dict[str, Any] | None]]:
    """Messages that wait, and the query for the next ones; None after the last."""

    def page_of(said: dict[str, Any]) -> tuple[list[Listed], dict[str, Any] | None]:
        more = {**query, "cursor": said["cursor"]} if said["cursor"] else None
        return [read(Listed, each) for each in said["messages"]], more

    return told(Request(method="GET", path="/v1/messages", params=query), page_of)


def pending(from_: datetime | None, to: datetime | None) -> Steps[Pending]:
    """How many wait until when."""
    return _one(Pending, "/v1/pending", as_json({"from": from_, "to": to}))


def status() -> Steps[Status]:
    """Who leads, who stands by, what is late."""
    return _one(Status, "/v1/status")


def all_series() -> Steps[list[Series]]:
    """Those that come again, by name."""
    return _several(Series, "/v1/recurring", "series")


def find_series(name: str) -> Steps[Series]:
    """One of them."""
    return _one(Series, _series_path(name))


def change_series(name: str, operation: str) -> Steps[Series]:
    """The series, once it is paused or resumed. Safe to repeat."""
    request = Request(method="POST", path=f"{_series_path(name)}/{operation}")
    return told(request, partial(read, Series))


def stop_series(name: str) -> Steps[None]:
    """Returns once it has ended."""
    yield from done(Request(method="DELETE", path=_series_path(name)))


def dead_letters(selection: DeadSelection, limit: int) -> Steps[list[ListedDead]]:
    """The latest ones, the oldest of them first."""
    return _several(ListedDead, "/v1/dead", "letters", {**as_json(selection), "limit": limit})


def dead_letter(number: int) -> Steps[DeadLetter]:
    """All about one."""
    return _one(DeadLetter, f"/v1/dead/{number}")


def redrive(wanted: Redrive) -> Steps[int]:
    """How many were brought back, by the last try where several were needed."""
    # Safe to repeat: each letter is brought back once.
    request = Request(method="POST", path="/v1/dead/redrive", json=as_json(wanted))
    return told(request, lambda said: int(said["redriven"]))


def rejected_records(limit: int) -> Steps[list[ListedRejected]]:
    """The latest ones, the oldest of them first."""
    return _several(ListedRejected, "/v1/rejected", "records", {"limit": limit})


def rejected_record(number: int) -> Steps[RejectedRecord]:
    """All about one."""
    return _one(RejectedRecord, f"/v1/rejected/{number}")


def message(topic: str, value: object, parts: Message) -> dict[str, Any]:
    """The JSON of a message, with an instant and an id."""
    names = ("partition", "cluster", "cron", "zone", "until", "misfire")
    others = as_json({name: parts.get(name) for name in names})
    return {
        "topic": topic,
        "id": parts.get("id") or new_unique(),
        **_due(parts),
        **_payload("value", value),
        **_payload("key", parts.get("key")),
        "headers": _headers(parts.get("headers", ())),
        **others,
    }


def as_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values as the API has them: instants as text, and nothing that is None."""
    return {name.rstrip("_"): _as_text(value) for name, value in given.items() if value is not None}


def _message_path(id: str) -> str:  # noqa: A002 (as above)
    """Where the message with this id is. Raises InvalidMessage (bad-id)."""
    return f"/v1/messages/{quote(str(MessageId.parse(id)), safe='')}"


def _series_path(name: str) -> str:
    """Where the series of this name is. Raises InvalidMessage (bad-id)."""
    # A path would lose its last part by a dot or two.
    if not re.match(SERIES_PATTERN, name) or name in {".", ".."}:
        raise InvalidMessage(
            Reason.BAD_ID,
            f"{name!r} is no series' name that HTTP can ask for: it is 1 to 160 letters, digits "
            "and . _ : = ~ + @ -",
        )
    return f"/v1/recurring/{quote(name, safe='')}"


def _one(kind: type[_Kind], path: str, query: Mapping[str, Any] | None = None) -> Steps[_Kind]:
    return told(Request(method="GET", path=path, params=query), partial(read, kind))


def _several(
    kind: type[_Kind], path: str, name: str, query: Mapping[str, Any] | None = None
) -> Steps[list[_Kind]]:
    request = Request(method="GET", path=path, params=query)
    return told(request, lambda said: [read(kind, each) for each in said[name]])


def _moved(path: str, json: Mapping[str, Any] | None = None) -> Steps[str]:
    # The old id is gone once it succeeded: another try would say so.
    request = Request(method="POST", path=path, json=json, repeatable=False)
    return told(request, lambda said: str(said["id"]))


def _due(parts: Message) -> dict[str, str]:
    at, in_ = parts.get("at"), parts.get("in_")
    if "cron" in parts and at is None and in_ is None:
        return {}
    return {"at": format_instant(due_time_ms(at, in_, SystemClock().now_ms()))}


def _payload(name: str, value: object) -> dict[str, object]:
    if isinstance(value, bytes):
        return {f"{name}_base64": base64.b64encode(value).decode()}
    return {name: value}


def _headers(given: Headers) -> list[dict[str, object]]:
    pairs = given.items() if isinstance(given, Mapping) else given
    return [{"name": name, **_payload("value", value)} for name, value in pairs]


def _as_text(value: object) -> object:
    return format_instant(instant_ms(value)) if isinstance(value, datetime) else value
