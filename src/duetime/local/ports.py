"""Ports of this machine's loopback interface."""

import errno
import random
import socket

from duetime.errors import SetupError
from duetime.local.properties import HOST

#: Below the ports that Linux and macOS give to outgoing connections. Among those, a client that
#: retries while the broker is down may be connected to itself, and keep the broker from its port.
FREE_PORTS = range(20_000, 32_000)

#: Ports tried before giving up; the first is free unless a thousand servers run here.
ATTEMPTS = 100

#: What it is chosen with, unless somebody says otherwise.
OPTION = "--port"


def free_port() -> int:
    """A port that nobody listens on, at random: two that ask at once get different ones."""
    for port in random.sample(FREE_PORTS, k=ATTEMPTS):
        if _trouble(port) is None:
            return port
    raise SetupError(f"no free port was found: name one with {OPTION}")


def require_free(port: int, option: str = OPTION) -> None:
    """Raise `SetupError` if a server cannot listen on `port`, which `option` chooses."""
    trouble, advice = _trouble(port), f"choose another with {option}"
    if trouble is None:
        return
    if isinstance(trouble, OSError) and trouble.errno == errno.EADDRINUSE:
        raise SetupError(f"port {port} is in use by another program: stop it, or {advice}")
    raise SetupError(f"port {port} cannot be listened on ({trouble}): {advice}")


def _trouble(port: int) -> Exception | None:
    """What keeps a server from listening on `port` now."""
    with socket.socket() as server:
        # As Java does: connections of the last run that linger are no hindrance.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
        except (OSError, OverflowError) as error:
            return error
    return None
