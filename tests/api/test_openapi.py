"""The OpenAPI document says what the server does: schemathesis tries what it allows, and more."""

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.api.conftest import NOWHERE

from duetime.api.app import create_app

#: A 503 is an answer: there is no Kafka here.
CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)

schema = schemathesis.openapi.from_dict(create_app(NOWHERE).openapi())
posted = schema.include(path="/v1/messages", method="POST")
looked = schema.include(path_regex=r"^/(healthz|readyz|metrics)$")


def test_the_document_has_an_example_of_a_message():
    examples = schema.raw_schema["components"]["schemas"]["NewMessage"]["examples"]
    assert {"topic", "in"} <= set(examples[0])


@looked.parametrize()
@settings(max_examples=3, deadline=None)
def test_health_is_as_documented(case, alone):
    case.call_and_validate(base_url=str(alone.base_url), checks=CHECKS)


@posted.parametrize()
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_whatever_is_sent_is_answered_as_documented(case, alone):
    response = case.call(base_url=str(alone.base_url))
    assert response.status_code != 500
    case.validate_response(response, checks=CHECKS)


def test_the_document_is_served(alone):
    assert alone.get("/openapi.json").json()["openapi"].startswith("3.")
