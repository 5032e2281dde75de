"""The ASGI app and its server: checks before the start, and limits of connections and headers.

uvicorn limits neither. Its `limit_concurrency` counts complete requests only, and not connections
that never send one.
"""

import asyncio
import gc
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from duetime import __version__
from duetime.api import errors
from duetime.api.dependencies import open_services, open_spool
from duetime.api.errors import BUSY, RETRY_AFTER_S, Api, problem, problems
from duetime.api.routes import dead_letters, health, messages, schedules
from duetime.api.security import middleware
from duetime.core.errors import ConfigError, Reason
from duetime.core.settings import Settings
from duetime.local.process import require_free

log = logging.getLogger(__name__)

#: The number of new objects after which Python looks for garbage. A batch makes thousands that are
#: alive at once, and by default Python looks several times in each. A collection of 50,000 objects
#: stops the process for 30 to 60 ms, each second; of this many, for 3 ms.
GC_THRESHOLD = 5_000

#: How long requests under way may take at the end, in seconds.
SHUTDOWN_TIMEOUT_S = 5

#: The longest request line and headers, in bytes, without the excess of one read from the socket.
MAX_HEAD_BYTES = 64 * 1024

DESCRIPTION = """Kafka messages delivered when they are due.

Errors are problem details (RFC 9457); their `reason` is a fixed word. An `id` of your own makes
scheduling safe to repeat."""

#: The dashboard: static files, which use the HTTP API as any client does.
PAGE = Path(__file__).parent / "dashboard"

#: The page runs its own scripts, uses its own server, and nothing else. A browser that knows
#: trusted types makes no markup of text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # The browser asks each time, and gets 304: another release has other files.
    "Cache-Control": "no-cache",
}


def serve(settings: Settings) -> None:
    """Serve the API until a signal comes; `check` has checked the settings."""
    running = server(settings)
    # What exists now is never garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    log.info("listening url=%s dashboard=%s/", settings.api_url, settings.api_url)
    running.run()


def check(settings: Settings) -> None:
    """Raise ConfigError for unsafe settings, SetupError where the port or the spool is in use."""
    if not settings.api_tokens and not _is_loopback(settings.api_host):
        raise ConfigError(
            f"api_host {settings.api_host} is not this machine alone: add a token to api_tokens, "
            "or listen on 127.0.0.1"
        )
    certificate, key = settings.api_tls_certificate, settings.api_tls_key
    if bool(certificate) != bool(key):
        raise ConfigError("api_tls_certificate and api_tls_key go together: set both, or neither")
    if certificate and key:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"api_tls_certificate and api_tls_key are no pair of PEM files ({error}): correct "
                "them"
            ) from None
    require_free(settings.api_port)
    open_spool(settings).close()


def check_spool(settings: Settings, cluster_id: str) -> None:
    """Raise SetupError where the messages in the spool are for another cluster than this one."""
    open_spool(settings, cluster_id).close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """Ends the event streams before it waits for requests under way: they have no end."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests under way, and end."""
        self._app.state.services.watch.end()
        await super().shutdown(sockets)


def server(settings: Settings) -> uvicorn.Server:
    """Return the server, before it listens."""
    app = create_app(settings)
    certificate, key = settings.api_tls_certificate, settings.api_tls_key
    connect = partial(LimitedConnection, max_connections=settings.api_max_connections)
    config = uvicorn.Config(
        app,
        host=settings.api_host,
        port=settings.api_port,
        http=cast("type[asyncio.Protocol]", connect),
        ssl_certfile=str(certificate) if certificate else None,
        ssl_keyfile=str(key) if key else None,
        # A line for each request would contain ids, and cost more than the request.
        access_log=False,
        log_config=None,
        server_header=False,
        # The address of the client is not used, so no proxy need be trusted for it.
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    return Server(app, config)


def create_app(settings: Settings) -> FastAPI:
    """Return the HTTP API over the Kafka of these settings, for any ASGI server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services(settings) as services:
            app.state.services = services
            yield

    app = Api(
        title="duetime",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        middleware=middleware(settings),
        responses=problems(403, 500, 503),
        # Their pages would load scripts from another site.
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(messages.router)
    app.include_router(schedules.router)
    app.include_router(dead_letters.router)
    app.include_router(dead_letters.rejected_router)
    app.include_router(health.router)
    _install_dashboard(app)
    errors.install(app)
    return app


def _install_dashboard(app: FastAPI) -> None:
    """Serve the page at `/`, and its files below `/dashboard`. They need no token."""
    app.mount("/dashboard", DashboardFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    async def show_dashboard() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=HEADERS)


class DashboardFiles(StaticFiles):
    """The files with their security headers, also on 304."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await super().__call__(scope, receive, send_with_headers)


class LimitedConnection(HttpToolsProtocol):
    """A connection, one of `max_connections`, with headers of at most MAX_HEAD_BYTES."""

    def __init__(self, *args: Any, max_connections: int, **named: Any) -> None:  # noqa: ANN401 (uvicorn's)
        super().__init__(*args, **named)
        self._max_connections = max_connections
        #: The bytes read of the head of a request; None while its body is read.
        self._head_bytes: int | None = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Answer 503, and close, if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            detail = (
                f"{self._max_connections} connections are open already (api_max_connections): "
                "try again later"
            )
            self._close_with(HTTPStatus.SERVICE_UNAVAILABLE, BUSY, detail)

    def data_received(self, data: bytes) -> None:
        """Answer 431, and close, if the head is too long."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            detail = f"the headers of the request are over {MAX_HEAD_BYTES} bytes: send less"
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._close_with(status, Reason.TOO_LARGE, detail)

    def on_headers_complete(self) -> None:
        """Stop counting: the body is next."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Start counting: the next head is next."""
        self._head_bytes = 0
        super().on_message_complete()

    def _close_with(self, status: HTTPStatus, reason: str, detail: str) -> None:
        if self.transport.is_closing():
            return
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        answer = problem(status, reason, detail, headers=headers)
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.transport.close()
