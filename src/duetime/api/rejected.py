"""/v1/rejected: records that were refused when they came in."""

from fastapi import APIRouter

from duetime import rejected
from duetime.api.document import may_be
from duetime.api.problems import TopicNotAllowed
from duetime.api.requests import Limit, Number
from duetime.api.responses import RejectedPage, RejectedRecord, RejectedSummary, body
from duetime.api.route import Route
from duetime.api.services import ByCaller, WithServices
from duetime.api.tokens import Caller

router = APIRouter(
    prefix="/v1/rejected", tags=["rejected records"], responses=may_be(401, 422), route_class=Route
)


@router.get("")
def list_records(services: WithServices, caller: ByCaller, limit: Limit = 50) -> RejectedPage:
    """The latest rejected records, without payloads; for tokens of all topics and clusters."""
    _check(caller)
    # Without payloads as soon as they are read: a thousand may be a GB.
    read = map(RejectedSummary.model_validate, rejected.latest(services.settings, limit))
    return RejectedPage(records=list(read))


@router.get("/{number}", responses=may_be(404))
def show(number: Number, services: WithServices, caller: ByCaller) -> RejectedRecord:
    """All about one; for tokens of all topics and clusters."""
    _check(caller)
    found = rejected.find(services.settings, number)
    summary = RejectedSummary.model_validate(found)
    return RejectedRecord(**summary.model_dump(), **body(found))


def _check(caller: Caller) -> None:
    """Of many nobody knows which topic they were for."""
    if not caller.sees_all:
        raise TopicNotAllowed(f"the token {caller.name} is not for all topics and clusters")
