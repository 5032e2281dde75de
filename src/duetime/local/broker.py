"""Kafka brokers, one or a cluster of several, as child processes of this program.

A broker that is started again on the same directory is the same cluster with the same topics. It
ignores Ctrl-C in the terminal, so that the program that started it can stop it last, and it ends if
that program dies. Its directory:

    kafka/               Kafka's data: topics, cluster id, and a lock while a broker runs
    server.properties    written at each start, as is log4j2.xml
    broker.log           warnings and errors; broker.out is Java's own output
    owner.pid            the program that started the broker
"""

import base64
import fcntl
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from duetime.core.errors import SetupError
from duetime.core.threads import wait_until
from duetime.local.jars import ClassArchive, broker_jars, find_java
from duetime.local.network import Namespace, Proxy, host
from duetime.local.process import (
    HOST,
    STOP_TIMEOUT_S,
    GuardedProcess,
    LocalServer,
    free_port,
    require_directory,
    require_free,
    require_room,
)

#: MiB. Kafka that finds no room stops for good; with less than this it would before long.
ROOM_MIB = 500

#: Timeout of the first answer, in seconds. 2 are usual; after a crash the broker first reads the
#: data that it had not flushed.
START_TIMEOUT_S = 180

#: Timeout of one question, in seconds; between two, the process is checked.
PROBE_TIMEOUT_S = 0.5

#: Timeout of formatting, in seconds; half a second is usual.
FORMAT_TIMEOUT_S = 120

#: A client that tries often, and logs nothing while no broker is there.
PROBE_PROPERTIES: dict[str, str | int | float | bool] = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 50,
    "log_level": 0,
}

#: Java's warnings go to stderr, and its notes nowhere.
JAVA_OPTIONS = (
    "-Djava.awt.headless=true",
    "-Dlog4j2.configurationFile=log4j2.xml",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
)

BROKER_OPTIONS = (
    # Records do not stay in the heap; the page cache needs the memory more.
    "-Xms1g",
    "-Xmx1g",
    # Short and rare pauses. With G1 in 512 MB, 12 to 20 ms every 3 s at 2,000 messages/s, which
    # made the p99 of lateness 13 ms, and not 8.
    "-XX:+UseParallelGC",
    "-XX:NewRatio=1",
    "-XX:-UseAdaptiveSizePolicy",
    # A broker out of memory would hang: let it end, so that it is noticed.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:ErrorFile=java-crash.log",
)

#: Formatting is over before a better compiler or collector would pay.
FORMAT_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

LOG4J2_XML = Path(__file__).with_name("log4j2.xml")

#: Kafka's data directory, relative to the broker's working directory: Kafka would split a path at
#: its commas.
DATA_DIR = "kafka"

SETTINGS = {
    # Internal topics have three replicas and up to 50 partitions by default. Here is one broker,
    # and each partition costs start time.
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # A first trial can send to a topic without creating it ...
    "auto.create.topics.enable": "true",
    # ... and gets its messages in one order.
    "num.partitions": "1",
    # A group's first member need not wait for others: there are none.
    "group.initial.rebalance.delay.ms": "0",
    # Progress is kept as committed offsets. The default drops them after a week without a commit,
    # but a far slot waits for years, and a laptop may be off for a month.
    "offsets.retention.minutes": "2147483647",
    # Only whole segments are ever freed, so a segment bounds what each partition holds in vain.
    "log.segment.bytes": str(64 * 1024 * 1024),
    # The default reserves 10 MiB twice for each of hundreds of partitions; a segment of this size
    # fills less than 0.3 MiB.
    "log.index.size.max.bytes": str(1024 * 1024),
    # Give room back a minute after it is settled instead of five.
    "log.retention.check.interval.ms": "60000",
    # The default takes 128 MiB of heap at start, to clean logs of millions of keys.
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    # After a kill, the restarted broker is turned away until its old session has run out. With 3 s,
    # a healthy broker was fenced on a machine that stood still for a moment.
    "broker.session.timeout.ms": "9000",
    "broker.heartbeat.interval.ms": "500",
    # One node is broker and controller.
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "log.dirs": DATA_DIR,
}

