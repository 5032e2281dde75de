"""A local broker's directory: its data, its configuration, and what its log says.

```
kafka/               Kafka's own: topics, cluster id, and a lock while a broker runs
server.properties    written anew at each start, as is log4j2.xml
broker.log           warnings and errors; broker.out is for what Java itself says
owner.pid            the program that started the broker
```
"""

import base64
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from duetime.errors import SetupError
from duetime.local.disk import require_directory, require_room
from duetime.local.process import STOP_TIMEOUT
from duetime.local.properties import LOG_DIR, render

LOG4J2_XML = Path(__file__).with_name("log4j2.xml")

#: MiB. Kafka that finds no room stops for good; with less than this it would before long.
ROOM_MIB = 500


class BrokerDirectory:
    """One broker's directory, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.log = self.path / "broker.log"
        self.output = self.path / "broker.out"
        self._owner = self.path / "owner.pid"

    def claim(self) -> None:
        """Make sure that a broker can work here, and note that this program starts it.

        Raises `SetupError` if the directory cannot be written to, has no room, or has a broker. One
        whose program has died is ending by itself, and is waited for.
        """
        require_directory(self.path)
        require_room(self.path, ROOM_MIB)
        self._await_release()
        self._owner.write_text(str(os.getpid()))

    @property
    def formatted(self) -> bool:
        """Whether there is a cluster here. Kafka writes this file last."""
        return (self.path / LOG_DIR / "meta.properties").exists()

    def configure(self, properties: Mapping[str, str]) -> None:
        """Write the files that Kafka reads at its start."""
        (self.path / "server.properties").write_text(render(properties))
        shutil.copyfile(LOG4J2_XML, self.path / "log4j2.xml")

    def log_size(self) -> int:
        """Where the next line of the log will begin."""
        return self.log.stat().st_size if self.log.exists() else 0

    def failure(self, log_begins: int) -> SetupError:
        """The error to raise when Kafka has ended, having begun its log at `log_begins`."""
        logged = _first_error(_read(self.log, log_begins))
        why = logged or _last_words(_read(self.output)) or "it did not say why"
        return SetupError(f"the broker ended at its start ({why}): see {self.log} and broker.out")

    def _await_release(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT
        while self._locked():
            if self._owner_lives() or time.monotonic() > deadline:
                raise SetupError(
                    f"another broker runs on {self.path}: "
                    "stop it, or choose another directory with --data"
                )
            time.sleep(0.05)

    def _locked(self) -> bool:
        try:
            with (self.path / LOG_DIR / ".lock").open("r+b") as lock:
                # Java's locks are lockf's, not flock's.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except (BlockingIOError, PermissionError):
            return True
        return False

    def _owner_lives(self) -> bool:
        try:
            os.kill(int(self._owner.read_text()), 0)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return False
        except PermissionError:
            return True
        return True


def new_cluster_id() -> str:
    """As Kafka makes them: 16 random bytes in URL-safe Base64."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _read(path: Path, since: int = 0) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(since)
        return file.read().decode(errors="replace")


def _first_error(text: str) -> str:
    # Later errors are consequences of the first, and an exception says more than its announcement.
    found = re.search(r"^\S+ (?:ERROR|FATAL) +\S+: (.+)(?:\n[\w.$]+: (.+))?", text, re.MULTILINE)
    return (found[2] or found[1]).rstrip(".") if found else ""


def _last_words(text: str) -> str:
    uncaught = re.search(r"^Exception in thread .*?: (.+)$", text, re.MULTILINE)
    return uncaught[1] if uncaught else text.strip().rpartition("\n")[2]
