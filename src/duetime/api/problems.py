"""Errors as RFC 9457 problem details, with the reasons that all of duetime uses.

```
400  not-json                what was sent is no JSON
401  unauthorised            no token, or an unknown one
403  topic-not-allowed       the token is not for this topic
     foreign-origin          a browser has sent it for another site's page
404  unknown-message         nothing that waits, and no dead letter, is called so
     not-found               there is no such path
405  method-not-allowed      nor this method, on a path that there is
409  too-late, id-taken      it is delivered or about to be; the id is another message's
413  too-large               a message, a batch or a body
422  (any other reason)      the message cannot be taken; refused: by Kafka itself
429  too-many                the token's rate is used up
500  internal                an error of duetime's own; else its setup is wrong
431  too-large               the headers of the request
503  kafka, store, timeout   try again, after Retry-After
     busy                    so many bodies are held, or connections are open, already
     spool-full              so does this
     spool-failed            and this: the spool's file cannot be used
```

No key, no value and no header's value is repeated in a problem: it may be logged on its way. Names,
ids and times that cannot be taken are.
"""

import logging
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from duetime.api.requests import UNSHOWN
from duetime.api.spool.errors import SpoolFailed, SpoolFull
from duetime.errors import (
    DuetimeError,
    InvalidMessage,
    KafkaError,
    Reason,
    RecordRefused,
    StoreError,
    TooLate,
    UnknownMessage,
)
from duetime.wording import words

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

#: What a problem's `type` begins with; the reason follows.
TYPE = "urn:duetime:problem:"

#: How many things that are wrong in one request are told: of each would be more than was sent.
MOST_FAULTS = 100

#: What is told of a body that is not said to be JSON, as curl does by default.
UNTYPED = "the body is not said to be JSON: send the header content-type: application/json"

#: That there is no room for a request, or a connection, now.
BUSY = "busy"

#: When to try again, in seconds, where nothing better is known.
RETRY_AFTER_S = 5


class ForeignOrigin(DuetimeError):
    """A browser has sent this on behalf of a page that is not the dashboard."""

    reason = "foreign-origin"


class Unauthorised(DuetimeError):
    """Who asks has no token, or one that nobody has."""

    reason = "unauthorised"


class TopicNotAllowed(DuetimeError):
    """The token is not for this topic."""

    reason = "topic-not-allowed"


class IdTaken(DuetimeError):
    """The sender's id is that of another message."""

    reason = "id-taken"


class TooMany(DuetimeError):
    """The token's rate is used up."""

    reason = "too-many"

    def __init__(self, detail: str, retry_after_s: int) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class OutOfTime(DuetimeError):
    """The request takes longer than one may, and has its answer already."""

    reason = "timeout"


class Invalid(DuetimeError):
    """Of several messages some cannot be taken, so none was."""

    def __init__(self, errors: Mapping[int, InvalidMessage]) -> None:
        first = next(iter(errors.values()))
        super().__init__(f"{len(errors)} of the messages cannot be taken, so none was sent")
        self.reason = first.reason
        self.errors = errors


class Fault(BaseModel):
    """One thing that is wrong in a request."""

    where: str
    reason: str
    detail: str


class Problem(BaseModel):
    """Problem details (RFC 9457), and the fixed `reason` for programs."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:duetime:problem:too-late",
                    "title": "Conflict",
                    "status": 409,
                    "detail": "message 019ac9b6e2d4-order-17 is delivered or about to be",
                    "reason": "too-late",
                    "errors": [],
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    reason: str
    errors: list[Fault] = []


#: What each error is in HTTP; the first that fits. Any other is a fault of the server's setup.
STATUS: Sequence[tuple[type[DuetimeError], HTTPStatus]] = (
    (Unauthorised, HTTPStatus.UNAUTHORIZED),
    (TopicNotAllowed, HTTPStatus.FORBIDDEN),
    (ForeignOrigin, HTTPStatus.FORBIDDEN),
    (UnknownMessage, HTTPStatus.NOT_FOUND),
    (TooLate, HTTPStatus.CONFLICT),
    (IdTaken, HTTPStatus.CONFLICT),
    (TooMany, HTTPStatus.TOO_MANY_REQUESTS),
    (InvalidMessage, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Invalid, HTTPStatus.UNPROCESSABLE_ENTITY),
    (RecordRefused, HTTPStatus.UNPROCESSABLE_ENTITY),
    (KafkaError, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreError, HTTPStatus.SERVICE_UNAVAILABLE),
    (OutOfTime, HTTPStatus.SERVICE_UNAVAILABLE),
    (SpoolFull, HTTPStatus.SERVICE_UNAVAILABLE),
    (SpoolFailed, HTTPStatus.SERVICE_UNAVAILABLE),
)


def problem(
    status: HTTPStatus,
    reason: str,
    detail: str,
    *,
    errors: Sequence[Fault] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The answer that says what is wrong."""
    told = Problem(
        type=TYPE + reason,
        title=status.phrase,
        status=status,
        detail=detail,
        reason=reason,
        errors=list(errors),
    )
    return JSONResponse(told.model_dump(), status, dict(headers or {}), MEDIA_TYPE)


