"""`duetime bench api`: how many messages a second the HTTP API takes, and how long a request takes.

The server is a process of its own, as in production, and this process is its load: a thread a
connection, each with one request under way. Clients, server and Kafka share the machine.
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from duetime.bench.crash import environment
from duetime.bench.report import percentile
from duetime.bench.say import say
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.local.ports import free_port

#: Requests under way at a time: with half as many the server waits for Kafka's acknowledgements.
CONNECTIONS = 32

#: Messages in a batch.
BATCH = 100

#: How long the server may take to start, in seconds.
START_S = 30.0

#: How long to wait before looking again, in seconds.
LOOK_S = 0.05

JSON = {"Content-Type": "application/json"}

#: How long each is sent before anything is measured, in seconds: Kafka's JVM is slow at first.
WARM_UP_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the API took."""

    single_per_s: int
    batch_messages_per_s: int
    #: Of single messages, at half the rate above.
    p50_ms: float | None
    p99_ms: float | None
    #: Requests that were not answered with 201, of all.
    failed: int

    def figures(self) -> dict[str, int | float | None]:
        """The result as it is shown."""
        return asdict(self)


def api(settings: Settings, seconds: float, value_bytes: int) -> Served:
    """Load a server with single messages, with batches, and with half as many single ones."""
    with TemporaryDirectory(prefix="duetime-api-") as directory:
        own = {"api_port": free_port(), "api_spool": Path(directory) / "spool.db"}
        served = settings.model_copy(update=own)
        with _server(served):
            single, batch = _body(1, value_bytes), _body(BATCH, value_bytes)
            for each in (single, batch):
                Load(served.api_port, each).run(WARM_UP_S)
            say(f"{CONNECTIONS} connections send single messages")
            singles = Load(served.api_port, single).run(seconds)
            say(f"they send batches of {BATCH}")
            batches = Load(served.api_port, batch).run(seconds)
            rate = len(singles.took_us) / seconds
            say(f"they send {rate / 2:.0f} single messages a second")
            paced = Load(served.api_port, single, rate / 2).run(seconds)
    took_us = sorted(paced.took_us)
    return Served(
        single_per_s=round(rate),
        batch_messages_per_s=round(len(batches.took_us) * BATCH / seconds),
        p50_ms=_ms(percentile(took_us, 50)),
        p99_ms=_ms(percentile(took_us, 99)),
        failed=sum(each.failed for each in (singles, batches, paced)),
    )


class Load:
    """One load: as fast as it goes, or at a rate. Late requests count from when they were due."""

    def __init__(self, port: int, body: bytes, rate: float | None = None) -> None:
        self._port = port
        self._body = body
        self._rate = rate
        self._turns = count()
        #: How long each took that was taken.
        self.took_us: list[int] = []
        self.failed = 0

    def run(self, seconds: float) -> "Load":
        """Send for so long."""
        begun_s = time.monotonic()
        end_s = begun_s + seconds
        threads = [
            threading.Thread(target=self._send, args=(begun_s, end_s)) for _ in range(CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self

    def _send(self, begun_s: float, end_s: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while (due_s := self._due_s(begun_s)) < end_s:
            time.sleep(max(0.0, due_s - time.monotonic()))
            connection.request("POST", "/v1/messages", self._body, JSON)
            response = connection.getresponse()
            response.read()
            if response.status != http.HTTPStatus.CREATED:
                # No throughput: a refusal takes no time.
                self.failed += 1
                continue
            self.took_us.append(int((time.monotonic() - due_s) * 1_000_000))
        connection.close()

    def _due_s(self, begun_s: float) -> float:
        if self._rate is None:
            return time.monotonic()
        return begun_s + next(self._turns) / self._rate


def _body(messages: int, value_bytes: int) -> bytes:
    one = {"topic": "bench", "key": "k", "value": "x" * value_bytes, "in": "1d"}
    return json.dumps(one if messages == 1 else [one] * messages).encode()


def _ms(micros: int | None) -> float | None:
    return None if micros is None else micros / 1_000


@contextmanager
def _server(settings: Settings) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "duetime", "api"],
        env=os.environ | environment(settings),
        stdout=sys.stderr,
    )
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(settings.api_port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise KafkaError("duetime api did not start: its words are above")
            time.sleep(LOOK_S)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()
