"""Scheduling over HTTP: clients of `duetime api`, sync and async, which differ in how they wait.

with Client("http://127.0.0.1:8080") as client:
    message = client.schedule("orders", {"order": 17}, in_=timedelta(seconds=10))
    client.cancel(message.id)

What a call does is in `calls`, and what it gives in `answers`. Every call raises KafkaError where
the API or its Kafka does not answer, and Refused where it does not let us.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar, Unpack

import httpx

from duetime.errors import Refused
from duetime.http import calls, steps
from duetime.http.answers import (
    DeadLetter,
    Listed,
    ListedDead,
    ListedRejected,
    Pending,
    RejectedRecord,
    Scheduled,
    Series,
    Slot,
    Waiting,
)
from duetime.http.calls import DeadSelection, Message, Redrive, Selection
from duetime.http.steps import Request, Steps
from duetime.standing import Rescue, Status

__all__ = [
    "AsyncClient",
    "Client",
    "DeadLetter",
    "Listed",
    "ListedDead",
    "ListedRejected",
    "Message",
    "Pending",
    "Refused",
    "RejectedRecord",
    "Rescue",
    "Scheduled",
    "Series",
    "Slot",
    "Status",
    "Waiting",
]

_Answer = TypeVar("_Answer")


class Client:
    """A client that blocks. Thread-safe. Options are httpx's, such as `verify` and `timeout`.

    Without a `timeout`, an answer is waited for longer than the API may take to give it. Raises
    ConfigError for what is no address.
    """

    def __init__(self, base_url: str, *, token: str | None = None, **options: Any) -> None:  # noqa: ANN401 (httpx's own)
        self._http = httpx.Client(
            base_url=steps.checked(base_url),
            headers=steps.authorised(token),
            **{"timeout": steps.TIMEOUT, **options},
        )

    def schedule(self, topic: str, value: object = None, **parts: Unpack[Message]) -> Scheduled:
        """Schedule a message; text and bytes are sent as they are, anything else as JSON.

        Raises InvalidMessage, KafkaError (it may have been taken: the same id may be sent again),
        Refused.
        """
        return self._run(calls.schedule([calls.message(topic, value, parts)]))[0]

    def schedule_many(self, messages: Sequence[tuple[str, object, Message]]) -> list[Scheduled]:
        """Schedule several (topic, value, other parts), all or none; raises as `schedule` does."""
        return self._run(calls.schedule([calls.message(*each) for each in messages]))

    def find(self, id: str, *, retry_ms: int | None = None) -> Waiting:  # noqa: A002 (what all call it)
        """All about a message that waits; one that failed is found by its `due_at_ms`.

        Raises UnknownMessage, TooLate.
        """
        return self._run(calls.find(id, retry_ms))

    def cancel(self, id: str) -> None:  # noqa: A002 (as above)
        """Returns when it is certain not to be delivered. Raises UnknownMessage, TooLate."""
        self._run(calls.cancel(id))

    def reschedule(
        self,
        id: str,  # noqa: A002 (as above)
        *,
        at: datetime | None = None,
        in_: timedelta | None = None,
    ) -> str:
        """Give it another time; returns its new id. Raises UnknownMessage, TooLate."""
        return self._run(calls.reschedule(id, at, in_))

    def deliver_now(self, id: str) -> str:  # noqa: A002 (as above)
        """Deliver it at once; returns its new id. Raises UnknownMessage, TooLate."""
        return self._run(calls.deliver_now(id))

    def messages(self, **which: Unpack[Selection]) -> Iterator[Listed]:
        """The messages that wait, by due time, page by page, without payloads."""
        query: Mapping[str, Any] | None = calls.as_json(which)
        while query is not None:
            page, query = self._run(calls.page(query))
            yield from page

    def pending(self, *, from_: datetime | None = None, to: datetime | None = None) -> Pending:
        """How many wait until when, from offsets alone."""
        return self._run(calls.pending(from_, to))

    def status(self) -> Status:
        """Who leads, who stands by, what is late."""
        return self._run(calls.status())

    def series(self) -> list[Series]:
        """The messages that come again, by name; `schedule` with `cron` makes one."""
        return self._run(calls.all_series())

    def find_series(self, name: str) -> Series:
        """One of them. Raises UnknownMessage."""
        return self._run(calls.find_series(name))

    def pause_series(self, name: str) -> Series:
        """Leave its runs out until it is resumed. Raises UnknownMessage."""
        return self._run(calls.change_series(name, "pause"))

    def resume_series(self, name: str) -> Series:
        """Let it go on, with its next run. Raises UnknownMessage."""
        return self._run(calls.change_series(name, "resume"))

    def stop_series(self, name: str) -> None:
        """End it for good. Raises UnknownMessage, also where a try without an answer did it."""
        self._run(calls.stop_series(name))

    def dead_letters(self, *, limit: int = 50, **which: Unpack[DeadSelection]) -> list[ListedDead]:
        """The latest dead letters, the oldest of them first, without payloads."""
        return self._run(calls.dead_letters(which, limit))

    def dead_letter(self, number: int) -> DeadLetter:
        """All about one. Raises UnknownMessage."""
        return self._run(calls.dead_letter(number))

    def redrive(self, **which: Unpack[Redrive]) -> int:
        """Bring dead letters back, each once; returns how many. Raises InvalidMessage for none."""
        return self._run(calls.redrive(which))

    def rejected_records(self, *, limit: int = 50) -> list[ListedRejected]:
        """The latest records that were refused when they came in, without payloads."""
        return self._run(calls.rejected_records(limit))

    def rejected_record(self, number: int) -> RejectedRecord:
        """All about one. Raises UnknownMessage."""
        return self._run(calls.rejected_record(number))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Steps[_Answer]) -> _Answer:
        given: httpx.Response | httpx.TransportError | None = None
        while True:
            try:
                step = call.send(given)
            except StopIteration as end:
                answer: _Answer = end.value
                return answer
            if isinstance(step, Request):
                given = self._send(step)
            else:
                time.sleep(step)

    def _send(self, request: Request) -> httpx.Response | httpx.TransportError:
        try:
            return self._http.request(
                request.method, request.path, params=request.params, **steps.body(request)
            )
        except httpx.TransportError as error:
            return error


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, base_url: str, *, token: str | None = None, **options: Any) -> None:  # noqa: ANN401 (httpx's own)
        self._http = httpx.AsyncClient(
            base_url=steps.checked(base_url),
            headers=steps.authorised(token),
            **{"timeout": steps.TIMEOUT, **options},
        )

    async def schedule(
        self, topic: str, value: object = None, **parts: Unpack[Message]
    ) -> Scheduled:
        """As `Client.schedule`."""
        return (await self._run(calls.schedule([calls.message(topic, value, parts)])))[0]

    async def schedule_many(
        self, messages: Sequence[tuple[str, object, Message]]
    ) -> list[Scheduled]:
        """As `Client.schedule_many`."""
        return await self._run(calls.schedule([calls.message(*each) for each in messages]))

    async def find(self, id: str, *, retry_ms: int | None = None) -> Waiting:  # noqa: A002 (as above)
        """As `Client.find`."""
        return await self._run(calls.find(id, retry_ms))

    async def cancel(self, id: str) -> None:  # noqa: A002 (as above)
        """As `Client.cancel`."""
        await self._run(calls.cancel(id))

    async def reschedule(
        self,
        id: str,  # noqa: A002 (as above)
        *,
        at: datetime | None = None,
        in_: timedelta | None = None,
    ) -> str:
        """As `Client.reschedule`."""
        return await self._run(calls.reschedule(id, at, in_))

    async def deliver_now(self, id: str) -> str:  # noqa: A002 (as above)
        """As `Client.deliver_now`."""
        return await self._run(calls.deliver_now(id))

    async def messages(self, **which: Unpack[Selection]) -> AsyncIterator[Listed]:
        """As `Client.messages`."""
        query: Mapping[str, Any] | None = calls.as_json(which)
        while query is not None:
            page, query = await self._run(calls.page(query))
            for each in page:
                yield each

    async def pending(
        self, *, from_: datetime | None = None, to: datetime | None = None
    ) -> Pending:
        """As `Client.pending`."""
        return await self._run(calls.pending(from_, to))

    async def status(self) -> Status:
        """As `Client.status`."""
        return await self._run(calls.status())

    async def series(self) -> list[Series]:
        """As `Client.series`."""
        return await self._run(calls.all_series())

    async def find_series(self, name: str) -> Series:
        """As `Client.find_series`."""
        return await self._run(calls.find_series(name))

    async def pause_series(self, name: str) -> Series:
        """As `Client.pause_series`."""
        return await self._run(calls.change_series(name, "pause"))

    async def resume_series(self, name: str) -> Series:
        """As `Client.resume_series`."""
        return await self._run(calls.change_series(name, "resume"))

    async def stop_series(self, name: str) -> None:
        """As `Client.stop_series`."""
        await self._run(calls.stop_series(name))

    async def dead_letters(
        self, *, limit: int = 50, **which: Unpack[DeadSelection]
    ) -> list[ListedDead]:
        """As `Client.dead_letters`."""
        return await self._run(calls.dead_letters(which, limit))

    async def dead_letter(self, number: int) -> DeadLetter:
        """As `Client.dead_letter`."""
        return await self._run(calls.dead_letter(number))

    async def redrive(self, **which: Unpack[Redrive]) -> int:
        """As `Client.redrive`."""
        return await self._run(calls.redrive(which))

    async def rejected_records(self, *, limit: int = 50) -> list[ListedRejected]:
        """As `Client.rejected_records`."""
        return await self._run(calls.rejected_records(limit))

    async def rejected_record(self, number: int) -> RejectedRecord:
        """As `Client.rejected_record`."""
        return await self._run(calls.rejected_record(number))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Steps[_Answer]) -> _Answer:
        given: httpx.Response | httpx.TransportError | None = None
        while True:
            try:
                step = call.send(given)
            except StopIteration as end:
                answer: _Answer = end.value
                return answer
            if isinstance(step, Request):
                given = await self._send(step)
            else:
                await asyncio.sleep(step)

    async def _send(self, request: Request) -> httpx.Response | httpx.TransportError:
        try:
            return await self._http.request(
                request.method, request.path, params=request.params, **steps.body(request)
            )
        except httpx.TransportError as error:
            return error
