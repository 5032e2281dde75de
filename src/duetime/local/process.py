"""A child process that outlives Ctrl-C in the terminal, but never its parent."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

#: Seconds that a process has to end by itself once it is told to.
STOP_TIMEOUT = 20

#: Reads a pipe that only the parent holds: it ends when the parent does, however that dies. (Linux
#: itself could signal the child, but it does so when the *thread* that started the child ends.)
WATCHDOG = f"""
read -r _
kill -TERM "$0" || exit 0
for _ in $(seq {STOP_TIMEOUT}); do
    sleep 1
    kill -0 "$0" || exit 0
done
kill -KILL "$0"
"""


class GuardedProcess:
    """A running process and the watchdog that ends it if this program dies first."""

    def __init__(self, process: subprocess.Popen[bytes], watchdog: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._watchdog = watchdog

    @classmethod
    def start(
        cls, command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str], output: Path
    ) -> Self:
        """Start `command` in a session of its own, where a terminal's Ctrl-C does not reach it."""
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
        return cls(process, _watchdog(process.pid))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def stop(self) -> bool:
        """Ask it to end, and wait; after 20 s, kill it. Returns whether it ended by itself."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
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


def _watchdog(pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", WATCHDOG, str(pid)],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
