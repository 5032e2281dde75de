"""/v1/messages: schedule, look, cancel, reschedule.

What waits for Kafka's clients is a plain function, and runs in a thread; scheduling, of which there
is most, stays in the event loop.
"""

from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from duetime.api.desk import AtDesk, ByCaller, Desk
from duetime.api.models import (
    Accepted,
    AcceptedMany,
    Page,
    Summary,
    Waiting,
    accepted,
    body,
    summary,
)
from duetime.api.problems import Invalid
from duetime.api.spooled import as_found
from duetime.api.tokens import Caller
from duetime.api.wanted import Due, NewMessage
from duetime.cancelling import cancel_surely, found_soon, not_waiting
from duetime.clock import delay, instant, parse_instant
from duetime.errors import InvalidMessage, Reason
from duetime.message import MessageId
from duetime.outgoing import Outgoing
from duetime.reschedule import reschedule
from duetime.stores import Found
from duetime.stores.listing import after

router = APIRouter(prefix="/v1/messages", tags=["messages"])

#: The most messages on one page.
MOST = 1_000

#: The most that are read for one page.
MOST_READ = 10_000

Id = Annotated[str, Path(description="The full id, as it was answered.")]
Wanted = Annotated[
    NewMessage | Annotated[list[NewMessage], Field(min_length=1)],
    Body(description="One message, or a list of them: all are taken, or none."),
]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=Accepted | AcceptedMany,
    responses={202: {"model": Accepted | AcceptedMany, "description": "In the spool."}},
)
async def schedule(wanted: Wanted, desk: AtDesk, caller: ByCaller) -> JSONResponse:
    """Schedule a message, or several.

    201: every in-sync replica of Kafka has them. 202: Kafka does not answer; they are on this
    machine's disk, and sent when it does.
    """
    messages = wanted if isinstance(wanted, list) else [wanted]
    records = _records(messages, desk, caller)
    caller.spend(len(records))
    async with desk.keys.sending(messages, records) as fresh:
        in_kafka = await desk.courier.send(fresh)
    told = [accepted(each.name, each.id.due_ms) for each in records]
    content = {"messages": told} if isinstance(wanted, list) else told[0]
    return JSONResponse(content, HTTPStatus.CREATED if in_kafka else HTTPStatus.ACCEPTED)


