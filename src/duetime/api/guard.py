"""Limits that hold for every request: how large its body, and how long until the answer begins.

Also the last place where an error that nobody expected becomes an answer.
"""

import asyncio
import time
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetime.api.problems import RETRY_AFTER_S, fault, problem
from duetime.config import Settings
from duetime.metrics import API_SECONDS

#: Methods with a label of their own; a stranger could send a thousand others.
METHODS = frozenset({"GET", "POST", "DELETE"})


class Guard:
    """ASGI around the app. What is under way in a thread goes on after its time; nobody waits."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._most = settings.api_body_bytes
        self._seconds = settings.api_request_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s, answer = time.monotonic(), Answer(send)
        await self._answered(scope, Body(receive, self._most).receive, answer)
        method = scope["method"] if scope["method"] in METHODS else "other"
        begun_to_answer_s = answer.at_s or time.monotonic()
        API_SECONDS.labels(method, answer.status).observe(begun_to_answer_s - begun_s)

    async def _answered(self, scope: Scope, receive: Receive, answer: "Answer") -> None:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                answer.limit = limit
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            response = problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "timeout",
                f"over api_request_seconds ({self._seconds:g}): try again, with the same id",
                headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
            )
        except Exception as error:  # noqa: BLE001 (whoever asks gets an answer)
            # Here and not as the app's handler: Starlette would raise it again, and log its text.
            response = fault(error)
        else:
            return
        # There is no more to end.
        answer.limit = None
        if not answer.status:
            await response(scope, receive, answer.send)


class Body:
    """Counts what comes in."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._left = most
        self._detail = f"the body is over api_body_bytes ({most}): send less at a time"

    async def receive(self) -> Message:
        """The next part. Raises HTTPException (413)."""
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            # FastAPI lets this one pass through its reading of the body.
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._detail)
        return message


class Answer:
    """Notes what is answered."""

    def __init__(self, send: Send) -> None:
        self._send = send
        #: Nothing was answered yet, or nobody was there any more, while this is 0.
        self.status = 0
        #: When the answer began.
        self.at_s: float | None = None
        #: Ends the request, unless it is answered before.
        self.limit: asyncio.Timeout | None = None

    async def send(self, message: Message) -> None:
        """Pass it on."""
        if message["type"] == "http.response.start":
            self.status, self.at_s = message["status"], time.monotonic()
            if self.limit and not self.limit.expired():
                # Events go on for as long as somebody listens.
                self.limit.reschedule(None)
        await self._send(message)
