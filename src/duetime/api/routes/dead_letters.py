"""/v1/dead-letters: list, show and redrive; /v1/rejected: list and show."""

from collections import deque
from typing import Annotated

from fastapi import APIRouter, Query

from duetime.api.dependencies import CHECKED, ByCaller, WithServices
from duetime.api.errors import TopicNotAllowed, problems
from duetime.api.requests import FewFields, Limit, Offset, RedriveRequest, Topic
from duetime.api.security import Caller
from duetime.client import dead_letters
from duetime.client.dead_letters import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetters,
    Rejected,
    unknown_dead_letter,
)
from duetime.client.http_models import (
    DeadLetterDetail,
    DeadLetterList,
    DeadLetterSummary,
    RedriveCount,
    RejectedDetail,
    RejectedList,
    RejectedSummary,
    payload_fields,
)
from duetime.core.clock import parse_instant
from duetime.core.errors import InvalidMessage, Reason

router = APIRouter(
    prefix="/v1/dead-letters",
    tags=["dead letters"],
    responses=problems(401, 422),
    dependencies=CHECKED,
)
rejected_router = APIRouter(
    prefix="/v1/rejected",
    tags=["rejected records"],
    responses=problems(401, 422),
    dependencies=CHECKED,
)

ReasonFilter = Annotated[
    str | None, Query(description="With this reason.", examples=["no-such-partition"])
]
Since = Annotated[
    str | None,
    Query(
        description="Failed for the last time at this instant or later: ISO 8601 with a zone.",
        examples=["2026-12-24T00:00:00Z"],
    ),
]


@router.get("", response_description="The dead letters.")
def list_dead_letters(  # noqa: PLR0913 (a parameter each)
    services: WithServices,
    caller: ByCaller,
    *,
    topic: Topic = None,
    reason: ReasonFilter = None,
    since: Since = None,
    limit: Limit = 50,
) -> DeadLetterList:
    """List the latest dead letters that were not redriven, without their payloads."""
    letters = DeadLetters(services.settings).select(_selection(caller, topic, reason, since))
    # Payloads are dropped as they are read: those of a thousand letters may take a GB.
    return DeadLetterList(letters=list(deque(map(_summary, letters), maxlen=limit)))


@router.get("/{offset}", response_description="The dead letter.", responses=problems(404))
def show_dead_letter(offset: Offset, services: WithServices, caller: ByCaller) -> DeadLetterDetail:
    """Show a dead letter."""
    letter = DeadLetters(services.settings).find(offset)
    if not caller.allows(letter.topic, letter.cluster):
        raise unknown_dead_letter([offset])
    payload = payload_fields(letter.key, letter.value, letter.headers)
    return DeadLetterDetail(**_summary(letter).model_dump(), **payload)


@router.post(
    "/redrive",
    response_description="They are due now.",
    responses=problems(400, 413, 422, 429),
)
def redrive_dead_letters(
    which: Annotated[RedriveRequest, FewFields], services: WithServices, caller: ByCaller
) -> RedriveCount:
    """Send dead letters again, due now; each once, also for concurrent requests."""
    conditions = (which.offsets, which.topic, which.reason, which.since)
    if not which.all and all(each is None for each in conditions):
        raise InvalidMessage(
            Reason.MALFORMED, "say which: offsets, topic, reason, since, or all: true"
        )
    selection = _selection(caller, which.topic, which.reason, which.since, which.offsets)
    letters = DeadLetters(services.settings)
    if caller.rate:
        # The rate is spent before the first is sent, so that all are sent, or none.
        caller.spend(letters.count(selection))
    return RedriveCount(redriven=letters.redrive(selection, services.clock))


@rejected_router.get("", response_description="The rejected records.")
def list_rejected_records(
    services: WithServices, caller: ByCaller, limit: Limit = 50
) -> RejectedList:
    """List the latest rejected records, without payloads; for tokens of all topics and clusters."""
    _check_sees_all(caller)
    found = dead_letters.latest_rejected(services.settings, limit)
    return RejectedList(records=list(map(_rejected_summary, found)))


@rejected_router.get("/{offset}", response_description="The record.", responses=problems(404))
def show_rejected_record(
    offset: Offset, services: WithServices, caller: ByCaller
) -> RejectedDetail:
    """Show a rejected record; for tokens of all topics and clusters."""
    _check_sees_all(caller)
    found = dead_letters.find_rejected(services.settings, offset)
    payload = payload_fields(found.key, found.value, found.headers)
    return RejectedDetail(**_rejected_summary(found).model_dump(), **payload)


def _check_sees_all(caller: Caller) -> None:
    # The topic of a rejected record may be unknown.
    if not caller.sees_all:
        raise TopicNotAllowed(f"the token {caller.name} is not for all topics and clusters")


def _selection(
    caller: Caller,
    topic: str | None,
    reason: str | None,
    since: str | None,
    offsets: list[int] | None = None,
) -> DeadLetterFilter:
    return DeadLetterFilter(
        topic=topic,
        reason=reason,
        since_ms=None if since is None else parse_instant(since),
        offsets=None if offsets is None else frozenset(offsets),
        allows=caller.allows,
    )


def _summary(letter: DeadLetter) -> DeadLetterSummary:
    return DeadLetterSummary.model_validate(letter, from_attributes=True)


def _rejected_summary(record: Rejected) -> RejectedSummary:
    return RejectedSummary.model_validate(record, from_attributes=True)
