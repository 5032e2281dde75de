"""What calls do, written once: generators that yield requests and pauses, and are given answers.

What is scheduled gets an id and an instant before the first try: the API knows it again, so that
trying again is safe.
"""

import base64
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar

import httpx

from duetime.clock import SystemClock, format_instant, instant_ms
from duetime.errors import DuetimeError, InvalidMessage, KafkaError, Reason, TooLate, UnknownMessage
from duetime.outgoing import due_time_ms, new_unique

#: How often a request is tried where that is safe.
TRIES = 5

#: How long before the second try, in seconds; doubled for each further one.
PAUSE_S = 0.2

#: The longest that is waited because the API says so, in seconds.
LONGEST_PAUSE_S = 30.0

#: Answers after which another try may succeed.
PASSING = (429, 502, 503, 504)

_Answer = TypeVar("_Answer")


class Refused(DuetimeError):
    """The API refused, for a reason that only HTTP has."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Message(TypedDict, total=False):
    """What may be given with a message besides its topic and value."""

    key: str | bytes | None
    headers: Mapping[str, str | None]
    at: datetime
    in_: timedelta
    id: str
    partition: int
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A message that the API took."""

    #: Its full id, which cancels and reschedules it.
    id: str
    #: Whether Kafka has it; if not, the API's disk has, until Kafka answers.
    in_kafka: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that is to be made."""

    method: str
    path: str
    json: Any = None
    params: Mapping[str, Any] | None = None
    #: Whether it may be made again although nobody knows what became of it.
    repeatable: bool = True


class Selection(TypedDict, total=False):
    """Which messages are listed."""

    topic: str
    key: str
    #: Due then or later.
    from_: datetime
    #: Due before then.
    to: datetime


class DeadSelection(TypedDict, total=False):
    """Which dead letters are listed: of this topic and reason, and dead since then."""

    topic: str
    reason: str
    since: datetime


class Redrive(DeadSelection, total=False):
    """Which dead letters are brought back; `all` is every one."""

    numbers: Sequence[int]
    all: bool


#: It yields a request, or a pause in seconds, and is given what became of the last request.
Steps = Generator[Request | float, httpx.Response | httpx.TransportError | None, _Answer]


def schedule(messages: Sequence[dict[str, Any]]) -> Steps[list[Scheduled]]:
    """What was taken, in the order in which it was given."""
    response = yield from tried(Request(method="POST", path="/v1/messages", json=messages))
    in_kafka = response.status_code == httpx.codes.CREATED
    return [Scheduled(id=each["id"], in_kafka=in_kafka) for each in response.json()["messages"]]


def told(request: Request) -> Steps[dict[str, Any]]:
    """The JSON of the answer."""
    response = yield from tried(request)
    found: dict[str, Any] = response.json()
    return found


def reschedule(id: str, at: datetime | None, in_: timedelta | None) -> Steps[str]:  # noqa: A002 (what all call it)
    """The new id."""
    due = format_instant(due_time_ms(at, in_, SystemClock().now_ms()))
    path = f"/v1/messages/{id}/reschedule"
    # The old id is gone once it succeeded: another try would say so.
    again = Request(method="POST", path=path, json={"at": due}, repeatable=False)
    taken = yield from told(again)
    return str(taken["id"])


def page(query: Mapping[str, Any]) -> Steps[tuple[list[dict[str, Any]], dict[str, Any] | None]]:
    """Messages that wait, and the query for the next ones; None after the last."""
    found = yield from told(Request(method="GET", path="/v1/messages", params=query))
    more = {**query, "cursor": found["cursor"]} if found["cursor"] else None
    return found["messages"], more


def dead_letters(selection: DeadSelection, limit: int) -> Steps[list[dict[str, Any]]]:
    """The latest ones, the oldest of them first."""
    query = {**as_json(selection), "limit": limit}
    found = yield from told(Request(method="GET", path="/v1/dead", params=query))
    letters: list[dict[str, Any]] = found["letters"]
    return letters


def redrive(wanted: Redrive) -> Steps[int]:
    """How many were brought back, by the last try where several were needed."""
    # Safe to repeat: each letter is brought back once.
    request = Request(method="POST", path="/v1/dead/redrive", json=as_json(wanted))
    found = yield from told(request)
    return int(found["redriven"])


def as_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values as the API has them: instants as text, and nothing that is None."""
    return {name.rstrip("_"): _as_text(value) for name, value in given.items() if value is not None}


def tried(request: Request) -> Steps[httpx.Response]:
    """The answer, after as many tries as are safe. Raises what the problem is."""
    pause_s = PAUSE_S
    for left in reversed(range(TRIES if request.repeatable else 1)):
        given = yield request
        if isinstance(given, httpx.Response) and given.status_code not in PASSING:
            break
        if left:
            yield _pause_s(given, pause_s)
            pause_s *= 2
    if isinstance(given, httpx.Response):
        return _welcome(given)
    raise KafkaError(f"duetime api does not answer ({given}): it is not known whether it did")


def _pause_s(given: httpx.Response | httpx.TransportError | None, pause_s: float) -> float:
    if not isinstance(given, httpx.Response):
        return pause_s
    said = given.headers.get("retry-after", "")
    return min(float(said), LONGEST_PAUSE_S) if said.isdecimal() else pause_s


def _welcome(response: httpx.Response) -> httpx.Response:
    """The response, if it is no problem; else the problem as the error that it is."""
    if response.is_success:
        return response
    try:
        said = response.json()
        reason, detail = str(said["reason"]), str(said["detail"])
    except (ValueError, TypeError, KeyError):
        raise Refused("error", f"the answer was {response.status_code}: is it duetime?") from None
    for kind in (UnknownMessage, TooLate, KafkaError):
        if reason == kind.reason:
            raise kind(detail)
    if reason in tuple(Reason):
        raise InvalidMessage(Reason(reason), detail)
    raise Refused(reason, detail)


def message(topic: str, value: object, parts: Message) -> dict[str, Any]:
    """The JSON of a message, with an instant and an id."""
    due_ms = due_time_ms(parts.get("at"), parts.get("in_"), SystemClock().now_ms())
    others = {
        name: parts[name]
        for name in ("headers", "partition", "cluster")
        if parts.get(name) is not None
    }
    return {
        "topic": topic,
        "at": format_instant(due_ms),
        "id": parts.get("id") or new_unique(),
        **_payload("value", value),
        **_payload("key", parts.get("key")),
        **others,
    }


def _payload(name: str, value: object) -> dict[str, object]:
    if isinstance(value, bytes):
        return {f"{name}_base64": base64.b64encode(value).decode()}
    return {name: value}


def authorised(token: str | None) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _as_text(value: object) -> object:
    return format_instant(instant_ms(value)) if isinstance(value, datetime) else value
