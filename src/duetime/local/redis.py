"""A real Redis server, run as a child process on this machine's loopback interface.

For tests and benchmarks. Started again on the same directory, it has what it had: it keeps an
append-only file. It ends if the program that started it dies.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from duetime.errors import SetupError
from duetime.local.ports import free_port
from duetime.local.process import GuardedProcess
from duetime.local.properties import HOST

#: Seconds until it answers; what it has kept is read first.
START_TIMEOUT = 60

#: Seconds between two questions.
ASK_AGAIN = 0.02

PROPERTIES = {"bind": HOST, "appendonly": "yes", "save": "", "daemonize": "no"}


class LocalRedis:
    """A server on `data_dir`, on a free port that stays the same.

    `properties` are of redis.conf and replace ours. Not for several threads at once.
    """

    def __init__(
        self, data_dir: Path, properties: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._directory = data_dir
        self._port = free_port()
        self._properties = PROPERTIES | dict(properties)
        self._process: GuardedProcess | None = None

    @property
    def url(self) -> str:
        """As the setting `store` has it."""
        return f"redis://{HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process. Raises RuntimeError if there is none."""
        if self._process is None:
            raise RuntimeError("the server is not started")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Raises SetupError."""
        program = shutil.which("redis-server")
        if program is None:
            raise SetupError(
                "redis-server is missing: install it (Debian: apt install redis-server)"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        options = {**self._properties, "port": str(self._port), "dir": str(self._directory)}
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        log = self._directory / "redis.log"
        self._process = GuardedProcess.start(
            [program, *given], cwd=self._directory, env=os.environ, output=log
        )
        self._wait_until_it_answers(log)

    def stop(self) -> None:
        """End it, everything on disk. Safe to repeat."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """End it as a crash would. Safe to repeat."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_it_answers(self, log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        with Redis(host=HOST, port=self._port, password=self._properties.get("requirepass")) as one:
            while not _answers(one):
                if self._process is None or not self._process.running:
                    raise SetupError(f"redis-server ended at once: its log is {log}")
                if time.monotonic() > deadline:
                    raise SetupError(f"redis-server does not answer: its log is {log}")
                time.sleep(ASK_AGAIN)


def _answers(client: "Redis") -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False
