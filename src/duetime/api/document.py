"""The OpenAPI document: what FastAPI does not say by itself, and the problems that may be answered.

Examples of problems are made as problems are, so that they are what is answered.
"""

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from duetime.api import responses
from duetime.api.examples import ID
from duetime.api.problems import (
    MEDIA_TYPE,
    Invalid,
    TooMany,
    TopicNotAllowed,
    Unauthorised,
    of_error,
    problem,
    schemas,
)
from duetime.api.responses import Answer
from duetime.errors import InvalidMessage, KafkaError, Reason, TooLate, UnknownMessage
from duetime.message import END

#: What is answered where all is well.
ANSWERS = [
    each for each in vars(responses).values() if isinstance(each, type) and issubclass(each, Answer)
]

#: What is documented of each status besides its example.
MEANS = {
    400: "The body is no JSON.",
    401: "No token, or an unknown one.",
    403: "The token is not for this topic; or another site's page has sent it.",
    404: "Nothing is called so.",
    409: "Too late, or the id is another message's.",
    413: "Too large.",
    422: "It cannot be taken; `reason` and `errors` say why.",
    429: "The token's rate is used up.",
    500: "A setting is wrong, and `detail` says which; or duetime is.",
    503: "Kafka does not answer, or not in time.",
}

#: What is answered with each of them, for example.
EXAMPLES = {
    400: problem(HTTPStatus.BAD_REQUEST, Reason.NOT_JSON, "the body is no JSON"),
    401: of_error(Unauthorised("no such token: send it as `Authorization: Bearer TOKEN`")),
    403: of_error(TopicNotAllowed("the token shop is not for topic 'bills'")),
    404: of_error(
        UnknownMessage(
            f"unknown: no message {ID} waits, to be due 2026-12-24T18:00:00.000Z: "
            "see that the id is complete, and that duetime runs"
        )
    ),
    409: of_error(TooLate(f"too late: {ID} is due in 2s, and may be on its way already")),
    413: of_error(
        InvalidMessage(
            Reason.TOO_LARGE, "1200 messages are over api_batch_messages (1000): send less"
        )
    ),
    422: of_error(
        Invalid({1: InvalidMessage(Reason.NO_DUE_TIME, "neither at nor in is given: add one")})
    ),
    429: of_error(TooMany("the token may send 100 messages a second", 1)),
    500: problem(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "duetime has failed, and its log says where"
    ),
    503: of_error(KafkaError("Kafka gave no record for 10 s: is the broker up?")),
}

#: Headers that some of them have.
HEADERS = {
    "Retry-After": {
        "description": "When to try again, in seconds.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "WWW-Authenticate": {"description": "How to.", "schema": {"type": "string"}},
}


#: What FastAPI takes as a route's `responses`.
Responses = dict[int | str, dict[str, Any]]


def may_be(*statuses: int) -> Responses:
    """What may be answered instead of what was asked for."""
    return {status: _documented(status, EXAMPLES[status]) for status in statuses}


def text(media_type: str, example: str) -> Responses:
    """An answer that is no JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}, "example": example}}}}


def plain(pattern: str) -> str:
    """The pattern with an end that every dialect of regular expressions has."""
    return pattern.replace(END, "$")


class Api(FastAPI):
    """FastAPI whose document has problems under their own media type, and says more."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        known = document["components"]["schemas"]
        known |= schemas()
        for model in ANSWERS:
            if model.__name__ in known:
                # FastAPI has left out what is null in them, and so required fields.
                known[model.__name__] |= model.model_config.get("json_schema_extra") or {}
        for operation in _operations(document):
            operation["summary"] = _first_sentence(operation["description"])
            for response in operation["responses"].values():
                _describe(response, known)
        return document


def _documented(status: int, example: JSONResponse) -> dict[str, Any]:
    shown = {"example": json.loads(bytes(example.body))}
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    headers = {name: each for name, each in HEADERS.items() if name in example.headers}
    said = {"description": MEANS[status], "content": {MEDIA_TYPE: schema | shown}}
    return said | ({"headers": headers} if headers else {})


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        yield from methods.values()


def _first_sentence(text: str) -> str:
    return re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]


def _describe(response: dict[str, Any], known: dict[str, Any]) -> None:
    """Say what the model of the answer says of itself, where nothing else is said."""
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    if response["description"] == "Successful Response" and "$ref" in schema:
        model = known[schema["$ref"].rpartition("/")[2]]
        response["description"] = model["description"]
