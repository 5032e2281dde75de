"""/v1/recurring: messages that come again, listed, paused, resumed and stopped by their names."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path

from duetime.api.document import may_be, plain
from duetime.api.responses import Recurring, RecurringPage
from duetime.api.route import Route
from duetime.api.services import ByCaller, Services, WithServices
from duetime.api.tokens import Caller
from duetime.asking import all_series, ask, find_series, find_series_soon, unknown_series
from duetime.clock import format_instant
from duetime.message import PAUSE, RESUME, SERIES_PATTERN, STOP
from duetime.recurrence import Misfire
from duetime.series import Series

router = APIRouter(
    prefix="/v1/recurring",
    tags=["recurring messages"],
    responses=may_be(401, 422),
    route_class=Route,
)

#: Of what is asked about one.
NAMED = may_be(404)

Name = Annotated[
    str,
    Path(
        description="The `id` that it was sent with.",
        examples=["daily-report"],
        json_schema_extra={"pattern": plain(SERIES_PATTERN)},
    ),
]


@router.get("")
def list_series(services: WithServices, caller: ByCaller) -> RecurringPage:
    """All series, and when each comes next."""
    found = (
        each for each in all_series(services.settings) if caller.allows(each.topic, each.cluster)
    )
    return RecurringPage(series=[_shown(each, services) for each in found])


@router.get("/{name}", responses=NAMED)
def show(name: Name, services: WithServices, caller: ByCaller) -> Recurring:
    """One series."""
    return _shown(_seen(find_series(name, services.settings), caller), services)


@router.post("/{name}/pause", responses=NAMED)
def pause(name: Name, services: WithServices, caller: ByCaller) -> Recurring:
    """Leave runs out until it is resumed; one that is due in less than 10 s comes yet."""
    return _asked(name, PAUSE, services, caller)


@router.post("/{name}/resume", responses=NAMED)
def resume(name: Name, services: WithServices, caller: ByCaller) -> Recurring:
    """Let it go on; a run that is due in less than 10 s was left out already."""
    return _asked(name, RESUME, services, caller)


@router.delete(
    "/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    response_description="It has ended.",
    responses=NAMED,
)
def stop(name: Name, services: WithServices, caller: ByCaller) -> None:
    """End it for good; a run that is due in less than 10 s comes yet."""
    _ask(name, STOP, services, caller)


def _asked(name: str, operation: str, services: Services, caller: Caller) -> Recurring:
    series = _ask(name, operation, services, caller)
    if series is None:
        raise unknown_series(name)
    return _shown(series, services)


def _ask(name: str, operation: str, services: Services, caller: Caller) -> Series | None:
    """What it is then, also where it was sent just now."""
    series = _seen(find_series_soon(name, services.settings), caller)
    return ask(series, operation, services.settings)


def _seen(series: Series, caller: Caller) -> Series:
    """The series, if the caller may know. Raises UnknownMessage."""
    if not caller.allows(series.topic, series.cluster):
        raise unknown_series(series.name)
    return series


def _shown(series: Series, services: Services) -> Recurring:
    next_ms = series.next_ms(services.clock.now_ms())
    return Recurring(
        name=series.name,
        topic=series.topic,
        cron=series.cron,
        zone=series.zone or "UTC",
        until=_text(series.until_ms),
        until_ms=series.until_ms,
        misfire=Misfire(series.misfire or Misfire.ONCE),
        partition=None if series.partition is None else int(series.partition),
        cluster=series.cluster,
        paused=series.is_paused,
        next=_text(next_ms),
        next_ms=next_ms,
    )


def _text(instant_ms: int | None) -> str | None:
    return None if instant_ms is None else format_instant(instant_ms)