@router.get("")
def list_messages(  # noqa: PLR0913 (a parameter each)
    desk: AtDesk,
    caller: ByCaller,
    *,
    topic: Annotated[str | None, Query(description="Those for this topic.")] = None,
    from_: Annotated[str | None, Query(alias="from", description="Due then or later.")] = None,
    to: Annotated[str | None, Query(description="Due before then.")] = None,
    key: Annotated[str | None, Query(description="Those with this key, as text.")] = None,
    cursor: Annotated[str | None, Query(description="As the last page had it.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 100,
) -> Page:
    """Messages that wait, by due time, without those that are cancelled.

    Kafka has no index of them, so they are read: 10,000 a request at most. Where few have the key,
    a page is short although others follow: the cursor goes on.
    """
    last = MessageId.parse(cursor) if cursor else None
    from_ms = last.due_ms if last else _bound_ms(from_)
    found = desk.reader.messages(
        desk.clock.now_ms(), topic=topic, from_ms=from_ms, to_ms=_bound_ms(to)
    )
    wanted = None if key is None else key.encode(errors="surrogatepass")
    return _page(
        after(found, last) if last else found,
        lambda each: caller.allows(each.topic) and wanted in (None, each.key),
        limit,
    )


@router.get("/{id}")
async def show(id: Id, desk: AtDesk, caller: ByCaller) -> Waiting:  # noqa: A002 (what all call it)
    """All about a message that waits, in Kafka or in the spool."""
    identity = MessageId.parse(id)
    found = await _in_spool(identity, desk, caller)
    if found is None:
        found = await run_in_threadpool(_found, identity, desk, caller)
    return Waiting(**summary(found), **body(found))


@router.delete("/{id}", status_code=HTTPStatus.NO_CONTENT)
async def cancel(id: Id, desk: AtDesk, caller: ByCaller) -> None:  # noqa: A002 (what all call it)
    """Cancel a message. 204: it will not be delivered; 409: too late; 404: unknown."""
    identity = MessageId.parse(id)
    if await _in_spool(identity, desk, caller) and await desk.courier.withdraw(identity):
        return
    await run_in_threadpool(_cancel_in_kafka, identity, desk, caller)


@router.post("/{id}/reschedule")
def change(id: Id, due: Due, desk: AtDesk, caller: ByCaller) -> Accepted:  # noqa: A002 (as above)
    """Give a message another time, and with it another id. Not safe to repeat: 404 then."""
    identity = MessageId.parse(id)
    caller.spend(1)
    _check_seen(identity, desk, caller)
    again = reschedule(
        id, at=instant(due.at), in_=delay(due.in_), settings=desk.settings, clock=desk.clock
    )
    return Accepted(**accepted(again, MessageId.parse(again).due_ms))


@router.post("/{id}/deliver-now")
def deliver_now(id: Id, desk: AtDesk, caller: ByCaller) -> Accepted:  # noqa: A002 (as above)
    """Deliver a message at once, under another id."""
    return change(id, Due(**{"in": "0s"}), desk, caller)


def _records(wanted: Sequence[NewMessage], desk: Desk, caller: Caller) -> list[Outgoing]:
    """All of them, or Invalid."""
    _check_count(len(wanted), desk)
    desk.keys.check(wanted)
    records, errors, now_ms = [], dict[int, InvalidMessage](), desk.clock.now_ms()
    for index, each in enumerate(wanted):
        caller.check(each.topic)
        try:
            records.append(each.record(desk.settings, now_ms, desk.keys.due_ms(each)))
        except InvalidMessage as error:
            errors[index] = error
    if errors:
        raise errors[0] if len(wanted) == 1 else Invalid(errors)
    return records


def _check_count(count: int, desk: Desk) -> None:
    most = desk.settings.api_batch_messages
    if count > most:
        raise InvalidMessage(
            Reason.TOO_LARGE, f"{count} messages are over api_batch_messages ({most}): send less"
        )


def _bound_ms(text: str | None) -> int | None:
    return None if text is None else parse_instant(text)


def _page(messages: Iterator[Found], takes: Callable[[Found], bool], limit: int) -> Page:
    """The next ones, after so many or so much reading; where more follow, the cursor says it."""
    taken = list[Found]()
    last: Found | None = None
    for number, each in enumerate(messages):
        if len(taken) == limit or number == MOST_READ:
            cursor = str(last.id) if last else None
            break
        last = each
        if takes(each):
            taken.append(each)
    else:
        cursor = None
    return Page(messages=[Summary(**summary(each)) for each in taken], cursor=cursor)


def _found(identity: MessageId, desk: Desk, caller: Caller) -> Found:
    """The message, if it waits and the caller may know. Raises TooLate, UnknownMessage."""
    now_ms = desk.clock.now_ms()
    found = desk.reader.find(identity, now_ms)
    if found is None or not caller.allows(found.topic):
        raise not_waiting(identity, desk.settings, now_ms)
    return found


async def _in_spool(identity: MessageId, desk: Desk, caller: Caller) -> Found | None:
    """The message, if it is in the spool and the caller may know."""
    record = await desk.courier.find(identity)
    found = as_found(record) if record else None
    return found if found and caller.allows(found.topic) else None


def _cancel_in_kafka(identity: MessageId, desk: Desk, caller: Caller) -> None:
    if not caller.sees_all:
        # Whose it is must be known before it is cancelled.
        found_soon(lambda: _found(identity, desk, caller), desk.clock)
    cancel_surely(identity, desk.settings, desk.clock)


def _check_seen(identity: MessageId, desk: Desk, caller: Caller) -> None:
    """What a caller may not see is unknown to it."""
    if not caller.sees_all:
        _found(identity, desk, caller)
