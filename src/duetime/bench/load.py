"""Starting the load generator: a process of its own, which shares no Python with what is measured.

with start_load(settings, plan) as load:
    sent = load.wait()
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Self

from duetime.bench.records import Shape
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.tables import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is to be sent."""

    messages: int
    #: Messages a second; 0 is as fast as it goes.
    rate: float
    #: Each message is due this long after it is sent: evenly from the first to the second, in ms.
    delay_ms: tuple[int, int]
    #: Instead of that, each is due evenly from the first to the second instant, epoch ms.
    due_ms: tuple[int, int] | None = None
    #: The topics that the messages are for, in turn.
    destinations: tuple[str, ...]
    value_bytes: int = 200
    shape: Shape = Shape.NATIVE
    #: The cluster where they are, by the settings' name; None is the one where duetime runs.
    cluster: str | None = None
    #: Beginning of the sender's own ids: another one for each run into the same destinations.
    label: str = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent."""

    #: Messages that Kafka acknowledged.
    sent: int
    #: Messages that it did not.
    failed: int
    #: Messages a second, until the last one was acknowledged.
    rate_reached: float
    #: When the last of them is due, epoch ms.
    last_due_ms: int
    #: Cores that the generator kept busy.
    cores: float
    #: The longest that it fell behind its rate, in ms.
    behind_ms: int


class Load:
    """A load generator that runs. Use it as a context manager: it ends with the block."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def running(self) -> bool:
        """Whether it still sends."""
        return self._process.poll() is None

    def wait(self) -> Sent:
        """Wait until everything is sent. Raises KafkaError if the generator failed."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise KafkaError("the load generator failed, with the words above: is the broker up?")
        return Sent(**json.loads(output))

    def stop(self) -> None:
        """End it at once. Safe to repeat."""
        if self.running:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_load(settings: Settings, plan: LoadPlan) -> Load:
    """Start sending, in a process of its own.

    It is told what to send through a pipe, because everyone on the machine can read a command line.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "duetime.bench.sender"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdin:
        with process.stdin as pipe:
            json.dump({"settings": revealed(settings), "plan": asdict(plan)}, pipe)
        process.stdin = None
    return Load(process)


def revealed(settings: Settings) -> dict[str, Any]:
    """The settings as JSON, passwords readable: only for a process of our own."""
    told = settings.model_dump(mode="json") | _password(settings)
    told["store"] = settings.store.get_secret_value()
    for name, cluster in settings.clusters.items():
        told["clusters"][name] |= _password(cluster)
    return told


def _password(connection: Connection) -> dict[str, str | None]:
    password = connection.sasl_password
    return {"sasl_password": password.get_secret_value() if password else None}
