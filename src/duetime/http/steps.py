"""How calls are made: as generators that yield requests and pauses, and are given answers.

So what a call does is written once (`calls`), and each client only sends and waits.
"""

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from duetime.errors import (
    ConfigError,
    InvalidMessage,
    KafkaError,
    Reason,
    Refused,
    TooLate,
    UnknownMessage,
)

#: How often a request is tried where that is safe.
TRIES = 5

#: How long before the second try, in seconds; doubled for each further one.
PAUSE_S = 0.2

#: The longest that is waited because the API says so, in seconds.
LONGEST_PAUSE_S = 30.0

#: How long an answer is waited for, in seconds: longer than the API's `api_request_seconds`, and
#: than it waits for Kafka and the pipeline. That nobody is there is known sooner.
TIMEOUT = httpx.Timeout(35.0, connect=5.0)

#: Answers after which another try may succeed.
PASSING = (429, 502, 503, 504)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that is to be made."""

    method: str
    path: str
    json: Any = None
    params: Mapping[str, Any] | None = None
    #: Whether it may be made again although nobody knows what became of it.
    repeatable: bool = True


#: It yields a request, or a pause in seconds, and is given what became of the last request.
Steps = Generator[Request | float, httpx.Response | httpx.TransportError | None, _Answer]


def told(request: Request, reading: Callable[[dict[str, Any]], _Answer]) -> Steps[_Answer]:
    """What is read of the answer's JSON."""
    return read_of((yield from tried(request)), reading)


def done(request: Request) -> Steps[None]:
    """Nothing, of a request that is answered with nothing."""
    response = yield from tried(request)
    if response.status_code != httpx.codes.NO_CONTENT:
        raise _stranger(response)


def read_of(response: httpx.Response, reading: Callable[[dict[str, Any]], _Answer]) -> _Answer:
    """What is read of its JSON. Raises Refused where that lacks what duetime answers."""
    try:
        return reading(response.json())
    except (AttributeError, LookupError, TypeError, ValueError):
        raise _stranger(response) from None


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
    unknown = "" if request.method == "GET" else ", and it is not known whether it did"
    raise KafkaError(f"duetime api does not answer ({given}): see that it runs there{unknown}")


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
        raise _stranger(response) from None
    for kind in (UnknownMessage, TooLate, KafkaError):
        if reason == kind.reason:
            raise kind(detail)
    if reason in tuple(Reason):
        raise InvalidMessage(Reason(reason), detail)
    raise Refused(reason, detail)


def _stranger(response: httpx.Response) -> Refused:
    """The error for an answer as duetime gives none: there may be a proxy in front of it."""
    return Refused("error", f"the answer was {response.status_code}: is it duetime?")


def checked(base_url: str) -> str:
    """The address of an API. Raises ConfigError where nobody could be asked there."""
    try:
        url = httpx.URL(base_url)
        is_one = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, TypeError):
        is_one = False
    if not is_one:
        # It may have a password in it.
        raise ConfigError("base_url is no address: write it as http://127.0.0.1:8080")
    return base_url


def body(request: Request) -> dict[str, Any]:
    """What httpx is to send. Raises InvalidMessage where JSON does not have it."""
    if request.json is None:
        return {}
    try:
        text = json.dumps(request.json, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        content = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        # Only of a type its words say nothing else.
        kind = f" ({error})" if type(error) is TypeError else ""
        raise InvalidMessage(
            Reason.UNREADABLE,
            f"JSON does not have all that is in it{kind}: give text or bytes, or what json.dumps "
            "takes, without NaN",
        ) from None
    return {"content": content, "headers": {"Content-Type": "application/json"}}


def authorised(token: str | None) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {token}"} if token else {}
