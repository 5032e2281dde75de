"""/v1/messages: schedule, look, cancel, reschedule; `listed` lists them.

What waits for Kafka's clients is a plain function, and runs in a thread; scheduling, of which there
is most, stays in the event loop.
"""

import asyncio
from collections.abc import Container, Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated

from anyio import from_thread
from fastapi import APIRouter, Body, Depends, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag
from starlette.concurrency import run_in_threadpool

from duetime.api.document import Responses, may_be, plain
from duetime.api.examples import DUE_MS, ID
from duetime.api.problems import IdTaken, Invalid
from duetime.api.requests import Due, FewFields, NewMessage
from duetime.api.responses import (
    Accepted,
    AcceptedMany,
    Waiting,
    accepted,
    body,
    summary,
)
from duetime.api.route import Route
from duetime.api.services import ByCaller, Services, WithServices, services_of
from duetime.api.spool.shown import as_found
from duetime.api.tokens import Caller
from duetime.asking import all_series
from duetime.cancelling import cancel_surely, find_waiting, found_soon, not_waiting
from duetime.errors import InvalidMessage, Reason, TooLate, UnknownMessage
from duetime.message import ID_PATTERN, LATEST_MS, MessageId
from duetime.outgoing import Outgoing, new_uniques
from duetime.reschedule import reschedule
from duetime.stores import Found

router = APIRouter(
    prefix="/v1/messages", tags=["messages"], responses=may_be(401, 422), route_class=Route
)

Id = Annotated[
    str,
    Path(
        description="The full id, as it was answered.",
        examples=[ID],
        # Told and not checked: what is wrong has its own reason.
        json_schema_extra={"pattern": plain(ID_PATTERN)},
    ),
]
RetryMs = Annotated[
    int | None,
    Query(
        ge=0,
        le=LATEST_MS,
        description="Of one that failed: its `due_at_ms` in the list.",
        examples=[DUE_MS],
    ),
]
#: Of what is asked about one that may not wait any more.
GONE = may_be(404, 409, 422)

SPOOLED: Responses = {202: {"model": Accepted | AcceptedMany, "description": "In the spool."}}


def _one_or_many(given: object) -> str:
    """What a body is to be: it is refused as that, and not as both."""
    return "messages" if isinstance(given, list) else "message"


Wanted = Annotated[
    Annotated[NewMessage, Tag("message")]
    | Annotated[list[NewMessage], Field(min_length=1, fail_fast=True), Tag("messages")],
    Discriminator(_one_or_many),
    FewFields,
    Body(description="One message, or a list of them: all are taken, or none."),
]


async def _counting(request: Request) -> Services:
    """The services; before a message is made of each, of which there may be a million."""
    services = services_of(request)
    try:
        # It is read already, unless it is said to be something else.
        given = await request.json()
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, list):
        _check_count(len(given), services)
    return services


AtCounting = Annotated[Services, Depends(_counting)]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=Accepted | AcceptedMany,
    response_description="Kafka has it, or them.",
    responses=SPOOLED | may_be(400, 409, 413, 422, 429),
)
async def schedule(wanted: Wanted, services: AtCounting, caller: ByCaller) -> JSONResponse:
    """Schedule a message, or several.

    201: every in-sync replica of Kafka has them. 202: Kafka does not answer; they are on this
    machine's disk, and sent when it does.
    """
    messages = wanted if isinstance(wanted, list) else [wanted]
    async with services.keys.sending(
        messages, lambda: _records(messages, services, caller), caller.name
    ) as sending:
        caller.spend(len(messages))
        names = {each.series for each in sending.records if each.series}
        if names and not caller.sees_all:
            await run_in_threadpool(_check_series, names, services, caller)
        await sending.by(services.dispatcher)
    told = [accepted(each.name, each.id.due_ms) for each in sending.records]
    content = {"messages": told} if isinstance(wanted, list) else told[0]
    return JSONResponse(content, HTTPStatus.CREATED if sending.in_kafka else HTTPStatus.ACCEPTED)


@router.get("/{id}", responses=GONE)
async def show(
    id: Id,  # noqa: A002 (what all call it)
    services: WithServices,
    caller: ByCaller,
    retry_ms: RetryMs = None,
) -> Waiting:
    """All about a message that waits, in Kafka or in the spool."""
    identity = MessageId.parse(id)
    found = await _in_spool(identity, services, caller) if retry_ms is None else None
    if found is None:
        found = await services.shared.run(
            ("find", caller.name, identity, retry_ms),
            partial(_found, identity, services, caller, retry_ms),
        )
    return Waiting(**summary(found), **body(found))


