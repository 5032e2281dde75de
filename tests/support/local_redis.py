"""A Redis server as a child process. Started again on its directory, it has the same data."""

import os
import shutil
from types import MappingProxyType

from redis import Redis
from redis.exceptions import RedisError

from duetime.core.errors import SetupError
from duetime.local.process import HOST, GuardedProcess, LocalServer

#: Timeout of the first answer, in seconds: its file is read before.
START_TIMEOUT_S = 60


class LocalRedis(LocalServer):
    """On a free port that stays the same. `properties` of redis.conf replace ours."""

    def __init__(self, data_dir, properties=MappingProxyType({})):
        super().__init__()
        self._directory = data_dir
        ours = {"bind": HOST, "appendonly": "yes", "save": "", "daemonize": "no"}
        self._properties = {**ours, **properties, "port": str(self._port), "dir": str(data_dir)}

    @property
    def url(self):
        """The value of the setting `store`."""
        return f"redis://{HOST}:{self._port}/0"

    def start(self):
        program = shutil.which("redis-server")
        if program is None:
            raise SetupError("redis-server is missing (Debian: apt install redis-server)")
        self._directory.mkdir(parents=True, exist_ok=True)
        options = [
            part for name, value in self._properties.items() for part in (f"--{name}", value)
        ]
        log = self._directory / "redis.log"
        self._process = GuardedProcess.start(
            [program, *options], cwd=self._directory, env=os.environ, output=log
        )
        password = self._properties.get("requirepass")
        with Redis(host=HOST, port=self._port, password=password) as client:
            if not self._await_answer(lambda: _answers(client), START_TIMEOUT_S):
                ended = "does not answer" if self.running else "ended at once"
                self.kill()
                raise SetupError(f"redis-server {ended}: its log is {log}")


def _answers(client):
    try:
        return client.ping()
    except RedisError:
        return False
