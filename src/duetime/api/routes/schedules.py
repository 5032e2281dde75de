"""/v1/schedules: list, show, pause, resume and stop schedules."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path

from duetime.api.dependencies import CHECKED, ByCaller, Services, WithServices
from duetime.api.errors import problems
from duetime.api.requests import portable_pattern
from duetime.api.security import Caller
from duetime.client import schedules
from duetime.client.http_models import ScheduleList, ScheduleSummary
from duetime.client.schedules import ARRIVAL_TIMEOUT_S, find_schedule, unknown_schedule
from duetime.core.clock import format_instant
from duetime.core.cron import Misfire
from duetime.core.messages import SCHEDULE_PATTERN
from duetime.core.schedules import Schedule

router = APIRouter(
    prefix="/v1/schedules", tags=["schedules"], responses=problems(401, 422), dependencies=CHECKED
)

#: The problems of a request about one schedule.
ABOUT_ONE = problems(404)

Name = Annotated[
    str,
    Path(
        description="The `id` of the message that defined it.",
        examples=["daily-report"],
        json_schema_extra={"pattern": portable_pattern(SCHEDULE_PATTERN)},
    ),
]


@router.get("", response_description="The schedules.")
def list_schedules(services: WithServices, caller: ByCaller) -> ScheduleList:
    """List all schedules with their next runs."""
    found = schedules.list_schedules(services.settings)
    allowed = [each for each in found if caller.allows(each.topic, each.cluster)]
    return ScheduleList(schedules=[_summary(each, services) for each in allowed])


@router.get("/{name}", response_description="The schedule.", responses=ABOUT_ONE)
def show_schedule(name: Name, services: WithServices, caller: ByCaller) -> ScheduleSummary:
    """Show a schedule."""
    return _summary(_allowed(find_schedule(name, services.settings), caller), services)


@router.post("/{name}/pause", response_description="It is paused.", responses=ABOUT_ONE)
def pause_schedule(name: Name, services: WithServices, caller: ByCaller) -> ScheduleSummary:
    """Skip all runs until it is resumed; a run that is due within 10 s is still delivered."""
    _check_allowed(name, services, caller)
    return _summary(schedules.pause_schedule(name, services.settings), services)


@router.post("/{name}/resume", response_description="It is resumed.", responses=ABOUT_ONE)
def resume_schedule(name: Name, services: WithServices, caller: ByCaller) -> ScheduleSummary:
    """Continue with the next run; a run that is due within 10 s was skipped already."""
    _check_allowed(name, services, caller)
    return _summary(schedules.resume_schedule(name, services.settings), services)


@router.delete(
    "/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    response_description="It has ended.",
    responses=ABOUT_ONE,
)
def stop_schedule(name: Name, services: WithServices, caller: ByCaller) -> None:
    """End a schedule; a run that is due within 10 s is still delivered."""
    _check_allowed(name, services, caller)
    schedules.stop_schedule(name, services.settings)


def _check_allowed(name: str, services: Services, caller: Caller) -> None:
    """Raise UnknownMessage if the caller may not see the schedule, which may be sent just now."""
    _allowed(find_schedule(name, services.settings, timeout_s=ARRIVAL_TIMEOUT_S), caller)


def _allowed(schedule: Schedule, caller: Caller) -> Schedule:
    """Return the schedule if the caller may see it. Raises UnknownMessage."""
    if not caller.allows(schedule.topic, schedule.cluster):
        raise unknown_schedule(schedule.name)
    return schedule


def _summary(schedule: Schedule, services: Services) -> ScheduleSummary:
    next_ms = schedule.next_ms(services.clock.now_ms())
    return ScheduleSummary(
        name=schedule.name,
        topic=schedule.topic,
        cron=schedule.cron,
        zone=schedule.zone or "UTC",
        until=None if schedule.until_ms is None else format_instant(schedule.until_ms),
        until_ms=schedule.until_ms,
        misfire=Misfire(schedule.misfire or Misfire.ONCE),
        partition=None if schedule.partition is None else int(schedule.partition),
        cluster=schedule.cluster,
        paused=schedule.is_paused,
        next=None if next_ms is None else format_instant(next_ms),
        next_ms=next_ms,
    )