@router.delete(
    "/{id}",
    status_code=HTTPStatus.NO_CONTENT,
    response_description="It will not be delivered.",
    responses=GONE,
)
async def cancel(id: Id, services: WithServices, caller: ByCaller) -> None:  # noqa: A002 (what all call it)
    """Cancel a message. 204: it will not be delivered; 409: too late; 404: unknown.

    One that could not be delivered, and waits to be tried again, is cancelled, too. One that was
    rescheduled goes on under its new id, whatever is answered of the old one.
    """
    identity = MessageId.parse(id)
    in_spool = await _in_spool(identity, services, caller)
    if in_spool:
        # Also where the request's time is up: what is taken out is noted.
        withdrawing = asyncio.create_task(_withdraw(identity, services, caller))
        if await asyncio.shield(withdrawing):
            return
    try:
        await services.shared.run(
            ("cancel", caller.name, identity),
            partial(_cancel_in_kafka, identity, services, caller),
        )
    except (TooLate, UnknownMessage):
        if not services.cancels.has(caller.name, identity):
            raise


@router.post("/{id}/reschedule", responses=GONE | may_be(400, 413, 429))
def change(
    id: Id,  # noqa: A002 (as above)
    due: Annotated[Due, FewFields],
    services: WithServices,
    caller: ByCaller,
) -> Accepted:
    """Give a message another time, and with it another id. Not safe to repeat: 404 then.

    A message that was sent a moment ago is not found yet, which is a 404, too: a cancel waits for
    it, this does not.
    """
    identity = MessageId.parse(id)
    caller.spend(1)
    _check_seen(identity, services, caller)
    at, in_ = due.times()
    again = reschedule(id, at=at, in_=in_, settings=services.settings, clock=services.clock)
    return Accepted(**accepted(again, MessageId.parse(again).due_ms))


@router.post("/{id}/deliver-now", responses=GONE | may_be(413, 429))
def deliver_now(id: Id, services: WithServices, caller: ByCaller) -> Accepted:  # noqa: A002 (as above)
    """Deliver a message at once, under another id."""
    return change(id, Due(**{"in": "0s"}), services, caller)


def _records(wanted: Sequence[NewMessage], services: Services, caller: Caller) -> list[Outgoing]:
    """All of them, or Invalid."""
    # In order: of several that are not allowed, the first is told.
    for topic in dict.fromkeys(each.topic for each in wanted):
        caller.check(topic)
    records, errors, now_ms = [], dict[int, InvalidMessage](), services.clock.now_ms()
    for index, (each, drawn) in enumerate(zip(wanted, new_uniques(len(wanted)), strict=True)):
        try:
            due_ms = services.keys.due_ms(each, caller.name)
            records.append(each.record(services.settings, now_ms, due_ms, drawn))
        except InvalidMessage as error:
            errors[index] = error
    if errors:
        raise errors[0] if len(wanted) == 1 else Invalid(errors)
    services.cancels.check(records)
    return records


def _check_count(count: int, services: Services) -> None:
    most = services.settings.api_batch_messages
    if count > most:
        raise InvalidMessage(
            Reason.TOO_LARGE, f"{count} messages are over api_batch_messages ({most}): send less"
        )


def _check_series(names: Container[str], services: Services, caller: Caller) -> None:
    """A series takes the place of the one of its name. Raises IdTaken where that is another's."""
    for each in all_series(services.settings):
        if each.name in names and not caller.allows(each.topic):
            raise IdTaken(f"id {each.name} is the name of another series: choose another")


def _found(
    identity: MessageId, services: Services, caller: Caller, retry_ms: int | None = None
) -> Found:
    """The message, if it waits and the caller may know. Raises TooLate, UnknownMessage."""
    now_ms = services.clock.now_ms()
    if retry_ms is None:
        found = _found_by_id(identity, services, caller, now_ms)
    elif (tried := services.reader.find(identity, now_ms, retry_ms=retry_ms)) is not None:
        found = tried
    else:
        raise UnknownMessage(f"{identity} does not wait to be tried again then, or no more")
    if not caller.allows(found.topic):
        raise not_waiting(identity, services.settings, now_ms)
    return found


def _found_by_id(identity: MessageId, services: Services, caller: Caller, now_ms: int) -> Found:
    try:
        return find_waiting(identity, services.reader, services.settings, now_ms)
    except TooLate:
        if caller.sees_all:
            raise
        # What has become of it may be no business of this caller's.
        raise not_waiting(identity, services.settings, now_ms) from None


async def _in_spool(identity: MessageId, services: Services, caller: Caller) -> Found | None:
    """The message, if it is in the spool and the caller may know."""
    record = await services.dispatcher.find(identity)
    found = as_found(record) if record else None
    return found if found and caller.allows(found.topic) else None


async def _withdraw(identity: MessageId, services: Services, caller: Caller) -> bool:
    if not await services.dispatcher.withdraw(identity):
        return False
    services.cancels.note(caller.name, identity)
    return True


def _cancel_in_kafka(identity: MessageId, services: Services, caller: Caller) -> None:
    if not caller.sees_all:
        # Whose it is must be known before it is cancelled.
        found_soon(lambda: _found(identity, services, caller), services.clock)
    cancel_surely(identity, services.settings, services.clock)
    # From here, because whoever waits may have been given up: the next try is told the same.
    from_thread.run_sync(services.cancels.note, caller.name, identity)


def _check_seen(identity: MessageId, services: Services, caller: Caller) -> None:
    """What a caller may not see is unknown to it."""
    if not caller.sees_all:
        _found(identity, services, caller)
