"""What holds for every request: by way of which pages, how large its body, when it is answered.

Also the last place where an error that nobody expected becomes an answer.
"""

import asyncio
import re
import time
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetime.api.problems import RETRY_AFTER_S, ForeignOrigin, fault, of_error, problem
from duetime.config import Settings
from duetime.metrics import API_SECONDS

#: Methods with a label of their own; a stranger could send a thousand others.
METHODS = frozenset({"GET", "POST", "DELETE"})

#: Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

#: What a browser says of a request that this API's own page, or its user, has made.
OWN_SITE = (b"same-origin", b"none")

#: How this machine calls itself; a port may follow.
LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class Guard:
    """ASGI around the app. What is under way in a thread goes on after its time; nobody waits."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._most = settings.api_body_bytes
        self._seconds = settings.api_request_seconds
        #: Where there are no tokens, whoever reaches this machine's loopback is asked for nothing.
        self._local = not settings.api_tokens

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
            self._check_origin(scope)
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
        except ForeignOrigin as error:
            response = of_error(error)
        except Exception as error:  # noqa: BLE001 (whoever asks gets an answer)
            # Here and not as the app's handler: Starlette would raise it again, and log its text.
            response = fault(error)
        else:
            return
        # There is no more to end.
        answer.limit = None
        if not answer.status:
            await response(scope, receive, answer.send)

    def _check_origin(self, scope: Scope) -> None:
        """Raise ForeignOrigin for what a page of somebody else's may have had a browser send."""
        headers = dict(scope["headers"])
        site = headers.get(b"sec-fetch-site", b"none")
        if scope["method"] not in SAFE and site not in OWN_SITE:
            raise ForeignOrigin("another site's page has sent this: use the dashboard")
        host = headers.get(b"host", b"").decode("latin-1")
        # A name that leads here by somebody's DNS is a foreign page's own site to a browser.
        if self._local and host and not LOOPBACK.fullmatch(host):
            raise ForeignOrigin(
                f"host {host!r} is not this machine's loopback: ask 127.0.0.1, or add a token to "
                "api_tokens"
            )


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
