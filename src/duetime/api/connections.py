"""HTTP connections: a bounded number at a time, each with headers of a bounded size.

uvicorn bounds neither. Its own `limit_concurrency` is looked at when a request is complete, so that
connections which never send one are not counted out.
"""

import asyncio
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from duetime.api.problems import BUSY, RETRY_AFTER_S, problem
from duetime.errors import Reason

#: The longest line and headers of a request, in bytes, and what one read of the socket has more.
HEAD_BYTES = 64 * 1024


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *given: Any, most: int, **named: Any) -> None:  # noqa: ANN401 (uvicorn's)
        super().__init__(*given, **named)
        self._most = most
        #: How much of a request's head has come; None while no head is being read.
        self._head_bytes: int | None = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Hang up with an answer where there are as many as may be."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            many = f"{self._most} connections are open already (api_connections): try again later"
            self._hang_up(HTTPStatus.SERVICE_UNAVAILABLE, BUSY, many)

    def data_received(self, data: bytes) -> None:
        """Count what comes of a head, and hang up where it is too long."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > HEAD_BYTES:
            long = f"the headers of the request are over {HEAD_BYTES} bytes: send less"
            self._hang_up(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, Reason.TOO_LARGE, long)

    def on_headers_complete(self) -> None:
        """The body comes next."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head comes next."""
        self._head_bytes = 0
        super().on_message_complete()

    def _hang_up(self, status: HTTPStatus, reason: str, detail: str) -> None:
        if self.transport.is_closing():
            return
        headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
        answer = problem(status, reason, detail, headers=headers)
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.transport.close()


def connection(most: int) -> type[asyncio.Protocol]:
    """Return a connection factory for uvicorn that allows `most` connections at a time."""

    def made(*given: Any, **named: Any) -> Connection:  # noqa: ANN401 (uvicorn's)
        return Connection(*given, most=most, **named)

    return cast("type[asyncio.Protocol]", made)
