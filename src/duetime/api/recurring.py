"""/v1/recurring: messages that come again, listed, paused, resumed and stopped by their names."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel

from duetime.api.desk import AtDesk, ByCaller, Desk
from duetime.api.tokens import Caller
from duetime.asking import all_series, ask, find_series, unknown_series
from duetime.clock import format_instant
from duetime.message import PAUSE, RESUME, STOP
from duetime.recurrence import Misfire
from duetime.series import Series

router = APIRouter(prefix="/v1/recurring", tags=["recurring messages"])

Name = Annotated[str, Path(description="The `id` that it was sent with.")]


class Recurring(BaseModel):
    """A message that comes again, without what is in it."""

    name: str
    topic: str
    cron: str
    zone: str
    #: What becomes of runs that were missed.
    misfire: Misfire
    partition: int | None
    cluster: str | None
    paused: bool
    #: Null where it is paused, or over.
    next: str | None
    next_ms: int | None


class RecurringPage(BaseModel):
    """All of them, by name."""

    series: list[Recurring]


@router.get("")
def list_series(desk: AtDesk, caller: ByCaller) -> RecurringPage:
    """All series, and when each comes next."""
    found = (each for each in all_series(desk.settings) if caller.allows(each.topic))
    return RecurringPage(series=[_shown(each, desk) for each in found])


@router.get("/{name}")
def show(name: Name, desk: AtDesk, caller: ByCaller) -> Recurring:
    """One series."""
    return _shown(_found(name, desk, caller), desk)


@router.post("/{name}/pause")
def pause(name: Name, desk: AtDesk, caller: ByCaller) -> Recurring:
    """Leave runs out until it is resumed; one that is due in less than 10 s comes yet."""
    return _asked(name, PAUSE, desk, caller)


@router.post("/{name}/resume")
def resume(name: Name, desk: AtDesk, caller: ByCaller) -> Recurring:
    """Let it go on, with its next run."""
    return _asked(name, RESUME, desk, caller)


@router.delete("/{name}", status_code=HTTPStatus.NO_CONTENT)
def stop(name: Name, desk: AtDesk, caller: ByCaller) -> None:
    """End it for good; a run that is due in less than 10 s comes yet."""
    _found(name, desk, caller)
    ask(name, STOP, desk.settings)


def _asked(name: str, operation: str, desk: Desk, caller: Caller) -> Recurring:
    _found(name, desk, caller)
    series = ask(name, operation, desk.settings)
    if series is None:
        raise unknown_series(name)
    return _shown(series, desk)


def _found(name: str, desk: Desk, caller: Caller) -> Series:
    """The series, if the caller may know."""
    series = find_series(name, desk.settings)
    if not caller.allows(series.topic):
        raise unknown_series(name)
    return series


def _shown(series: Series, desk: Desk) -> Recurring:
    recurrence = series.recurrence
    next_ms = None if series.is_paused else recurrence.first(desk.clock.now_ms())
    return Recurring(
        name=series.name,
        topic=series.topic,
        cron=series.cron,
        zone=recurrence.cron.zone,
        misfire=recurrence.misfire,
        partition=None if series.partition is None else int(series.partition),
        cluster=series.cluster,
        paused=series.is_paused,
        next=None if next_ms is None else format_instant(next_ms),
        next_ms=next_ms,
    )