def of_error(error: DuetimeError) -> JSONResponse:
    """The answer for one of our errors."""
    status = next(
        (status for kind, status in STATUS if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    if error.reason == Reason.TOO_LARGE:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    faults = error.errors if isinstance(error, Invalid) else {}
    return problem(
        status,
        error.reason,
        error.detail,
        errors=[
            Fault(where=f"messages[{index}]", reason=each.reason, detail=each.detail)
            for index, each in islice(faults.items(), MOST_FAULTS)
        ],
        headers=_headers(error, status),
    )


def fault(error: Exception) -> JSONResponse:
    """The answer for an error that nobody expected, which is logged: what it is, and where.

    Its text is neither told nor logged: nobody knows what is in it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nowhere"
    log.error("request failed error=%s place=%s", type(error).__name__, place)
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return problem(status, "internal", "duetime has failed, and its log says where")


def schemas() -> dict[str, Any]:
    """The JSON schemas of a problem, by name, as OpenAPI refers to them."""
    template = "#/components/schemas/{model}"
    each = {model: model.model_json_schema(ref_template=template) for model in (Problem, Fault)}
    for schema in each.values():
        schema.pop("$defs", None)
    return {model.__name__: schema for model, schema in each.items()}


def install(app: FastAPI) -> None:
    """Make the app answer every error in this way."""
    app.add_exception_handler(DuetimeError, _duetime_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


def _headers(error: DuetimeError, status: HTTPStatus) -> dict[str, str]:
    if isinstance(error, Unauthorised):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, TooMany):
        return {"Retry-After": str(error.retry_after_s)}
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": str(RETRY_AFTER_S)}
    return {}


async def _duetime_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DuetimeError)  # noqa: S101 (registered for it)
    return of_error(error)


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 (registered for it)
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return problem(HTTPStatus.BAD_REQUEST, Reason.NOT_JSON, "the body is no JSON")
    if isinstance(error.body, bytes):
        # A page of somebody else's may send any other type without asking first.
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, Reason.UNREADABLE, UNTYPED)
    faults = [_fault(each) for each in found[:MOST_FAULTS]]
    detail = f"{faults[0].where}: {faults[0].detail}"
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, faults[0].reason, detail, errors=faults)


def _fault(found: Mapping[str, Any]) -> Fault:
    missing = found["type"] == "missing" and found["loc"][-1] == "topic"
    reason = Reason.NO_TOPIC if missing else Reason.UNREADABLE
    # Pydantic's own `input` and `ctx` would repeat what was sent.
    return Fault(where=_where(found["loc"]), reason=reason, detail=words(found))


def _where(parts: Sequence[str | int]) -> str:
    """The place as its sender knows it: `messages[1].headers.source`, `query.limit`."""
    first, *rest = (each for each in parts if each not in UNSHOWN)
    shown = rest if first == "body" and rest else [first, *rest]
    steps = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in shown)
    return "".join(steps).removeprefix(".")


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    """Starlette's own: no such path, no such method, a body that is too large."""
    assert isinstance(error, HTTPException)  # noqa: S101 (registered for it)
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.BAD_REQUEST:
        # FastAPI's own, of a body that is no text.
        return problem(status, Reason.NOT_JSON, "the body is no JSON")
    words = {
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: str(Reason.TOO_LARGE),
        HTTPStatus.SERVICE_UNAVAILABLE: BUSY,
    }
    reason = words.get(status, status.phrase.lower().replace(" ", "-"))
    return problem(status, reason, error.detail, headers=error.headers)
