"""Scheduling over HTTP: clients of `duetime api`, sync and async, which differ in how they wait.

with Client("http://127.0.0.1:8080") as client:
    message = client.schedule("orders", {"order": 17}, in_=timedelta(seconds=10))
    client.cancel(message.id)

What a call does is in `steps`. Every call raises KafkaError where the API or its Kafka does not
answer, and Refused where it does not let us.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar, Unpack

import httpx

from duetime.http import steps
from duetime.http.steps import (
    DeadSelection,
    Message,
    Redrive,
    Refused,
    Request,
    Scheduled,
    Selection,
    Steps,
)

__all__ = ["AsyncClient", "Client", "Message", "Refused", "Scheduled"]

_Answer = TypeVar("_Answer")


class Client:
    """A client that blocks. Thread-safe. Options are httpx's, such as `verify` and `timeout`."""

    def __init__(self, base_url: str, *, token: str | None = None, **options: Any) -> None:  # noqa: ANN401 (httpx's own)
        self._http = httpx.Client(base_url=base_url, headers=steps.authorised(token), **options)

    def schedule(self, topic: str, value: object = None, **parts: Unpack[Message]) -> Scheduled:
        """Schedule a message; text and bytes are sent as they are, anything else as JSON.

        Raises InvalidMessage, KafkaError (it may have been taken: the same id may be sent again),
        Refused.
        """
        return self._run(steps.schedule([steps.message(topic, value, parts)]))[0]

    def schedule_many(self, messages: Sequence[tuple[str, object, Message]]) -> list[Scheduled]:
        """Schedule several (topic, value, other parts), all or none; raises as `schedule` does."""
        return self._run(steps.schedule([steps.message(*each) for each in messages]))

    def find(self, id: str) -> dict[str, Any]:  # noqa: A002 (what all call it)
        """A message that waits, as the API shows it. Raises UnknownMessage, TooLate."""
        return self._run(steps.told(Request(method="GET", path=f"/v1/messages/{id}")))

    def cancel(self, id: str) -> None:  # noqa: A002 (as above)
        """Returns when it is certain not to be delivered. Raises UnknownMessage, TooLate."""
        self._run(steps.tried(Request(method="DELETE", path=f"/v1/messages/{id}")))

    def reschedule(
        self,
        id: str,  # noqa: A002 (as above)
        *,
        at: datetime | None = None,
        in_: timedelta | None = None,
    ) -> str:
        """Give it another time; returns its new id. Raises UnknownMessage, TooLate."""
        return self._run(steps.reschedule(id, at, in_))

    def messages(self, **which: Unpack[Selection]) -> Iterator[dict[str, Any]]:
        """The messages that wait, by due time, page by page, without payloads."""
        query: Mapping[str, Any] | None = steps.as_json(which)
        while query is not None:
            page, query = self._run(steps.page(query))
            yield from page

    def pending(
        self, *, from_: datetime | None = None, to: datetime | None = None
    ) -> dict[str, Any]:
        """How many wait until when, from offsets alone."""
        query = steps.as_json({"from": from_, "to": to})
        return self._run(steps.told(Request(method="GET", path="/v1/pending", params=query)))

    def status(self) -> dict[str, Any]:
        """Who leads, who stands by, what is late."""
        return self._run(steps.told(Request(method="GET", path="/v1/status")))

    def dead_letters(
        self, *, limit: int = 50, **which: Unpack[DeadSelection]
    ) -> list[dict[str, Any]]:
        """The latest dead letters, the oldest of them first, without payloads."""
        return self._run(steps.dead_letters(which, limit))

    def dead_letter(self, number: int) -> dict[str, Any]:
        """All about one. Raises UnknownMessage."""
        return self._run(steps.told(Request(method="GET", path=f"/v1/dead/{number}")))

    def redrive(self, **which: Unpack[Redrive]) -> int:
        """Bring dead letters back, each once; returns how many. Raises InvalidMessage for none."""
        return self._run(steps.redrive(which))

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
                request.method, request.path, json=request.json, params=request.params
            )
        except httpx.TransportError as error:
            return error


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, base_url: str, *, token: str | None = None, **options: Any) -> None:  # noqa: ANN401 (httpx's own)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=steps.authorised(token), **options
        )

    async def schedule(
        self, topic: str, value: object = None, **parts: Unpack[Message]
    ) -> Scheduled:
        """As `Client.schedule`."""
        return (await self._run(steps.schedule([steps.message(topic, value, parts)])))[0]

    async def schedule_many(
        self, messages: Sequence[tuple[str, object, Message]]
    ) -> list[Scheduled]:
        """As `Client.schedule_many`."""
        return await self._run(steps.schedule([steps.message(*each) for each in messages]))

    async def find(self, id: str) -> dict[str, Any]:  # noqa: A002 (what all call it)
        """As `Client.find`."""
        return await self._run(steps.told(Request(method="GET", path=f"/v1/messages/{id}")))

    async def cancel(self, id: str) -> None:  # noqa: A002 (as above)
        """As `Client.cancel`."""
        await self._run(steps.tried(Request(method="DELETE", path=f"/v1/messages/{id}")))

    async def reschedule(
        self,
        id: str,  # noqa: A002 (as above)
        *,
        at: datetime | None = None,
        in_: timedelta | None = None,
    ) -> str:
        """As `Client.reschedule`."""
        return await self._run(steps.reschedule(id, at, in_))

    async def messages(self, **which: Unpack[Selection]) -> AsyncIterator[dict[str, Any]]:
        """As `Client.messages`."""
        query: Mapping[str, Any] | None = steps.as_json(which)
        while query is not None:
            page, query = await self._run(steps.page(query))
            for each in page:
                yield each

    async def pending(
        self, *, from_: datetime | None = None, to: datetime | None = None
    ) -> dict[str, Any]:
        """As `Client.pending`."""
        query = steps.as_json({"from": from_, "to": to})
        return await self._run(steps.told(Request(method="GET", path="/v1/pending", params=query)))

    async def status(self) -> dict[str, Any]:
        """As `Client.status`."""
        return await self._run(steps.told(Request(method="GET", path="/v1/status")))

    async def dead_letters(
        self, *, limit: int = 50, **which: Unpack[DeadSelection]
    ) -> list[dict[str, Any]]:
        """As `Client.dead_letters`."""
        return await self._run(steps.dead_letters(which, limit))

    async def dead_letter(self, number: int) -> dict[str, Any]:
        """As `Client.dead_letter`."""
        return await self._run(steps.told(Request(method="GET", path=f"/v1/dead/{number}")))

    async def redrive(self, **which: Unpack[Redrive]) -> int:
        """As `Client.redrive`."""
        return await self._run(steps.redrive(which))

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
                request.method, request.path, json=request.json, params=request.params
            )
        except httpx.TransportError as error:
            return error
