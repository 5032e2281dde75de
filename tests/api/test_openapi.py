"""The OpenAPI document says what the server does: schemathesis tries what it allows, and more."""

from types import SimpleNamespace

import httpx
import jsonschema_rs
import pytest
import schemathesis
from confluent_kafka import Producer
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.api.conftest import NOWHERE, Running, alike
from tests.api.test_events import reject
from tests.conftest import WheelWriter, created_topics, dead_letters_of, small_settings

from duetime.api.address import url
from duetime.api.app import create_app
from duetime.api.document import ANSWERS
from duetime.api.requests import NewMessage
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.series import Page, Series
from duetime.topics import TopicNames

MINUTE_MS = 60_000

#: A 503 is an answer where there is no Kafka.
CONFORM = (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

DOCUMENT = create_app(NOWHERE).openapi()
OPERATIONS = [
    pytest.param(operation, id=f"{method.upper()} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]

schema = schemathesis.openapi.from_dict(DOCUMENT)
posted = schema.include(path="/v1/messages", method="POST")
#: Events have no end, which schemathesis would wait for: test_events.py reads them.
ending = schema.exclude(path="/v1/events")


def tried(count):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )


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
    for model in ANSWERS:
        for example in (model.model_config.get("json_schema_extra") or {}).get("examples", ()):
            assert model.model_validate(example).model_dump(mode="json") == example


def test_an_example_of_a_message_is_one_that_is_taken():
    examples = DOCUMENT["components"]["schemas"]["NewMessage"]["examples"]
    for each in examples:
        NewMessage.model_validate(each).record(Settings(), SystemClock().now_ms())
    assert {"topic", "in"} <= set(examples[0])


def define(of, name):
    """Write a series as the pipeline does."""
    series = Series(name=name, since="1-first", topic="orders", cron="@weekly")
    producer = Producer(librdkafka_properties(of))
    producer.produce(TopicNames(of).series, Page(series).encoded(), name)
    assert producer.flush(30) == 0


@pytest.fixture(scope="module")
def full(broker, tmp_path_factory):
    """An API on a real broker where there is one of everything."""
    own = small_settings(broker.bootstrap)
    with created_topics(own), pytest.MonkeyPatch.context() as patched:
        # What is unknown is not waited for.
        patched.setattr("duetime.cancelling.ARRIVAL_MS", 100)
        now_ms = SystemClock().now_ms()
        WheelWriter(own, now_ms).message("orders", now_ms + 30 * MINUTE_MS, key=b"\xff", value="v")
        dead_letters_of(own)()
        reject(own)
        define(own, "weekly")
        running = Running(alike(own, tmp_path_factory.mktemp("api")))
        yield SimpleNamespace(url=url(running.settings))
        running.stop()


@pytest.mark.system
@ending.parametrize()
@tried(5)
def test_whatever_is_asked_is_answered_as_documented(case, full):
    case.call_and_validate(base_url=full.url, checks=(not_a_server_error, *CONFORM))


@posted.parametrize()
@tried(150)
def test_whatever_is_sent_is_answered_as_documented(case, alone):
    response = case.call(base_url=str(alone.base_url))
    assert response.status_code != httpx.codes.INTERNAL_SERVER_ERROR
    case.validate_response(response, checks=CONFORM)


def test_the_document_is_served(alone):
    assert alone.get("/openapi.json").json()["openapi"].startswith("3.")
