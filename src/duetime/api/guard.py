"""What holds for every request: who asks, by way of which pages, how much, when it is answered.

A token is looked at before anything of the body is read. Also the last place where an error that
nobody expected becomes an answer.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from http import HTTPStatus

from anyio import CancelScope
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetime.api.body import Body, Room
from duetime.api.problems import (
    RETRY_AFTER_S,
    ForeignOrigin,
    Unauthorised,
    fault,
    of_error,
    problem,
)
from duetime.api.tokens import CALLER, reader_of_tokens, token_of
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


#: What needs a token, where there are any: all but the page for people, and what the process says
#: of itself.
GUARDED = re.compile(r"/v1/.*|/metrics", re.DOTALL)


class Guard:
    """ASGI around the app.

    What is under way in a thread goes on after its time. Nobody waits for that, but it is one of so
    many threads until it ends: no more are begun than there may be.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._most = settings.api_body_bytes
        self._room = Room(settings.bodies_bytes)
        self._seconds = settings.api_request_seconds
        #: Where there are no tokens, whoever reaches this machine's loopback is asked for nothing.
        self._local = not settings.api_tokens
        self._who = reader_of_tokens(settings.api_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = Body(receive, self._most, self._room)
        receive, answer = body.receive, Answer(scope, receive, send)
        try:
            # Of anyio, not of asyncio: what waits for a thread ends, and what is in one does not.
            with CancelScope() as limit:
                answer.limit(self._seconds, limit)
                await self._answered(scope, receive, answer)
        except asyncio.CancelledError:
            # The server ends; nobody waits for this one.
            if not answer.is_given_up:
                raise
        finally:
            await answer.end()
            body.free()

    async def _answered(self, scope: Scope, receive: Receive, answer: "Answer") -> None:
        try:
            headers = dict(scope["headers"])
            self._check_origin(scope, headers)
            self._identify(scope, headers)
            await self._app(scope, receive, answer.send)
        except (ForeignOrigin, Unauthorised) as error:
            response = of_error(error)
        except Exception as error:  # noqa: BLE001 (whoever asks gets an answer)
            # Here and not as the app's handler: Starlette would raise it again, and log its text.
            response = fault(error)
        else:
            return
        if not answer.status:
            await response(scope, receive, answer.send)

    def _identify(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Note who asks. Raises Unauthorised."""
        if GUARDED.fullmatch(scope["path"]):
            scope[CALLER] = self._who(token_of(headers.get(b"authorization", b"")))

    def _check_origin(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise ForeignOrigin for what a page of somebody else's may have had a browser send."""
        if scope["method"] not in SAFE and self._is_foreign(headers):
            raise ForeignOrigin("another site's page has sent this: use the dashboard")
        host = headers.get(b"host", b"").decode("latin-1")
        # A name that leads here by somebody's DNS is a foreign page's own site to a browser.
        if self._local and host and not LOOPBACK.fullmatch(host):
            raise ForeignOrigin(
                f"host {host!r} is not this machine's loopback: ask 127.0.0.1, or add a token to "
                "api_tokens"
            )

    def _is_foreign(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a browser says so; older ones do by `Origin` alone."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is not None:
            return site not in OWN_SITE
        if origin is None or not self._local:
            # No page adds somebody's token without asking first; and a proxy may change the host.
            return False
        # What is nobody's is "null".
        return origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()


class Answer:
    """The one that is given, or that there is none in time. Measures how long that takes."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi = scope, receive, self._pass_on
        self._send = send
        self._begun_s = time.monotonic()
        #: Nothing was answered yet, or nobody was there any more, while this is 0.
        self.status = 0
        self._timer: asyncio.TimerHandle | None = None
        #: Tells that it took too long.
        self._instead: asyncio.Task[None] | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for what the app answers."""
        return self._instead is not None

    def limit(self, seconds: float, limit: CancelScope) -> None:
        """Give the request up then, unless its answer has begun."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._give_up, seconds, limit)

    async def send(self, message: Message) -> None:
        """Pass on what the app answers."""
        if not self.is_given_up:
            await self._pass_on(message)

    async def end(self) -> None:
        """The app has ended."""
        if self._timer:
            self._timer.cancel()
        if self._instead:
            await self._instead
        if not self.status:
            self._measure()

    def _give_up(self, seconds: float, limit: CancelScope) -> None:
        response = problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "timeout",
            f"over api_request_seconds ({seconds:g}): try again, with the same id",
            headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
        )
        self._instead = asyncio.create_task(response(*self._asgi))
        limit.cancel()

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._measure()
            # Events go on for as long as somebody listens.
            if self._timer:
                self._timer.cancel()
        await self._send(message)

    def _measure(self) -> None:
        method = self._asgi[0]["method"]
        label = method if method in METHODS else "other"
        API_SECONDS.labels(label, self.status).observe(time.monotonic() - self._begun_s)
