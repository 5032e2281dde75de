"""The OpenAPI document, as schemathesis tries it."""

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.api import NOWHERE

from duetime.api.server import create_app

#: A 503 is an answer where there is no Kafka.
CONFORM = (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

DOCUMENT = create_app(NOWHERE).openapi()

schema = schemathesis.openapi.from_dict(DOCUMENT)


def tried(count):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
