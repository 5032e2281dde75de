"""Child processes that outlive Ctrl-C but not their parent, and what they need: ports and room."""

import errno
import os
import random
import shutil
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from duetime.core.errors import SetupError
from duetime.core.threads import wait_until

#: Host of every listener. By number: `localhost` may mean ::1, where nothing listens.
HOST = "127.0.0.1"

#: Time for a process to end by itself after SIGTERM, in seconds.
STOP_TIMEOUT_S = 20

#: Reads a pipe that only the parent holds: it ends when the parent does, however that dies. (Linux
#: itself could signal the child, but it does so when the *thread* that started the child ends.)
WATCHDOG = f"""
read -r _
kill -TERM "$0" || exit 0
for _ in $(seq {STOP_TIMEOUT_S}); do
    sleep 1
    kill -0 "$0" || exit 0
done
kill -KILL "$0"
"""

#: Below the ports that Linux and macOS give to outgoing connections. Among those, a client that
#: retries while the broker is down may be connected to itself, and keep the broker from its port.
FREE_PORTS = range(20_000, 32_000)

#: The default name of the option that chooses a port, for errors.
OPTION = "--port"

MIB = 1024 * 1024


class GuardedProcess:
    """A running process and the watchdog that ends it if this program dies first."""

    def __init__(self, process: subprocess.Popen[bytes], watchdog: subprocess.Popen[bytes]) -> None:
        self._process, self._watchdog = process, watchdog

    @classmethod
    def start(
        cls, command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str], output: Path
    ) -> Self:
        """Start `command` in its own session, where a terminal's Ctrl-C does not reach it."""
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        watchdog = subprocess.Popen(
            ["sh", "-c", WATCHDOG, str(process.pid)],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process, watchdog)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the process lives."""
        return self._process.poll() is None

    def stop(self) -> bool:
        """Terminate it, and kill it after 20 s. Returns whether it ended by itself."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._dismiss_watchdog()
        return True

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()
        self._dismiss_watchdog()

    def _dismiss_watchdog(self) -> None:
        self._watchdog.kill()
        self._watchdog.communicate()


class LocalServer(ABC):
    """A server as a child process; a subclass starts it. Not thread-safe."""

    def __init__(self, port: int | None = None) -> None:
        self._port = port or free_port()
        self._process: GuardedProcess | None = None

    @property
    def pid(self) -> int:
        """The process id. Raises RuntimeError if the server is not started."""
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the process lives; it may not answer yet."""
        return self._process is not None and self._process.running

    @abstractmethod
    def start(self) -> None:
        """Start the server and wait until it answers. Raises SetupError."""

    def stop(self) -> bool:
        """End the server, its data on disk. Safe to repeat.

        Returns whether there was a process, and it ended by itself.
        """
        process, self._process = self._process, None
        return process is not None and process.stop()

    def kill(self) -> None:
        """End the server as a crash would. Safe to repeat."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_answer(self, answers: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the server answers, or ends; return whether it answers."""

        def state() -> str:
            if answers():
                return "answers"
            return "" if self.running else "ended"

        return wait_until(state, timeout_s, interval_s=0.02) == "answers"


def free_port() -> int:
    """Return a port without a listener, at random: two at once get different ones."""
    # The first is free unless a thousand servers run here.
    for port in random.sample(FREE_PORTS, k=100):
        if _bind_error(port) is None:
            return port
    raise SetupError(f"no free port was found: name one with {OPTION}")


def require_free(port: int, option: str = OPTION) -> None:
    """Raise `SetupError` if a server cannot listen on `port`, which `option` chooses."""
    error, advice = _bind_error(port), f"choose another with {option}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        raise SetupError(f"port {port} is in use by another program: stop it, or {advice}")
    if error is not None:
        raise SetupError(f"port {port} cannot be listened on ({error}): {advice}")


def _bind_error(port: int) -> Exception | None:
    with socket.socket() as server:
        # As Java does: connections of the last run that linger are no hindrance.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
        except (OSError, OverflowError) as error:
            return error
    return None


def require_room(path: Path, mib: int) -> None:
    """Raise `SetupError` if the disk of `path`, which need not exist, has less than `mib` MiB."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free_mib = shutil.disk_usage(existing).free // MIB
    if free_mib < mib:
        raise SetupError(
            f"only {free_mib} MiB are free on the disk of {path}, and {mib} MiB are needed: "
            "make room there, or choose a directory on another disk"
        )


def require_directory(path: Path) -> None:
    """Create `path` where it is missing; raise `SetupError` if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SetupError(
            f"{path} cannot be written to ({error.strerror}): "
            "change its owner, or choose another directory"
        ) from error


def data_home() -> Path:
    """Return the directory of this user's data."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "duetime"
