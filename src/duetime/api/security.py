"""Checks of every request, as ASGI middleware: time, body, origin and token; and the callers.

The token is checked before anything of the body is read.
"""

import asyncio
import hmac
import math
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus

from anyio import CancelScope
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duetime.api.errors import (
    RETRY_AFTER_S,
    ForeignOrigin,
    RateLimited,
    TopicNotAllowed,
    Unauthorised,
    of_error,
    of_unexpected,
    problem,
)
from duetime.core.errors import DuetimeError
from duetime.core.metrics import API_SECONDS
from duetime.core.setting_types import ApiToken, fits
from duetime.core.settings import Settings

#: Methods with a label of their own in metrics; a client could send a thousand others.
METHODS = frozenset({"GET", "POST", "DELETE"})

#: Methods that change nothing.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

#: What a browser sends as Sec-Fetch-Site for the API's own page, and for its user.
OWN_SITES = ("same-origin", "none")

#: The names of this machine's loopback; a port may follow.
LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)

#: The paths that need a token, where there are tokens: all but the dashboard's and the probes'.
TOKEN_PATHS = re.compile(r"/v1/.*|/metrics", re.DOTALL)

#: The key of the caller in the ASGI scope.
CALLER = "duetime.caller"

#: How long a token may save up messages that it did not send, in seconds.
BURST_S = 1.0

#: The part of a body that does not count, in bytes: small requests are answered while large ones
#: take all the memory. There are as many of these parts as connections.
FREE_BYTES = 64 * 1024


def middleware(settings: Settings) -> list[Middleware]:
    """Return the checks, outermost first.

    Starlette's TrustedHostMiddleware and body limit answer in plain text, and know no problems.
    """
    return [
        Middleware(TimeLimitMiddleware, timeout_s=settings.api_request_timeout_seconds),
        Middleware(ProblemMiddleware),
        Middleware(OriginMiddleware, is_open=not settings.api_tokens),
        Middleware(TokenMiddleware, callers=Callers(settings.api_tokens)),
        Middleware(
            BodyMiddleware,
            max_bytes=settings.api_max_body_bytes,
            memory_bytes=settings.bodies_bytes,
        ),
    ]


@dataclass
class TimeLimitMiddleware:
    """Answers 503 `timeout` after a time, and measures all requests.

    Work in a thread continues after that. It keeps one of the threads until it ends, so that no
    more are started than there may be.
    """

    app: ASGIApp
    timeout_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await TimedAnswer(scope, receive, send, self.timeout_s).run(self.app)


class TimedAnswer:
    """The answer of the app, or the problem that it took too long."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, timeout_s: float) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._timeout_s, self._started_s = timeout_s, time.monotonic()
        #: 0 until an answer starts.
        self._status = 0
        # anyio's, not asyncio's: waiting for a thread is cancelled, the work in it is not.
        self._cancel_scope = CancelScope()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._time_out)
        #: Set where the answer of the app comes too late.
        self._timeout_answer: asyncio.Task[None] | None = None

    async def run(self, app: ASGIApp) -> None:
        """Let the app answer, or answer after the timeout unless its answer has started."""
        try:
            with self._cancel_scope:
                await app(self._scope, self._receive, self._send_in_time)
        except asyncio.CancelledError:
            # The end of the server is not that of a request that was answered.
            if not self._timeout_answer:
                raise
        finally:
            self._timer.cancel()
            if self._timeout_answer:
                await self._timeout_answer
            if not self._status:
                self._measure()

    def _time_out(self) -> None:
        response = problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "timeout",
            f"over api_request_timeout_seconds ({self._timeout_s:g}): try again, with the same id",
            headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
        )
        answer = response(self._scope, self._receive, self._pass_on)
        self._timeout_answer = asyncio.create_task(answer)
        self._cancel_scope.cancel()

    async def _send_in_time(self, message: Message) -> None:
        if not self._timeout_answer:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._measure()
            # A stream of events takes as long as its reader listens.
            self._timer.cancel()
        await self._send(message)

    def _measure(self) -> None:
        method = self._scope["method"]
        label = method if method in METHODS else "other"
        API_SECONDS.labels(label, self._status).observe(time.monotonic() - self._started_s)


@dataclass
class ProblemMiddleware:
    """Answers errors with problems: those of the checks below, and unexpected ones.

    It is not the app's handler for Exception: Starlette would raise and log the error again.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_started = False

        async def note_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, note_start)
        except Exception as error:  # noqa: BLE001 (every request gets an answer)
            response = of_error(error) if isinstance(error, DuetimeError) else of_unexpected(error)
            if not has_started:
                await response(scope, receive, send)


@dataclass
class OriginMiddleware:
    """Refuses what the page of another site may have made a browser send."""

    app: ASGIApp
    #: Without tokens, everything that reaches this machine's loopback is allowed.
    is_open: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise ForeignOrigin, or answer one request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if scope["method"] not in SAFE_METHODS and self._is_foreign(headers):
                raise ForeignOrigin("another site's page has sent this: use the dashboard")
            host = headers.get("host", "")
            # To a browser, a name that resolves to this machine is the own site of a foreign page.
            if self.is_open and host and not LOOPBACK.fullmatch(host):
                raise ForeignOrigin(
                    f"host {host!r} is not this machine's loopback: ask 127.0.0.1, or add a token "
                    "to api_tokens"
                )
        await self.app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            return site not in OWN_SITES
        # Older browsers send `Origin` only. No page adds a token without a preflight, and where
        # there are tokens, a proxy may change the host.
        if origin is None or not self.is_open:
            return False
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()


