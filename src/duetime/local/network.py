"""Networks that can be cut: a TCP proxy for clients, and namespaces for the brokers of a cluster.

A proxy stands before one server, and needs no rights. A namespace holds a server and everything
that it sends and receives; it needs root on Linux, and `ip` of iproute2.
"""

import secrets
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from duetime.core.errors import SetupError
from duetime.local.process import HOST

#: Bytes that are forwarded at a time.
CHUNK_BYTES = 65_536

#: The addresses of namespaces, which no other network has: those for benchmarks (RFC 2544).
SUBNETS = "198.18"


class Proxy:
    """Forwards connections to `target`, a port of this machine, while its block lasts.

    `port` is the one to connect to. Bytes that are on their way during a cut arrive once it is
    healed, as by a TCP connection whose packets were lost meanwhile.
    """

    def __init__(self, target: int) -> None:
        self._is_whole = threading.Event()
        self._is_whole.set()
        self.target = target
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


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace with one address, which this machine and its neighbours reach."""

    name: str
    address: str
    #: Its end of the cable, on this machine.
    link: str

    @property
    def prefix(self) -> list[str]:
        """The beginning of a command that runs in it."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Lose every packet, both ways. Raises SetupError."""
        _ip(f"link set {self.link} down")

    def heal(self) -> None:
        """Carry packets again. Raises SetupError."""
        _ip(f"link set {self.link} up")


def host(namespace: Namespace | None) -> str:
    """Return the address of servers there; None is this machine's own network."""
    return namespace.address if namespace else HOST


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """Namespaces on one switch, while the block lasts. Raises SetupError without the rights."""
    bridge, subnet = f"dt{secrets.token_hex(3)}", f"{SUBNETS}.{secrets.randbelow(256)}"
    found = [
        Namespace(f"{bridge}-{number}", f"{subnet}.{number}", f"{bridge}v{number}")
        for number in range(1, count + 1)
    ]
    with ExitStack() as stack:
        _ip(f"link add {bridge} type bridge")
        stack.callback(_ip, f"link del {bridge}")
        _ip(f"addr add {subnet}.254/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for each in found:
            _ip(f"netns add {each.name}")
            # The cable goes with it.
            stack.callback(_ip, f"netns del {each.name}")
            _ip(f"link add {each.link} type veth peer name eth0 netns {each.name}")
            _ip(f"link set {each.link} master {bridge} up")
            _ip(f"-n {each.name} addr add {each.address}/24 dev eth0")
            for link in ("eth0", "lo"):
                _ip(f"-n {each.name} link set {link} up")
        yield found


def _ip(arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)  # noqa: S607 (has its place on PATH)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "").strip() or error
        advice = "a network of its own needs root on Linux, and iproute2"
        raise SetupError(f"ip {arguments} failed ({reason}): {advice}") from error
