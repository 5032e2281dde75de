"""A TCP proxy on the loopback interface that can cut its clients off, as a network does."""

import socket
import socketserver
import threading
from contextlib import suppress
from typing import Self

from duetime.local.process import HOST

#: Bytes that are forwarded at a time.
CHUNK_BYTES = 65_536


class Proxy:
    """Forwards connections to `target`, a port of this machine, while its block lasts.

    `port` is the one to connect to. Bytes that are on their way during a cut arrive once it is
    healed, as by a TCP connection whose packets were lost meanwhile.
    """

    def __init__(self, target: int) -> None:
        self._is_whole = threading.Event()
        self._is_whole.set()
        self._server = _Server(target, self._is_whole)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def cut(self) -> None:
        """Hold every byte, both ways. No connection is closed."""
        self._is_whole.clear()

    def heal(self) -> None:
        """Forward what was held, and all that follows."""
        self._is_whole.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, target: int, is_whole: threading.Event) -> None:
        self.target, self.is_whole = target, is_whole
        super().__init__((HOST, 0), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Forward both ways until both ends have closed. A missing target closes the client."""
        with suppress(OSError), socket.create_connection((HOST, self.server.target)) as target:
            for each in (self.request, target):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=self._forward, args=(target, self.request), daemon=True)
            back.start()
            self._forward(self.request, target)
            back.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self.server.is_whole.wait()
                sink.sendall(data)
        self.server.is_whole.wait()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
