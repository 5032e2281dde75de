"""The state of the pipelines and of this process: pending, status, events, health, metrics."""

import json
from typing import Literal

from fastapi import APIRouter, Depends, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from duetime.api.dependencies import CHECKED, WithServices, caller_of
from duetime.api.errors import Responses, SpoolFailed, SpoolFull, example_problem, problems
from duetime.api.events import event, pending_counts
from duetime.api.requests import From, To
from duetime.client.http_models import Answer, PendingCounts, PipelineStatus, example
from duetime.client.status import status as read_status
from duetime.core.clock import parse_instant
from duetime.stores import overlapping

router = APIRouter(tags=["state"])

#: Any token is enough: these answers name no topic.
ANY_TOKEN = [Depends(caller_of)]
CHECKED_ANY_TOKEN = [*ANY_TOKEN, *CHECKED]

EVENT_STREAM = "text/event-stream"

EXAMPLE_EVENT = event("problem", json.dumps({"problem": example_problem(503), "spooled": 3}))

EXAMPLE_METRICS = """# HELP duetime_api_spooled_messages Messages in the HTTP API's spool.
# TYPE duetime_api_spooled_messages gauge
duetime_api_spooled_messages 0.0
"""


class HealthStatus(Answer):
    """The process is healthy."""

    model_config = example(status="ok")

    status: Literal["ok"] = "ok"


def text_response(media_type: str, text: str) -> Responses:
    """Return the `responses` of a route whose answer is not JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}, "example": text}}}}


@router.get(
    "/v1/pending",
    dependencies=CHECKED_ANY_TOKEN,
    response_description="The counts.",
    responses=problems(401, 422),
)
def count_pending(services: WithServices, from_: From = None, to: To = None) -> PendingCounts:
    """Count pending records by slot, from offsets alone; cancellations count until they are due."""
    from_ms, to_ms = (None if each is None else parse_instant(each) for each in (from_, to))
    return pending_counts(
        overlapping(services.reader.pending(services.clock.now_ms()), from_ms, to_ms)
    )


@router.get(
    "/v1/status",
    dependencies=CHECKED_ANY_TOKEN,
    response_description="The status.",
    responses=problems(401, 422),
)
def show_status(services: WithServices) -> PipelineStatus:
    """Show the leader, the standbys, and what is late."""
    return read_status(services.settings, services.clock)


@router.get(
    "/v1/events",
    dependencies=CHECKED_ANY_TOKEN,
    response_class=StreamingResponse,
    response_description="A stream without an end.",
    responses=text_response(EVENT_STREAM, EXAMPLE_EVENT) | problems(401, 422),
)
async def stream_events(services: WithServices) -> StreamingResponse:
    """Stream server-sent events every two seconds: `snapshot`, or `problem` without Kafka."""
    headers = {"Cache-Control": "no-store"}
    return StreamingResponse(services.watch.events(), media_type=EVENT_STREAM, headers=headers)


@router.get("/healthz", response_description="It is alive.")
async def check_liveness() -> HealthStatus:
    """Check that this process is alive."""
    return HealthStatus()


@router.get("/readyz", response_description="It is ready.")
async def check_readiness(services: WithServices) -> HealthStatus:
    """Check that messages are accepted and sent; 503 if the spool is full, or cannot be drained."""
    if services.dispatcher.is_stuck:
        raise SpoolFailed("what is in the spool cannot be sent: see the log")
    if services.dispatcher.is_full:
        raise SpoolFull("Kafka does not answer, and the spool is full")
    return HealthStatus()


@router.get(
    "/metrics",
    dependencies=ANY_TOKEN,
    response_class=Response,
    response_description="Metrics in Prometheus' text format.",
    responses=text_response("text/plain", EXAMPLE_METRICS) | problems(401),
)
async def show_metrics() -> Response:
    """Show metrics for Prometheus. In the event loop, as all threads may be waiting for Kafka."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
