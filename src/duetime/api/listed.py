"""GET /v1/messages: what waits, page by page."""

from collections.abc import Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query

from duetime.api.desk import AtDesk, ByCaller
from duetime.api.document import may_be
from duetime.api.examples import ID
from duetime.api.models import Page, Summary, summary
from duetime.api.wanted import From, Limit, To, Topic
from duetime.clock import parse_instant
from duetime.message import MessageId
from duetime.stores import Found
from duetime.stores.listing import after, place

router = APIRouter(prefix="/v1/messages", tags=["messages"], responses=may_be(401))

#: The most that are read for one page.
MOST_READ = 10_000

Key = Annotated[str | None, Query(description="Those with this key, as text.", examples=["17"])]
Failed = Annotated[bool, Query(description="Those alone that are tried again.", examples=[True])]
Cursor = Annotated[str | None, Query(description="As the last page had it.", examples=[ID])]


@router.get("", responses=may_be(422))
def list_messages(  # noqa: PLR0913 (a parameter each)
    desk: AtDesk,
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
    or failed, a page is short although others follow: the cursor goes on. Those for other topics
    than `topic` are read, too, and not counted: where it has few, all that waits is read. Where
    that takes too long (503, `timeout`), ask for less with `from` and `to`.
    """
    last = MessageId.parse(cursor) if cursor else None
    from_ms = last.due_ms if last else _bound_ms(from_)
    found = desk.reader.messages(
        desk.clock.now_ms(), topic=topic, from_ms=from_ms, to_ms=_bound_ms(to)
    )
    wanted = None if key is None else key.encode(errors="surrogatepass")

    def takes(each: Found) -> bool:
        is_meant = wanted in (None, each.key) and not (failed and each.retry is None)
        return is_meant and caller.allows(each.topic)

    return _page(after(found, last) if last else found, takes, limit)


def _bound_ms(text: str | None) -> int | None:
    return None if text is None else parse_instant(text)


def _page(messages: Iterator[Found], takes: Callable[[Found], bool], limit: int) -> Page:
    """The next ones, after so many or so much reading; where more follow, the cursor says it."""
    taken = list[Found]()
    last: Found | None = None
    for number, each in enumerate(messages):
        if len(taken) == limit or number == MOST_READ:
            cursor = str(place(last)) if last else None
            break
        last = each
        if takes(each):
            taken.append(each)
    else:
        cursor = None
    return Page(messages=[Summary(**summary(each)) for each in taken], cursor=cursor)