@dataclass
class TokenMiddleware:
    """Checks the bearer token of a request, and notes its caller in the scope."""

    app: ASGIApp
    callers: "Callers"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise Unauthorised, or answer one request."""
        if scope["type"] == "http" and TOKEN_PATHS.fullmatch(scope["path"]):
            authorization = Headers(scope=scope).get("authorization", "")
            scheme, _, token = authorization.partition(" ")
            scope[CALLER] = self.callers.find(token.strip() if scheme.lower() == "bearer" else "")
        await self.app(scope, receive, send)


class BodyMiddleware:
    """Limits the body of each request, and the memory of all bodies.

    A body reserves what was read of it, and nothing in advance: a long `Content-Length` reserves
    nothing. If the next part finds no memory, the request is refused at once, and releases its
    memory. So no body waits for another.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, memory_bytes: int) -> None:
        self._app, self._max_bytes, self._memory_bytes = app, max_bytes, memory_bytes
        self._free_bytes = memory_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; reading its body raises HTTPException (413, 503)."""
        read_bytes = reserved_bytes = 0

        async def receive_within_limits() -> Message:
            nonlocal read_bytes, reserved_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            # FastAPI passes an HTTPException on from its reading of the body.
            if read_bytes > self._max_bytes:
                detail = (
                    f"the body is over api_max_body_bytes ({self._max_bytes}): send less at a time"
                )
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
            more_bytes = max(0, read_bytes - FREE_BYTES) - reserved_bytes
            self._reserve(more_bytes)
            reserved_bytes += more_bytes
            return message

        try:
            await self._app(scope, receive_within_limits, send)
        finally:
            self._free_bytes += reserved_bytes

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes > self._free_bytes:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the bodies of other requests take all the room (api_max_buffered_bytes, "
                f"{self._memory_bytes}): try again later",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
        self._free_bytes -= size_bytes


@dataclass(kw_only=True)
class RateLimit:
    """A number of messages a second, of which a second's worth may go at once. Thread-safe."""

    per_second: float
    _free: float = field(init=False)
    _at_s: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._free = self._max_free

    @property
    def _max_free(self) -> float:
        # A rate of one message in ten seconds must allow that one.
        return max(1.0, self.per_second * BURST_S)

    def take(self, count: int, now_s: float) -> None:
        """Take messages. Raises RateLimited, and takes none then.

        More than can ever be saved up may go when all is saved up, and is paid off afterwards.
        """
        with self._lock:
            saved_up = (now_s - self._at_s) * self.per_second
            free = min(self._max_free, self._free + saved_up)
            needed = min(float(count), self._max_free)
            if free < needed:
                wait_s = math.ceil((needed - free) / self.per_second)
                raise RateLimited(
                    f"the token may send {self.per_second:g} messages a second", wait_s
                )
            self._free, self._at_s = free - count, now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The name of a token, for logs, with the patterns of its topics and clusters."""

    name: str
    topics: tuple[str, ...] = ("*",)
    #: The other clusters on which these topics are allowed, too.
    clusters: tuple[str, ...] = ("*",)
    rate: RateLimit | None = None

    @property
    def sees_all(self) -> bool:
        """True if every topic of every cluster is allowed."""
        return "*" in self.topics and "*" in self.clusters

    def allows(self, topic: str, cluster: str | None) -> bool:
        """Return whether the topic is allowed; without a cluster, on this cluster."""
        return fits(topic, self.topics) and (cluster is None or fits(cluster, self.clusters))

    def check(self, topic: str, cluster: str | None) -> None:
        """Raise TopicNotAllowed unless the topic is allowed."""
        if not self.allows(topic, cluster):
            there = "" if cluster is None else f" on cluster {cluster!r}"
            raise TopicNotAllowed(f"the token {self.name} is not for topic {topic!r}{there}")

    def spend(self, messages: int) -> None:
        """Count messages that it sends. Raises RateLimited."""
        if self.rate:
            self.rate.take(messages, time.monotonic())


class Callers:
    """The callers by the hashes of their tokens."""

    def __init__(self, tokens: Mapping[str, ApiToken]) -> None:
        self._callers = [
            (_hash(each.token.get_secret_value()), _caller(name, each))
            for name, each in tokens.items()
        ]

    def find(self, token: str) -> Caller:
        """Return the caller with this token. Raises Unauthorised."""
        if not self._callers:
            return Caller(name="anybody")
        hashed, found = _hash(token), None
        for known, caller in self._callers:
            # All are compared, so that the time tells nothing about the right one.
            if hmac.compare_digest(known, hashed):
                found = caller
        if found is None:
            raise Unauthorised("no such token: send it as `Authorization: Bearer TOKEN`")
        return found


def _caller(name: str, token: ApiToken) -> Caller:
    rate = RateLimit(per_second=token.rate) if token.rate else None
    if token.topics is None and not token.clusters:
        return Caller(name=name, rate=rate)
    topics = ("*",) if token.topics is None else token.topics
    return Caller(name=name, topics=topics, clusters=token.clusters, rate=rate)


def _hash(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()
