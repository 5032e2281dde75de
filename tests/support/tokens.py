"""Tokens of one who may do all, and of one who may use some topics alone."""

from tests.support.api import NOWHERE

from duetime.api.server import create_app
from duetime.core.settings import Settings

SHOP, ALL = "0123456789abcdef-secret", "fedcba9876543210-secret"

TOKENS = {"shop": {"token": SHOP, "topics": ["orders-*"]}, "all": {"token": ALL}}

#: Every operation, and whether it is for tokens, as the OpenAPI document has it.
OPERATIONS = [
    (method.upper(), path, "security" in operation)
    for path, methods in create_app(NOWHERE).openapi()["paths"].items()
    for method, operation in methods.items()
]


def limited(settings):
    return Settings(**settings.model_dump() | {"api_tokens": TOKENS})


def bearer(token):
    return {"Authorization": f"Bearer {token}"}
