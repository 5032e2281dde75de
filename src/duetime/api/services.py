"""What every request needs, made once: settings, clock, what reads Kafka and what writes to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from duetime.api.cancels import Cancels
from duetime.api.dispatcher import Dispatcher
from duetime.api.keys import Keys
from duetime.api.sharing import SharedWork
from duetime.api.spool.errors import SpoolForeign
from duetime.api.spool.file import Spool
from duetime.api.spool.owner import owner_of
from duetime.api.tokens import CALLER, Caller
from duetime.api.watch import Lookout, Watch
from duetime.clock import Clock, SystemClock
from duetime.config import Settings
from duetime.errors import SetupError
from duetime.local.disk import data_home
from duetime.stores import Reader
from duetime.stores.opening import open_reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What requests are answered with."""

    settings: Settings
    clock: Clock
    reader: Reader
    dispatcher: Dispatcher
    keys: Keys
    cancels: Cancels
    shared: SharedWork
    watch: Watch


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Services]:
    """They last as long as the block. Nothing is asked of Kafka yet. Raises SetupError."""
    reader, clock, keys = open_reader(settings), SystemClock(), Keys()
    async with (
        Dispatcher(settings, open_spool(settings), clock, keys.set_aside) as dispatcher,
        Watch(partial(Lookout, settings, reader, clock), dispatcher) as watch,
    ):
        yield Services(
            settings=settings,
            clock=clock,
            reader=reader,
            dispatcher=dispatcher,
            keys=keys,
            cancels=Cancels(),
            shared=SharedWork(),
            watch=watch,
        )
    reader.close()


def open_spool(settings: Settings, cluster_id: str | None = None) -> Spool:
    """The spool of these settings, and of the cluster that answers. Raises SetupError, SpoolFailed.

    One that may be another's, which only an answer would tell, is opened.
    """
    spool = Spool(settings.api_spool or data_home() / "spool.db", settings.api_spool_bytes)
    try:
        spool.claim(owner_of(settings, cluster_id))
    except SpoolForeign as error:
        if error.is_certain:
            spool.close()
            raise SetupError(error.detail) from error
    return spool


def services_of(request: Request) -> Services:
    """What this request is answered with."""
    return cast("Services", request.app.state.services)


async def _services(request: Request) -> Services:
    return services_of(request)


WithServices = Annotated[Services, Depends(_services)]


class Bearer(SecurityBase):
    """Who asks, as the guard has found out; and how the document tells of tokens."""

    model = HTTPBearer(description="One of `api_tokens`, where there are any.")
    scheme_name = "HTTPBearer"

    async def __call__(self, request: Request) -> Caller:
        """Fails where the guard has not asked for a token."""
        return cast("Caller", request.scope[CALLER])


caller_of = Bearer()

ByCaller = Annotated[Caller, Depends(caller_of)]
