"""The OpenAPI document says what the server does: schemathesis tries what it allows, and more."""

import httpx
import jsonschema_rs
import pytest
from tests.support.openapi import CONFORM, DOCUMENT, schema, tried

from duetime.api.requests import NewMessage
from duetime.client import http_models
from duetime.core.clock import SystemClock
from duetime.core.settings import Settings

OPERATIONS = [
    pytest.param(operation, id=f"{method.upper()} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]

posted = schema.include(path="/v1/messages", method="POST")


def nodes(part):
    """All objects of the document."""
    if isinstance(part, dict):
        yield part
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from nodes(each)


def schemas_with_examples(part=DOCUMENT):
    """Each example with the schema that it is of."""
    for node in nodes(part):
        if isinstance(node.get("examples"), list):
            yield from ((node, each) for each in node["examples"])
        if "schema" in node and "example" in node:
            yield node["schema"], node["example"]


def resolved(part):
    """The part with what it refers to in place, as far as examples are."""
    if isinstance(part, list):
        return [resolved(each) for each in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return resolved(DOCUMENT["components"]["schemas"][part["$ref"].rpartition("/")[2]])
    return {name: resolved(each) for name, each in part.items()}


def is_shown(part):
    """Whether this has an example, of its own or of its model."""
    return any(schemas_with_examples(resolved(part)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_that_is_asked_and_answered_is_described_and_shown(operation):
    assert operation["summary"]
    assert operation["description"]
    for parameter in operation.get("parameters", ()):
        assert parameter["description"], parameter
        assert is_shown(parameter), parameter
    if "requestBody" in operation:
        assert is_shown(operation["requestBody"]["content"]["application/json"])
    for status, response in operation["responses"].items():
        assert response["description"] not in ("", "Successful Response")
        assert status == "204" or all(is_shown(each) for each in response["content"].values())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_error_is_a_problem_of_its_own_status(operation):
    wrong = {status: each for status, each in operation["responses"].items() if status >= "4"}
    assert {"500", "503"} <= set(wrong)
    assert ("401" in wrong) == ("security" in operation)
    assert ({"400", "413"} <= set(wrong)) or "requestBody" not in operation
    for status, response in wrong.items():
        ((media_type, content),) = response["content"].items()
        assert media_type == "application/problem+json"
        assert content["example"]["status"] == int(status)


def test_every_example_is_what_its_schema_says():
    for described, example in schemas_with_examples():
        whole = {**described, "components": DOCUMENT["components"]}
        jsonschema_rs.validator_for(whole).validate(example)


def test_an_example_of_an_answer_has_all_its_fields():
    answers = [
        each
        for each in vars(http_models).values()
        if isinstance(each, type) and issubclass(each, http_models.Answer)
    ]
    shown = [each for each in answers if "json_schema_extra" in each.model_config]
    assert len(shown) > 15
    for model in shown:
        example = http_models.example_of(model)
        assert model.model_validate(example).model_dump(mode="json") == example


def test_an_example_of_a_message_is_one_that_is_taken():
    examples = DOCUMENT["components"]["schemas"]["NewMessage"]["examples"]
    for each in examples:
        NewMessage.model_validate(each).record(Settings(), SystemClock().now_ms())
    assert {"topic", "in"} <= set(examples[0])


@posted.parametrize()
@tried(150)
def test_whatever_is_sent_is_answered_as_documented(case, alone):
    response = case.call(base_url=str(alone.base_url))
    assert response.status_code != httpx.codes.INTERNAL_SERVER_ERROR
    case.validate_response(response, checks=CONFORM)


def test_the_document_is_served(alone):
    assert alone.get("/openapi.json").json()["openapi"].startswith("3.")