#: Broker settings of a cluster that keeps everything three times, and can do without one of three.
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}


class LocalBroker(LocalServer):
    """A broker on `data_dir`, for clients on this machine.

    `port` is the clients' (None: a free one, the same for this object's whole life); `properties`
    of Kafka brokers replace ours; `cluster_id` is that of a new directory, for brokers of one
    cluster; in a `namespace` it listens at an address of its own.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int | None = None,
        properties: Mapping[str, str] = MappingProxyType({}),
        cluster_id: str | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        super().__init__(port)
        self._namespace = namespace
        self._directory = BrokerDirectory(data_dir)
        self._properties = dict(properties)
        self._cluster_id = cluster_id or new_cluster_id()
        self._draft = self._directory.path / "classes.jsa"
        self._archive: ClassArchive | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients; it stays the same when the broker is started again."""
        return f"{host(self._namespace)}:{self._port}"

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
        self._directory.configure(_server_properties(self._port) | self._properties)
        java = find_java()
        # In the environment, because 46 paths would make every listing of processes unreadable.
        env = os.environ | {"CLASSPATH": os.pathsep.join(map(str, broker_jars()))}
        self._archive = ClassArchive(java)
        if not self._directory.formatted:
            self._format(java, env, self._archive.read_options())
        options = (*JAVA_OPTIONS, *BROKER_OPTIONS, *self._archive.options(self._draft))
        prefix = self._namespace.prefix if self._namespace else []
        log_begins = self._directory.log_size()
        self._process = GuardedProcess.start(
            [*prefix, java, *options, "kafka.Kafka", "server.properties"],
            cwd=self._directory.path,
            env=env,
            output=self._directory.output,
        )
        try:
            self._wait_until_it_answers(log_begins)
        except BaseException:
            super().stop()
            raise

    def stop(self) -> bool:
        """End the broker, its data on disk; if it takes over 20 s, kill it. Safe to repeat."""
        ended = super().stop()
        if ended and self._archive is not None:
            self._archive.keep(self._draft)
        return ended

    def _format(self, java: Path, env: Mapping[str, str], archive: list[str]) -> None:
        """Make the directory one of this cluster. Safe to repeat after a crash in the middle."""
        cluster = f"--cluster-id={self._cluster_id}"
        command = ["kafka.tools.StorageTool", "format", cluster, "-c", "server.properties"]
        log_begins = self._directory.log_size()
        try:
            with self._directory.output.open("wb") as output:
                subprocess.run(
                    [java, *JAVA_OPTIONS, *FORMAT_OPTIONS, *archive, *command],
                    cwd=self._directory.path,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=FORMAT_TIMEOUT_S,
                    check=True,
                )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise self._directory.failure(log_begins) from error

    def _wait_until_it_answers(self, log_begins: int) -> None:
        client = AdminClient(PROBE_PROPERTIES | {"bootstrap.servers": self.bootstrap})
        if self._await_answer(lambda: _answers(client), START_TIMEOUT_S):
            return
        if not self.running:
            raise self._directory.failure(log_begins)
        raise SetupError(
            f"the broker has not answered for {START_TIMEOUT_S} s: its log is {self._directory.log}"
        )


def _answers(client: AdminClient) -> bool:
    try:
        return bool(client.list_topics(timeout=PROBE_TIMEOUT_S).brokers)
    except KafkaException:
        return False


def _server_properties(port: int) -> dict[str, str]:
    # The quorum is named here rather than recorded in the data, so both ports may change from start
    # to start.
    controller = f"{HOST}:{free_port()}"
    return SETTINGS | {
        "controller.quorum.voters": f"1@{controller}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{controller}",
    }


def new_cluster_id() -> str:
    """Return a cluster id as Kafka makes them: 16 random bytes in URL-safe Base64."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def render(properties: Mapping[str, str]) -> str:
    r"""Return Java's properties format: Latin-1, with other characters as \uXXXX, as in JSON."""
    lines = (f"{name}={json.dumps(value)[1:-1]}" for name, value in sorted(properties.items()))
    return "\n".join(lines) + "\n"


