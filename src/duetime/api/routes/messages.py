"""/v1/messages: schedule, list, show, cancel, reschedule and deliver now.

Functions that wait for Kafka's clients are plain, and run in threads; scheduling, the most frequent
request, stays in the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag
from starlette.concurrency import run_in_threadpool

from duetime.api.dependencies import CHECKED, ByCaller, Services, WithServices
from duetime.api.errors import IdTaken, InvalidBatch, RequestTimedOut, Responses, problems
from duetime.api.requests import (
    DueTime,
    FewFields,
    From,
    Limit,
    NewMessage,
    To,
    Topic,
    portable_pattern,
)
from duetime.api.security import Caller
from duetime.client.cancellation import (
    cancel_and_confirm,
    find_pending,
    unknown_message,
    wait_until_found,
)
from duetime.client.http_models import (
    EXAMPLE_DUE_MS,
    EXAMPLE_ID,
    Accepted,
    AcceptedMany,
    MessagePage,
    MessageSummary,
    ScheduledMessage,
    payload_fields,
)
from duetime.client.rescheduling import reschedule
from duetime.client.schedules import list_schedules
from duetime.core import headers as H
from duetime.core.clock import format_instant, parse_instant
from duetime.core.errors import InvalidMessage, Reason, TooLate, UnknownMessage
from duetime.core.messages import ID_PATTERN, LATEST_MS, MessageId, PendingMessage, SortKey
from duetime.core.records import IntakeRecord, new_uniques

router = APIRouter(
    prefix="/v1/messages", tags=["messages"], responses=problems(401, 422), dependencies=CHECKED
)

#: The most messages that are read for one page.
MAX_READ = 10_000

#: The problems of a request about one message.
ABOUT_ONE = problems(404, 409, 422)

SPOOLED: Responses = {
    202: {"model": Accepted | AcceptedMany, "description": "Accepted into the spool."}
}

Id = Annotated[
    str,
    Path(
        description="The full id, as the API answered it.",
        examples=[EXAMPLE_ID],
        # Documented only: an invalid id has a reason of its own.
        json_schema_extra={"pattern": portable_pattern(ID_PATTERN)},
    ),
]
RetryMs = Annotated[
    int | None,
    Query(
        ge=0,
        le=LATEST_MS,
        description="Of a message that failed: its `due_at_ms` in the list.",
        examples=[EXAMPLE_DUE_MS],
    ),
]
Key = Annotated[str | None, Query(description="With this key, as text.", examples=["17"])]
Failed = Annotated[
    bool, Query(description="Only messages that failed and are retried.", examples=[True])
]
Cursor = Annotated[
    str | None, Query(description="The cursor of the last page.", examples=[EXAMPLE_ID])
]

# The tags make an error that of one form, and not of both.
OneOrMany = Annotated[
    Annotated[NewMessage, Tag("message")]
    | Annotated[list[NewMessage], Field(min_length=1, fail_fast=True), Tag("messages")],
    Discriminator(lambda body: "messages" if isinstance(body, list) else "message"),
    FewFields,
    Body(description="One message, or a list of them: all are accepted, or none."),
]


async def _services_for_batch(request: Request, services: WithServices) -> Services:
    """Return the services, if the batch is not too long; checked before its models are built."""
    try:
        # Starlette has parsed it already, unless it is declared as something else.
        body = await request.json()
    except (ValueError, RecursionError):
        body = None
    max_size = services.settings.api_max_batch_size
    if isinstance(body, list) and len(body) > max_size:
        raise InvalidMessage(
            Reason.TOO_LARGE,
            f"{len(body)} messages are over api_max_batch_size ({max_size}): send less",
        )
    return services


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=Accepted | AcceptedMany,
    response_description="Accepted by Kafka.",
    responses=SPOOLED | problems(400, 409, 413, 422, 429),
)
async def schedule(
    body: OneOrMany, services: Annotated[Services, Depends(_services_for_batch)], caller: ByCaller
) -> JSONResponse:
    """Schedule a message, or a list of messages.

    201: every in-sync replica of Kafka has them. 202: Kafka does not answer; they are on the disk
    of the API's machine, and are sent once it answers.
    """
    messages = body if isinstance(body, list) else [body]
    make_records = partial(_records, messages, services, caller)
    async with services.keys.begin(messages, make_records, caller.name) as request:
        caller.spend(len(messages))
        names = {each.schedule for each in request.records if each.schedule}
        if names and not caller.sees_all:
            await run_in_threadpool(_check_schedule_names, names, services, caller)
        await request.send(services.dispatcher)
    accepted = [_accepted(each.name, each.id.due_ms) for each in request.records]
    content = {"messages": accepted} if isinstance(body, list) else accepted[0]
    return JSONResponse(content, HTTPStatus.CREATED if request.in_kafka else HTTPStatus.ACCEPTED)


@router.get("", response_description="A page of messages.", responses=problems(422))
def list_messages(  # noqa: PLR0913 (a parameter each)
    services: WithServices,
    caller: ByCaller,
    *,
    topic: Topic = None,
    from_: From = None,
    to: To = None,
    key: Key = None,
    failed: Failed = False,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> MessagePage:
    """List scheduled messages by due time, without the cancelled ones.

    Kafka has no index of them, so they are read: 10,000 a request at most. Where few messages have
    the key, or failed, a page is short although others follow: continue with its cursor. Messages
    for clusters that the token does not allow count, too. Messages for other topics than `topic`,
    or for topics that the token does not allow, are read and not counted: where few are left, all
    pending messages are read. Where that takes too long (503, `timeout`), narrow it by `from` and
    `to`.
    """
    messages = services.reader.messages(
        services.clock.now_ms(),
        topic=topic,
        # The topic is checked before anything else of a message is read.
        allows=in_time(
            lambda each: caller.allows(each, None), services.settings.api_request_timeout_seconds
        ),
        from_ms=None if from_ is None else parse_instant(from_),
        to_ms=None if to is None else parse_instant(to),
        after=_sort_key(cursor) if cursor else None,
    )
    wanted_key = None if key is None else key.encode(errors="surrogatepass")

    def matches(each: PendingMessage) -> bool:
        if not caller.allows(each.topic, each.cluster):
            return False
        return wanted_key in (None, each.key) and not (failed and each.retry is None)

    return page_of(messages, matches, limit)


@router.get("/{id}", response_description="The message.", responses=ABOUT_ONE)
async def show_message(
    id: Id,  # noqa: A002 (the field's name)
    services: WithServices,
    caller: ByCaller,
    retry_ms: RetryMs = None,
) -> ScheduledMessage:
    """Show a scheduled message, in Kafka or in the spool."""
    identity = MessageId.parse(id)
    found = await _find_in_spool(identity, services, caller) if retry_ms is None else None
    if found is None:
        found = await services.shared.run(
            ("find", caller.name, identity, retry_ms),
            partial(_find, identity, services, caller, retry_ms),
        )
    payload = payload_fields(found.key, found.value, found.headers)
    return ScheduledMessage(**_summary(found).model_dump(), **payload)


@router.delete(
    "/{id}",
    status_code=HTTPStatus.NO_CONTENT,
    response_description="It will not be delivered.",
    responses=ABOUT_ONE,
)
async def cancel_message(id: Id, services: WithServices, caller: ByCaller) -> None:  # noqa: A002 (the field's name)
    """Cancel a message. 204: it will not be delivered; 409: too late; 404: unknown.

    A message that failed and is retried is cancelled, too. A message that was rescheduled continues
    under its new id, whatever the answer for the old one is.
    """
    identity = MessageId.parse(id)
    if await _find_in_spool(identity, services, caller):
        # Shielded: it is counted also if the request times out.
        withdrawal = asyncio.create_task(services.dispatcher.withdraw(identity))
        if await asyncio.shield(withdrawal):
            return
    await services.shared.run(
        ("cancel", caller.name, identity),
        partial(_cancel_in_kafka, identity, services, caller),
    )


@router.post(
    "/{id}/reschedule",
    response_description="The message under its new id.",
    responses=ABOUT_ONE | problems(400, 413, 429),
)
def reschedule_message(
    id: Id,  # noqa: A002 (the field's name)
    due: Annotated[DueTime, FewFields],
    services: WithServices,
    caller: ByCaller,
) -> Accepted:
    """Give a message another due time, and with it another id. Not safe to repeat: 404 then.

    A message that was sent a moment ago is not found (404): unlike a cancellation, this does not
    wait for it.
    """
    identity = MessageId.parse(id)
    caller.spend(1)
    if not caller.sees_all:
        # Another caller's message is unknown to this one.
        _find(identity, services, caller)
    at, in_ = due.times()
    with services.rescheduled.once(identity):
        new_id = reschedule(id, at=at, in_=in_, settings=services.settings, clock=services.clock)
    return Accepted(**_accepted(new_id, MessageId.parse(new_id).due_ms))


@router.post(
    "/{id}/deliver-now",
    response_description="The message under its new id.",
    responses=ABOUT_ONE | problems(413, 429),
)
def deliver_message_now(id: Id, services: WithServices, caller: ByCaller) -> Accepted:  # noqa: A002 (the field's name)
    """Deliver a message at once, under another id."""
    return reschedule_message(id, DueTime(**{"in": "0s"}), services, caller)


def _accepted(id_: str, due_ms: int) -> dict[str, str]:
    """Return the JSON of an `Accepted`; a model for each of a batch would take too long."""
    return {"id": id_, "due": format_instant(due_ms)}


def _records(
    messages: Sequence[NewMessage],
    services: Services,
    caller: Caller,
    due_ms: Mapping[str, int],
) -> list[IntakeRecord]:
    """Return a record for each message, due as an earlier try with its id, if there was one.

    Raises InvalidMessage for one message, InvalidBatch for several.
    """
    # In order, so that the error is about the first topic that is not allowed.
    for destination in dict.fromkeys((each.topic, each.cluster) for each in messages):
        caller.check(*destination)
    records, errors, now_ms = [], dict[int, InvalidMessage](), services.clock.now_ms()
    drawn_ids = new_uniques(len(messages))
    for index, (each, drawn) in enumerate(zip(messages, drawn_ids, strict=True)):
        try:
            earlier_ms = due_ms.get(each.id or "")
            records.append(each.record(services.settings, now_ms, earlier_ms, drawn))
        except InvalidMessage as error:
            errors[index] = error
    if errors:
        raise errors[0] if len(messages) == 1 else InvalidBatch(errors)
    return records


def _check_schedule_names(names: Container[str], services: Services, caller: Caller) -> None:
    """Raise IdTaken where a schedule of another caller would be replaced."""
    for each in list_schedules(services.settings):
        if each.name in names and not caller.allows(each.topic, each.cluster):
            raise IdTaken(f"id {each.name} is the name of another schedule: choose another")


def _find(
    identity: MessageId, services: Services, caller: Caller, retry_ms: int | None = None
) -> PendingMessage:
    """Return the message if it is pending and the caller may see it.

    Raises TooLate, UnknownMessage.
    """
    now_ms = services.clock.now_ms()
    found: PendingMessage | None
    if retry_ms is None:
        try:
            found = find_pending(identity, services.reader, services.settings, now_ms)
        except TooLate:
            if caller.sees_all:
                raise
            # Its fate may be that of another caller's message.
            raise unknown_message(identity, services.settings, now_ms) from None
    else:
        found = services.reader.find(identity, now_ms, retry_ms=retry_ms)
        if found is None:
            raise UnknownMessage(f"{identity} is not retried then, or was retried already")
    if not caller.allows(found.topic, found.cluster):
        raise unknown_message(identity, services.settings, now_ms)
    return found


async def _find_in_spool(
    identity: MessageId, services: Services, caller: Caller
) -> PendingMessage | None:
    record = await services.dispatcher.find(identity)
    found = _scheduled_by(record) if record else None
    return found if found and caller.allows(found.topic, found.cluster) else None


def _scheduled_by(record: IntakeRecord) -> PendingMessage:
    """Return the message that a record in the spool schedules."""
    due = {name: (value or b"").decode() for name, value in record.headers if name in H.CONSUMED}
    partition, expires_ms = due.get(H.DUE_PARTITION), due.get(H.DUE_EXPIRES_MS)
    return PendingMessage(
        id=record.id,
        topic=due[H.DUE_TOPIC],
        partition=int(partition) if partition else None,
        cluster=due.get(H.DUE_CLUSTER),
        expires_ms=int(expires_ms) if expires_ms else None,
        key=record.key,
        value=record.value,
        headers=H.without(record.headers, H.CONSUMED),
        cancelled=False,
    )


def _cancel_in_kafka(identity: MessageId, services: Services, caller: Caller) -> None:
    if not caller.sees_all:
        # Its topic must be known before it is cancelled.
        wait_until_found(lambda: _find(identity, services, caller))
    cancel_and_confirm(identity, services.settings, services.clock)


def in_time(allows: Callable[[str], bool], timeout_s: float) -> Callable[[str], bool]:
    """Return `allows` with an end: RequestTimedOut is raised after `timeout_s`."""
    until_s = time.monotonic() + timeout_s

    def allows_in_time(topic: str) -> bool:
        if time.monotonic() > until_s:
            raise RequestTimedOut("reading takes longer than api_request_timeout_seconds")
        return allows(topic)

    return allows_in_time


def _sort_key(cursor: str) -> SortKey:
    try:
        return SortKey.parse(cursor)
    except InvalidMessage as error:
        raise InvalidMessage(
            Reason(error.reason), f"{cursor!r} is no cursor: give the one that the last page had"
        ) from None


def page_of(
    messages: Iterator[PendingMessage], matches: Callable[[PendingMessage], bool], limit: int
) -> MessagePage:
    """Return the next matches, `limit` or those among MAX_READ messages, without their payloads."""
    page = list[MessageSummary]()
    last: SortKey | None = None
    for count, each in enumerate(messages):
        if len(page) == limit or count == MAX_READ:
            return MessagePage(messages=page, cursor=last.name if last else None)
        last = each.sort_key
        if matches(each):
            page.append(_summary(each))
    return MessagePage(messages=page, cursor=None)


def _summary(found: PendingMessage) -> MessageSummary:
    return MessageSummary(
        id=str(found.id),
        topic=found.topic,
        due=format_instant(found.due_ms),
        due_at_ms=found.due_ms,
        expires_ms=found.expires_ms,
        partition=found.partition,
        cluster=found.cluster,
        value_bytes=None if found.value is None else len(found.value),
        cancelled=found.cancelled,
        attempts=found.retry.attempts if found.retry else 0,
        failed_ms=found.retry.failed_ms if found.retry else None,
    )
