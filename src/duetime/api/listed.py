"""GET /v1/messages: what waits, page by page."""

import time
from collections.abc import Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query

from duetime.api.document import may_be
from duetime.api.examples import ID
from duetime.api.problems import OutOfTime
from duetime.api.requests import From, Limit, To, Topic
from duetime.api.responses import Page, Summary, summary
from duetime.api.route import Route
from duetime.api.services import ByCaller, WithServices
from duetime.clock import parse_instant
from duetime.errors import InvalidMessage, Reason
from duetime.stores import Found
from duetime.stores.selection import Position

router = APIRouter(
    prefix="/v1/messages", tags=["messages"], responses=may_be(401, 422), route_class=Route
)

#: The most that are read for one page.
MOST_READ = 10_000

Key = Annotated[str | None, Query(description="Those with this key, as text.", examples=["17"])]
Failed = Annotated[bool, Query(description="Those alone that are tried again.", examples=[True])]
Cursor = Annotated[str | None, Query(description="As the last page had it.", examples=[ID])]


@router.get("", responses=may_be(422))
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
) -> Page:
    """Messages that wait, by due time, without those that are cancelled.

    Kafka has no index of them, so they are read: 10,000 a request at most. Where few have the key,
    or failed, a page is short although others follow: the cursor goes on. Those for clusters that
    the token does not allow count, too. Those for other topics than `topic`, and those for topics
    that the token does not allow, are read as well, and not counted: where few are left, all that
    waits is read. Where that takes too long (503, `timeout`), ask for less with `from` and `to`.
    """
    found = services.reader.messages(
        services.clock.now_ms(),
        topic=topic,
        # By topic, before anything else of a message is read.
        allows=in_time(
            lambda each: caller.allows(each, None), services.settings.api_request_seconds
        ),
        from_ms=_bound_ms(from_),
        to_ms=_bound_ms(to),
        after=_position(cursor) if cursor else None,
    )
    wanted = None if key is None else key.encode(errors="surrogatepass")

    def takes(each: Found) -> bool:
        if not caller.allows(each.topic, each.cluster):
            return False
        return wanted in (None, each.key) and not (failed and each.retry is None)

    return page_of(found, takes, limit)


def in_time(allows: Callable[[str], bool], most_s: float) -> Callable[[str], bool]:
    """The same for so long. Then nobody waits for the answer: it raises OutOfTime."""
    until_s = time.monotonic() + most_s

    def allows_in_time(topic: str) -> bool:
        if time.monotonic() > until_s:
            raise OutOfTime("what waits takes longer to read than api_request_seconds")
        return allows(topic)

    return allows_in_time


def _bound_ms(text: str | None) -> int | None:
    return None if text is None else parse_instant(text)


def _position(cursor: str) -> Position:
    try:
        return Position.parse(cursor)
    except InvalidMessage as error:
        raise InvalidMessage(
            Reason(error.reason), f"{cursor!r} is no cursor: give the one that the last page had"
        ) from None


def page_of(messages: Iterator[Found], takes: Callable[[Found], bool], limit: int) -> Page:
    """The next ones, after so many or so much reading; where more follow, the cursor says it."""
    taken = list[Summary]()
    last: Position | None = None
    for number, each in enumerate(messages):
        if len(taken) == limit or number == MOST_READ:
            cursor = last.name if last else None
            break
        last = each.position
        if takes(each):
            # Without its payload: a page of those would be large.
            taken.append(Summary(**summary(each)))
    else:
        cursor = None
    return Page(messages=taken, cursor=cursor)
