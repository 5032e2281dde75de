"""The app, put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from duetime import __version__
from duetime.api import (
    dashboard,
    dead,
    listed,
    messages,
    problems,
    recurring,
    rejected,
    state,
)
from duetime.api.document import Api, may_be
from duetime.api.guard import Guard
from duetime.api.services import open_services
from duetime.config import Settings

DESCRIPTION = """Kafka messages delivered when they are due.

Errors are problem details (RFC 9457); their `reason` is a fixed word. An `id` of your own makes
scheduling safe to repeat."""


def create_app(settings: Settings) -> FastAPI:
    """The HTTP API over this configuration's Kafka, for any ASGI server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services(settings) as services:
            app.state.services = services
            yield

    app = Api(
        title="duetime",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        responses=may_be(403, 500, 503),
        # Nothing is loaded from elsewhere: the pages of Swagger and ReDoc would be.
        docs_url=None,
        redoc_url=None,
    )
    parts = (messages, listed, recurring, dead, rejected, state)
    for part in parts:
        app.include_router(part.router)
    dashboard.install(app)
    problems.install(app)
    app.add_middleware(Guard, settings=settings)
    return app
