"""A real Kafka broker of one node, run as a child process on this machine's loopback interface.

Started again on the same directory, it is the same cluster with the same topics. It ignores Ctrl-C
in the terminal, so that whoever started it can stop it last, and it ends if that program dies.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from duetime.errors import SetupError
from duetime.local.jvm import KafkaJava
from duetime.local.ports import free_port, require_free
from duetime.local.process import GuardedProcess
from duetime.local.properties import HOST, server_properties
from duetime.local.storage import BrokerDirectory, new_cluster_id

#: Seconds until it answers. 2 are usual; after a crash it first reads what it had not flushed.
START_TIMEOUT = 180

#: Seconds that one question may take; between two, the process is looked at.
PROBE_TIMEOUT = 0.5

#: Of the client that asks: try often, and say nothing when nobody is there.
PROBE_PROPERTIES: dict[str, str | int | float | bool] = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 50,
    "log_level": 0,
}


class LocalBroker:
    """A broker on `data_dir`, for clients on this machine.

    `port` is where clients find it (None: a free one, the same for this object's whole life);
    `properties` are Kafka broker settings that replace ours, and `cluster_id` is that of a new
    directory, for brokers of one cluster. Not for several threads at once.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int | None = None,
        properties: Mapping[str, str] = MappingProxyType({}),
        cluster_id: str | None = None,
    ) -> None:
        self._directory = BrokerDirectory(data_dir)
        self._port = port or free_port()
        self._properties = dict(properties)
        self._cluster_id = cluster_id or new_cluster_id()
        self._java: KafkaJava | None = None
        self._process: GuardedProcess | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients; it stays the same when the broker is started again."""
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """The broker's process. Raises `RuntimeError` if there is none."""
        if self._process is None:
            raise RuntimeError("the broker is not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives; it may not answer yet."""
        return self._process is not None and self._process.running

    def start(self) -> None:
        """Start the broker and wait until it answers; an empty directory becomes a new cluster.

        Safe to repeat, and a crash between two lines leaves nothing that the next start would not
        repair. Raises `SetupError` if Java, a jar, the port, the directory or room on the disk is
        missing, or if the broker ends at once.
        """
        if self.running:
            return
        self.kill()
        self._directory.claim()
        require_free(self._port)
        self._directory.configure(server_properties(self._port, free_port()) | self._properties)
        self._java = KafkaJava(self._directory)
        if not self._directory.formatted:
            self._java.format(self._cluster_id)
        self._serve(self._java)

    def stop(self) -> None:
        """End the broker, everything on disk; if it takes over 20 s, kill it. Safe to repeat."""
        if self._end() and self._java is not None:
            self._java.ended_well()

    def kill(self) -> None:
        """End the broker as a crash would. Safe to repeat."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _serve(self, java: KafkaJava) -> None:
        log_begins = self._directory.log_size()
        self._process = java.serve()
        try:
            self._wait_until_it_answers(log_begins)
        except BaseException:
            self._end()
            raise

    def _end(self) -> bool:
        """Whether there was a process, and it ended by itself."""
        process, self._process = self._process, None
        return process is not None and process.stop()

    def _wait_until_it_answers(self, log_begins: int) -> None:
        client = AdminClient(PROBE_PROPERTIES | {"bootstrap.servers": self.bootstrap})
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(client):
            if not self.running:
                raise self._directory.failure(log_begins)
            if time.monotonic() > deadline:
                raise SetupError(
                    f"the broker has not answered for {START_TIMEOUT} s: "
                    f"its log is {self._directory.log}"
                )


def _answers(client: AdminClient) -> bool:
    try:
        return bool(client.list_topics(timeout=PROBE_TIMEOUT).brokers)
    except KafkaException:
        return False
