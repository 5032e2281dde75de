"""Errors as RFC 9457 problem details, and their documentation in the OpenAPI document.

The reasons are those that all of duetime uses; docs/api-reference.md has the table.

A problem never repeats a key, a value or the value of a header, because a proxy may log it. It may
repeat names, ids and times. FastAPI documents models under application/json only, so problems are
added to the document by hand.
"""

import json
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

from duetime.api.requests import HEADER_FORMS
from duetime.client.http_models import EXAMPLE_ID
from duetime.core.errors import (
    DuetimeError,
    InvalidMessage,
    KafkaError,
    Reason,
    RecordRefused,
    StoreError,
    TooLate,
    UnknownMessage,
    validation_words,
)

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"

#: The `type` of a problem is this with its reason.
TYPE_PREFIX = "urn:duetime:problem:"

#: The most errors in one problem: one for each message could be larger than the request.
MAX_ERRORS = 100

#: The reason for a request, or a connection, for which there is no room now.
BUSY = "busy"

#: When to try again, in seconds, where nothing better is known.
RETRY_AFTER_S = 5


class ForeignOrigin(DuetimeError):
    """A browser sent the request on behalf of a page that is not the dashboard."""

    reason = "foreign-origin"


class Unauthorised(DuetimeError):
    """The request has no token, or an unknown one."""

    reason = "unauthorised"


class TopicNotAllowed(DuetimeError):
    """The token is not for this topic."""

    reason = "topic-not-allowed"


class IdTaken(DuetimeError):
    """The sender's id belongs to another message."""

    reason = "id-taken"


class RateLimited(DuetimeError):
    """The rate of the token is exceeded."""

    reason = "rate-limited"

    def __init__(self, detail: str, retry_after_s: int) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class RequestTimedOut(DuetimeError):
    """The request took longer than `api_request_timeout_seconds`, and was answered with that."""

    reason = "timeout"


class SpoolFull(DuetimeError):
    """Kafka does not answer, and the spool or its disk has no room."""

    reason = "spool-full"


class SpoolFailed(DuetimeError):
    """The spool's file cannot be read or written, or its records cannot be sent."""

    reason = "spool-failed"


class SpoolForeign(SpoolFailed):
    """The records in the spool are for another Kafka; `is_certain` is False where they may be."""

    def __init__(self, detail: str, *, is_certain: bool = True) -> None:
        super().__init__(detail)
        self.is_certain = is_certain


class InvalidBatch(DuetimeError):
    """Some messages of a batch are invalid, by their index, so none was sent."""

    def __init__(self, errors: Mapping[int, InvalidMessage]) -> None:
        super().__init__(f"{len(errors)} of the messages cannot be taken, so none was sent")
        self.reason = next(iter(errors.values())).reason
        self.errors = errors


class ProblemDetail(BaseModel):
    """One error in a request."""

    where: str
    reason: str
    detail: str


class Problem(BaseModel):
    """Problem details (RFC 9457), with a fixed `reason` for programs."""

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
    errors: list[ProblemDetail] = []


#: The status of each error; the first that fits. Any other error is a fault of the server's setup.
STATUS: Sequence[tuple[type[DuetimeError], HTTPStatus]] = (
    (Unauthorised, HTTPStatus.UNAUTHORIZED),
    (TopicNotAllowed, HTTPStatus.FORBIDDEN),
    (ForeignOrigin, HTTPStatus.FORBIDDEN),
    (UnknownMessage, HTTPStatus.NOT_FOUND),
    (TooLate, HTTPStatus.CONFLICT),
    (IdTaken, HTTPStatus.CONFLICT),
    (RateLimited, HTTPStatus.TOO_MANY_REQUESTS),
    (InvalidMessage, HTTPStatus.UNPROCESSABLE_ENTITY),
    (InvalidBatch, HTTPStatus.UNPROCESSABLE_ENTITY),
    (RecordRefused, HTTPStatus.UNPROCESSABLE_ENTITY),
    (KafkaError, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RequestTimedOut, HTTPStatus.SERVICE_UNAVAILABLE),
    (SpoolFull, HTTPStatus.SERVICE_UNAVAILABLE),
    (SpoolFailed, HTTPStatus.SERVICE_UNAVAILABLE),
)


#: The type of a route's `responses`.
Responses = dict[int | str, dict[str, Any]]

#: The description, and the reason and detail of an example, of each problem by status.
PROBLEMS: dict[int, tuple[str, str, str]] = {
    400: ("The body is not JSON.", Reason.NOT_JSON, "the body is no JSON"),
    401: (
        "No token, or an unknown one.",
        Unauthorised.reason,
        "no such token: send it as `Authorization: Bearer TOKEN`",
    ),
    403: (
        "The token is not for this topic, or the page of another site sent the request.",
        TopicNotAllowed.reason,
        "the token shop is not for topic 'bills'",
    ),
    404: (
        "Not found.",
        UnknownMessage.reason,
        (
            f"unknown: no message {EXAMPLE_ID} waits, to be due 2026-12-24T18:00:00.000Z: "
            "see that the id is complete, and that duetime runs"
        ),
    ),
    409: (
        "Too late, or the id belongs to another message.",
        TooLate.reason,
        f"too late: {EXAMPLE_ID} is due in 2s, and may be on its way already",
    ),
    413: (
        "Too large.",
        Reason.TOO_LARGE,
        "1200 messages are over api_max_batch_size (1000): send less",
    ),
    422: (
        "Invalid; `reason` and `errors` say why.",
        Reason.NO_DUE_TIME,
        "neither at nor in is given: add one",
    ),
    429: (
        "The rate of the token is exceeded.",
        RateLimited.reason,
        "the token may send 100 messages a second",
    ),
    500: (
        "A setting is wrong, which `detail` names; or duetime itself failed.",
        "internal",
        "duetime has failed, and its log says where",
    ),
    503: (
        "Kafka does not answer, or not in time.",
        KafkaError.reason,
        "Kafka gave no record for 15 s: is the broker up?",
    ),
}