class BrokerDirectory:
    """The directory of one broker."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.log = self.path / "broker.log"
        self.output = self.path / "broker.out"
        self._owner = self.path / "owner.pid"

    @property
    def formatted(self) -> bool:
        """True if there is a cluster here. Kafka writes this file last."""
        return (self.path / DATA_DIR / "meta.properties").exists()

    def claim(self) -> None:
        """Make sure that a broker can work here, and note that this program starts it.

        Raises `SetupError` if the directory cannot be written to, has no room, or has a broker. A
        broker whose program has died is ending by itself, and is waited for.
        """
        require_directory(self.path)
        require_room(self.path, ROOM_MIB)
        wait_until(lambda: not self._locked() or self._owner_lives(), STOP_TIMEOUT_S)
        if self._locked():
            raise SetupError(
                f"another broker runs on {self.path}: "
                "stop it, or choose another directory with --data"
            )
        self._owner.write_text(str(os.getpid()))

    def configure(self, properties: Mapping[str, str]) -> None:
        """Write the files that Kafka reads at its start."""
        (self.path / "server.properties").write_text(render(properties))
        shutil.copyfile(LOG4J2_XML, self.path / "log4j2.xml")

    def log_size(self) -> int:
        """Return where the next line of the log will begin."""
        return self.log.stat().st_size if self.log.exists() else 0

    def failure(self, log_begins: int) -> SetupError:
        """Return the error for a Kafka that has ended, and began its log at `log_begins`."""
        why = _first_error(_read(self.log, log_begins)) or _last_words(_read(self.output))
        why = why or "it did not say why"
        return SetupError(f"the broker ended at its start ({why}): see {self.log} and broker.out")

    def _locked(self) -> bool:
        try:
            with (self.path / DATA_DIR / ".lock").open("r+b") as lock:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a cluster."""

    #: Broker settings in place of ours.
    properties: Mapping[str, str] = field(default_factory=dict)
    #: Whether it is one of the controllers, besides a broker.
    is_controller: bool = True
    #: Further listeners: clients reach each by a proxy before it.
    doors: Sequence[Proxy] = ()
    #: Where it runs; None is this machine's own network.
    namespace: Namespace | None = None


def new_cluster(directory: Path, nodes: Sequence[Node]) -> list[LocalBroker]:
    """Return the brokers of a new cluster, not started; node ids count from 1."""
    cluster_id, numbered = new_cluster_id(), dict(enumerate(nodes, 1))
    controllers = {
        number: f"{host(node.namespace)}:{free_port()}"
        for number, node in numbered.items()
        if node.is_controller
    }
    voters = ",".join(f"{number}@{address}" for number, address in controllers.items())

    def broker(number: int, node: Node) -> LocalBroker:
        port, names = free_port(), [f"DOOR{door}" for door in range(len(node.doors))]
        own, roles = f"PLAINTEXT://{host(node.namespace)}:{port}", "broker"
        listeners, advertised = [own], [own]
        for name, door in zip(names, node.doors, strict=True):
            listeners.append(f"{name}://{HOST}:{door.target}")
            advertised.append(f"{name}://{HOST}:{door.port}")
        if node.is_controller:
            listeners.append(f"CONTROLLER://{controllers[number]}")
            roles = "broker,controller"
        every = ("PLAINTEXT", "CONTROLLER", *names)
        properties = {
            "node.id": str(number),
            "process.roles": roles,
            "controller.quorum.voters": voters,
            "listeners": ",".join(listeners),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": ",".join(f"{each}:PLAINTEXT" for each in every),
        } | dict(node.properties)
        path = directory / f"broker-{number}"
        return LocalBroker(path, port, properties, cluster_id, node.namespace)

    return [broker(number, node) for number, node in numbered.items()]


@contextmanager
def started(brokers: Sequence[LocalBroker]) -> Iterator[None]:
    """Run the brokers while the block lasts, then kill them. Raises SetupError."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for each in brokers:
            stack.callback(each.kill)
        # Together: none answers before a majority of the controllers does.
        list(pool.map(LocalBroker.start, brokers))
        yield
