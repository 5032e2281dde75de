"""/v1/dead: what could not be delivered, looked at and brought back."""

from collections import deque
from typing import Annotated

from fastapi import APIRouter, Query

from duetime.api.document import may_be
from duetime.api.requests import FewFields, Limit, Number, Redrive, Topic
from duetime.api.responses import Dead, DeadPage, DeadSummary, Redriven, body
from duetime.api.route import Route
from duetime.api.services import ByCaller, WithServices
from duetime.api.tokens import Caller
from duetime.clock import parse_instant
from duetime.dead import DeadLetters, Selection
from duetime.errors import InvalidMessage, Reason, UnknownMessage

router = APIRouter(
    prefix="/v1/dead", tags=["dead letters"], responses=may_be(401, 422), route_class=Route
)


OfReason = Annotated[
    str | None, Query(description="Those that died of this.", examples=["no-such-partition"])
]
Since = Annotated[
    str | None,
    Query(description="Dead since then: with a zone.", examples=["2026-12-24T00:00:00Z"]),
]


@router.get("", responses=may_be(422))
def list_letters(  # noqa: PLR0913 (a parameter each)
    services: WithServices,
    caller: ByCaller,
    *,
    topic: Topic = None,
    reason: OfReason = None,
    since: Since = None,
    limit: Limit = 50,
) -> DeadPage:
    """The latest dead letters that were not brought back, without what is in them."""
    selection = _selection(caller, topic, reason, since)
    # Without payloads as soon as they are read: a thousand may be a GB.
    read = map(DeadSummary.model_validate, DeadLetters(services.settings).chosen(selection))
    return DeadPage(letters=list(deque(read, maxlen=limit)))


@router.get("/{number}", responses=may_be(404, 422))
def show(number: Number, services: WithServices, caller: ByCaller) -> Dead:
    """All about a dead letter."""
    letter = DeadLetters(services.settings).find(number)
    if not caller.allows(letter.topic, letter.cluster):
        raise UnknownMessage(f"no dead letter has the number {number}, or it was brought back")
    summary = DeadSummary.model_validate(letter)
    return Dead(**summary.model_dump(), **body(letter))


@router.post("/redrive", responses=may_be(400, 413, 422, 429))
def redrive(
    wanted: Annotated[Redrive, FewFields], services: WithServices, caller: ByCaller
) -> Redriven:
    """Send dead letters once more, due now; each is brought back once, also by two at a time."""
    which = (wanted.numbers, wanted.topic, wanted.reason, wanted.since)
    if not wanted.all and all(each is None for each in which):
        raise InvalidMessage(
            Reason.UNREADABLE, "say which: numbers, topic, reason, since, or all: true"
        )
    selection = _selection(caller, wanted.topic, wanted.reason, wanted.since, wanted.numbers)
    letters = DeadLetters(services.settings)
    if caller.rate:
        # All at once: half of them sent, and then an error, would help nobody.
        caller.spend(letters.count(selection))
    return Redriven(redriven=letters.redrive(selection, services.clock))


def _selection(
    caller: Caller,
    topic: str | None,
    reason: str | None,
    since: str | None,
    numbers: list[int] | None = None,
) -> Selection:
    return Selection(
        topic=topic,
        reason=reason,
        since_ms=None if since is None else parse_instant(since),
        numbers=None if numbers is None else frozenset(numbers),
        allows=caller.allows,
    )