AUTHENTICATE = {
    "WWW-Authenticate": {
        "description": "The authentication scheme.",
        "schema": {"type": "string"},
    }
}
RETRY_AFTER = {
    "Retry-After": {
        "description": "When to try again, in seconds.",
        "schema": {"type": "integer", "minimum": 0},
    }
}

#: The headers of some problems.
HEADERS = {401: AUTHENTICATE, 429: RETRY_AFTER, 503: RETRY_AFTER}


class Api(FastAPI):
    """FastAPI with the schemas of problems, to which `problems` refers."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        template = "#/components/schemas/{model}"
        for model in (Problem, ProblemDetail):
            schema = model.model_json_schema(ref_template=template)
            schema.pop("$defs", None)
            document["components"]["schemas"][model.__name__] = schema
        return document


def install(app: FastAPI) -> None:
    """Make the app answer every error with a problem."""
    app.exception_handler(DuetimeError)(_handle_duetime_error)
    app.exception_handler(RequestValidationError)(_handle_validation_error)
    app.exception_handler(HTTPException)(_handle_http_error)


def problem(
    status: HTTPStatus,
    reason: str,
    detail: str,
    *,
    errors: Sequence[ProblemDetail] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Build a response with problem details."""
    content = Problem(
        type=TYPE_PREFIX + reason,
        title=status.phrase,
        status=status,
        detail=detail,
        reason=reason,
        errors=list(errors),
    )
    return JSONResponse(content.model_dump(), status, dict(headers or {}), MEDIA_TYPE)


def of_error(error: DuetimeError) -> JSONResponse:
    """Build the response for an error of duetime."""
    status = next(
        (status for kind, status in STATUS if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    if error.reason == Reason.TOO_LARGE:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    errors = error.errors if isinstance(error, InvalidBatch) else {}
    headers = {}
    if isinstance(error, Unauthorised):
        headers = {"WWW-Authenticate": "Bearer"}
    elif isinstance(error, RateLimited):
        headers = {"Retry-After": str(error.retry_after_s)}
    elif status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    return problem(
        status,
        error.reason,
        error.detail,
        errors=[
            ProblemDetail(where=f"messages[{index}]", reason=each.reason, detail=each.detail)
            for index, each in islice(errors.items(), MAX_ERRORS)
        ],
        headers=headers,
    )


def of_unexpected(error: Exception) -> JSONResponse:
    """Log the type and place of an unexpected error, and build its response.

    Its text is neither sent nor logged, because it may contain a payload.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"
    log.error("request failed error=%s place=%s", type(error).__name__, place)
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return problem(status, "internal", "duetime has failed, and its log says where")


async def _handle_duetime_error(_: Request, error: DuetimeError) -> JSONResponse:
    return of_error(error)


async def _handle_validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return problem(HTTPStatus.BAD_REQUEST, Reason.NOT_JSON, "the body is no JSON")
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    if isinstance(error.body, bytes):
        # The page of another site may send any other type without a preflight. So does curl.
        detail = "the body is not said to be JSON: send the header content-type: application/json"
        return problem(status, Reason.MALFORMED, detail)
    errors = [_problem_detail(each) for each in found[:MAX_ERRORS]]
    first = errors[0]
    return problem(status, first.reason, f"{first.where}: {first.detail}", errors=errors)


def _problem_detail(found: Mapping[str, Any]) -> ProblemDetail:
    missing = found["type"] == "missing" and found["loc"][-1] == "topic"
    reason = Reason.NO_TOPIC if missing else Reason.MALFORMED
    # Pydantic's `input` and `ctx` would repeat what was sent.
    return ProblemDetail(
        where=_location(found["loc"]), reason=reason, detail=validation_words(found)
    )


def _location(parts: Sequence[str | int]) -> str:
    """Return the location in a request: `messages[1].headers.source`, `query.limit`."""
    first, *rest = (each for each in parts if each not in HEADER_FORMS)
    shown = rest if first == "body" and rest else [first, *rest]
    steps = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in shown)
    return "".join(steps).removeprefix(".")


async def _handle_http_error(_: Request, error: HTTPException) -> JSONResponse:
    """Handle Starlette's errors: an unknown path or method, a body that is too large."""
    status = HTTPStatus(error.status_code)
    if status is HTTPStatus.BAD_REQUEST:
        # FastAPI raises it for a body that is not text.
        return problem(status, Reason.NOT_JSON, "the body is no JSON")
    reasons = {
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: str(Reason.TOO_LARGE),
        HTTPStatus.SERVICE_UNAVAILABLE: BUSY,
    }
    reason = reasons.get(status, status.phrase.lower().replace(" ", "-"))
    return problem(status, reason, error.detail, headers=error.headers)


def example_problem(status: int) -> dict[str, Any]:
    """Return the JSON of an example, built as the problem itself is."""
    _, reason, detail = PROBLEMS[status]
    answer: dict[str, Any] = json.loads(bytes(problem(HTTPStatus(status), reason, detail).body))
    return answer


def problems(*statuses: int) -> Responses:
    """Return the `responses` of a route that may answer with these problems."""
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {
        status: {
            "description": PROBLEMS[status][0],
            "content": {MEDIA_TYPE: {"schema": schema, "example": example_problem(status)}},
            "headers": HEADERS.get(status, {}),
        }
        for status in statuses
    }
