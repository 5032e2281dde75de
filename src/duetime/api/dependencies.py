"""Dependencies of the routes: the services, the caller, and the check of query parameters."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from duetime.api.dispatcher import Dispatcher
from duetime.api.errors import SpoolForeign
from duetime.api.events import StatusBroadcaster, StatusPoller
from duetime.api.idempotency import IdempotencyKeys, RescheduledIds, SharedWork
from duetime.api.security import CALLER, Caller
from duetime.api.spool import Owner, Spool
from duetime.core.clock import Clock, SystemClock
from duetime.core.errors import InvalidMessage, Reason, SetupError
from duetime.core.settings import Settings
from duetime.local.process import data_home
from duetime.stores import Reader
from duetime.stores.factory import open_reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of requests, for as long as the app runs."""

    settings: Settings
    clock: Clock
    reader: Reader
    dispatcher: Dispatcher
    watch: StatusBroadcaster
    keys: IdempotencyKeys = field(default_factory=IdempotencyKeys)
    rescheduled: RescheduledIds = field(default_factory=RescheduledIds)
    shared: SharedWork = field(default_factory=SharedWork)


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """Open the services for the block, without asking Kafka. Raises SetupError."""
    clock = SystemClock()
    with closing(open_reader(settings)) as reader:
        async with (
            Dispatcher(settings, open_spool(settings), clock) as dispatcher,
            StatusBroadcaster(partial(StatusPoller, settings, reader, clock), dispatcher) as watch,
        ):
            yield Services(
                settings=settings,
                clock=clock,
                reader=reader,
                dispatcher=dispatcher,
                watch=watch,
            )


def open_spool(settings: Settings, cluster_id: str | None = None) -> Spool:
    """Open the spool for the Kafka of these settings. Raises SetupError, SpoolFailed.

    A spool that may belong to another Kafka, which only an answer of the cluster tells, is opened.
    """
    spool = Spool(settings.api_spool or data_home() / "spool.db", settings.api_max_spool_bytes)
    try:
        spool.claim(Owner(settings.bootstrap, settings.namespace, cluster_id))
    except SpoolForeign as error:
        if error.is_certain:
            spool.close()
            raise SetupError(error.detail) from error
    return spool


async def services_of(request: Request) -> Services:
    """Return the services of the app."""
    return cast("Services", request.app.state.services)


async def check_query(request: Request) -> None:
    """Refuse unknown query parameters: a misspelt filter would select everything."""
    for name in request.query_params:
        known = [each.alias for each in request.scope["route"].dependant.query_params]
        if name not in known:
            hint = f"use {', '.join(known)}" if known else "leave it out"
            raise InvalidMessage(Reason.MALFORMED, f"no parameter is called {name!r}: {hint}")


class BearerToken(SecurityBase):
    """Returns the caller that the middleware has found, and documents the tokens."""

    model = HTTPBearer(description="One of `api_tokens`, where there are any.")
    scheme_name = "HTTPBearer"

    async def __call__(self, request: Request) -> Caller:
        """Fail where the middleware has not asked for a token."""
        return cast("Caller", request.scope[CALLER])


caller_of = BearerToken()

WithServices = Annotated[Services, Depends(services_of)]
ByCaller = Annotated[Caller, Depends(caller_of)]

#: The dependencies of every route below /v1. Elsewhere tools add parameters of their own.
CHECKED = [Depends(check_query)]
