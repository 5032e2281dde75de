"""What waits, who delivers, and whether this process is well: pending, status, health, metrics."""

import json

from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from duetime.api.document import EXAMPLES, may_be, text
from duetime.api.examples import METRICS
from duetime.api.requests import From, To
from duetime.api.responses import Counts, State, Well, counts
from duetime.api.route import Route
from duetime.api.services import WithServices, caller_of
from duetime.api.spool.errors import SpoolFailed, SpoolFull
from duetime.api.watch import event
from duetime.clock import parse_instant
from duetime.status import status as ask
from duetime.stores.reader import within

router = APIRouter(tags=["state"], route_class=Route)

#: Any token will do: nothing here names a topic.
ANY_TOKEN = [Depends(caller_of)]

EVENT_STREAM = "text/event-stream"

#: An event, for example.
TROUBLE = event(
    "trouble", json.dumps({"problem": json.loads(bytes(EXAMPLES[503].body)), "spooled": 3})
)


@router.get("/v1/pending", dependencies=ANY_TOKEN, responses=may_be(401, 422))
def pending(services: WithServices, from_: From = None, to: To = None) -> Counts:
    """How many records wait until when, from offsets alone; cancels count until their time."""
    from_ms, to_ms = (None if each is None else parse_instant(each) for each in (from_, to))
    slots = within(services.reader.pending(services.clock.now_ms()), from_ms, to_ms)
    return counts(slots)


@router.get("/v1/status", dependencies=ANY_TOKEN, responses=may_be(401, 422))
def status(services: WithServices) -> State:
    """Who leads, who stands by, and whether anything is late."""
    return State.model_validate(ask(services.settings, services.clock), from_attributes=True)


@router.get(
    "/v1/events",
    dependencies=ANY_TOKEN,
    response_class=StreamingResponse,
    response_description="Without an end.",
    responses=text(EVENT_STREAM, TROUBLE) | may_be(401, 422),
)
async def events(services: WithServices) -> StreamingResponse:
    """Server-sent events, every two seconds: `look` says how all is, `trouble` why nobody knows."""
    headers = {"Cache-Control": "no-store"}
    return StreamingResponse(services.watch.events(), media_type=EVENT_STREAM, headers=headers)


@router.get("/healthz")
async def healthz() -> Well:
    """Whether this process lives."""
    return Well()


@router.get("/readyz")
async def readyz(services: WithServices) -> Well:
    """Whether messages are taken, and sent: 503 when the spool is full, or cannot be emptied."""
    if services.dispatcher.is_stuck:
        raise SpoolFailed("what is in the spool cannot be sent: see the log")
    if services.dispatcher.is_full:
        raise SpoolFull("Kafka does not answer, and the spool is full")
    return Well()


@router.get(
    "/metrics",
    dependencies=ANY_TOKEN,
    response_class=Response,
    response_description="Prometheus' text format.",
    responses=text("text/plain", METRICS) | may_be(401),
)
async def metrics() -> Response:
    """For Prometheus. Not in a thread: all of them may be waiting for Kafka."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
