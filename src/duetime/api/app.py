"""The app, put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from duetime import __version__
from duetime.api import dashboard, dead, messages, problems, recurring, rejected, state
from duetime.api.desk import open_desk
from duetime.api.guard import Guard
from duetime.config import Settings

DESCRIPTION = """Kafka messages delivered when they are due.

Errors are problem details (RFC 9457); their `reason` is a fixed word. An `id` of your own makes
scheduling safe to repeat."""

#: What may be answered instead of what was asked for.
PROBLEM: dict[str, Any] = {
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
}
WRONG: dict[int | str, dict[str, Any]] = {
    400: PROBLEM | {"description": "The body is no JSON."},
    401: PROBLEM | {"description": "No token, or an unknown one."},
    403: PROBLEM | {"description": "The token is not for this topic."},
    404: PROBLEM | {"description": "Nothing is called so."},
    409: PROBLEM | {"description": "Too late, or the id is another message's."},
    413: PROBLEM | {"description": "Too large."},
    422: PROBLEM | {"description": "It cannot be taken; `reason` and `errors` say why."},
    429: PROBLEM | {"description": "The token's rate is used up; see Retry-After."},
    500: PROBLEM | {"description": "A setting is wrong, and `detail` says which; or duetime is."},
    503: PROBLEM | {"description": "Kafka does not answer, or not in time; see Retry-After."},
}


class Api(FastAPI):
    """FastAPI that documents problems under their own media type, and not as plain JSON too."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        document["components"]["schemas"] |= problems.schemas()
        return document


def create_app(settings: Settings) -> FastAPI:
    """The HTTP API over this configuration's Kafka, for any ASGI server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_desk(settings) as desk:
            app.state.desk = desk
            yield

    app = Api(
        title="duetime",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        responses=WRONG,
        # Nothing is loaded from elsewhere: the pages of Swagger and ReDoc would be.
        docs_url=None,
        redoc_url=None,
    )
    for router in (messages.router, recurring.router, dead.router, rejected.router, state.router):
        app.include_router(router)
    dashboard.install(app)
    problems.install(app)
    app.add_middleware(Guard, settings=settings)
    return app
