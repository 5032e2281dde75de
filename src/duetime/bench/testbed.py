"""The place of a benchmark, and the measurement of what arrives there.

A testbed is a namespace and a directory of its own, both removed at the end. Topics are read after
a run, so that the reader does not compete with what is measured. Lateness is by the broker's
timestamps. Records of a transaction are stamped before it commits; `committed_arrivals` therefore
reads during the run.
"""

import math
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, Message
from confluent_kafka.admin import AdminClient

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.errors import ConfigError, KafkaError, SetupError
from duetime.core.settings import Settings, load_settings
from duetime.core.threads import PeriodicThread, wait_until
from duetime.core.topics import STAMPED, TopicNames, TopicSpec
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.kafka.range_reader import RangeReader, fetched, headers_of
from duetime.local.broker import REPLICATED, LocalBroker, Node, new_cluster, started
from duetime.local.network import Namespace, Proxy, namespaces
from duetime.local.process import HOST, GuardedProcess, free_port

#: A benchmark's result: figures by name, as `--json` shows them.
Figures = dict[str, Any]

#: The figures of a report that count messages; some are of defects.
DEFECTS = ("lost", "duplicated", "early")
COUNTS = ("sent", "delivered", *DEFECTS)

#: Figures that `summed_up` adds up: counts of messages. Other figures become medians.
SUMMED = (*COUNTS, "failed", "messages", "redelivered", "wrongly_redelivered")

PERCENTS = {"p50": 50, "p99": 99, "p999": 99.9, "max": 100}

#: How long deleting topics may take, and how long a broker that is busy or was just restarted may
#: refuse answers, in seconds.
DELETE_S, RESTART_S = 60.0, 20.0

#: Interval in seconds at which `Appends` polls. The broker stamps what is measured, so this may be
#: coarse, and must not take CPU from what is measured.
POLL_INTERVAL_S = 0.5

#: The name of the second cluster in the settings, if there is one.
OTHER = "other"

#: Broker settings of a temporary broker: a missing topic stays missing.
BROKER = {"auto.create.topics.enable": "false"}

#: How a broker goes away: killed, or cut off from all networks, which needs root on Linux.
Outage = Literal["killed", "cut"]

#: The copies of each record, if there are as many brokers. And the settings: brokers that copy the
#: partitions of the default wheel keep two cores busy, with 300 messages a second.
COPIES = 3
COPIED: dict[str, Any] = {"replication_factor": COPIES, "wheel_slots": 24, "wheel_levels": 3}


@contextmanager
def open_testbed(
    kafka: str | None,
    *,
    brokers: "Brokers | None" = None,
    has_other_cluster: bool = False,
    **others: Any,  # noqa: ANN401 (any setting)
) -> Iterator[Settings]:
    """Settings for a fresh namespace with its topics, on this cluster or on a temporary broker.

    `brokers` are those that the caller started. With `store="redis"`, messages wait in a temporary
    Redis; with `has_other_cluster`, the settings name a second temporary broker OTHER. Raises
    SetupError if a server cannot be started, and KafkaError if the cluster does not answer.
    """
    with scratch() as directory, ExitStack() as stack:
        if others.get("store") == "redis":
            others["store"] = stack.enter_context(_temporary_redis(directory))
        if has_other_cluster:
            other = stack.enter_context(LocalBroker(directory / "other"))
            others["clusters"] = {OTHER: {"bootstrap": other.bootstrap}}
        if kafka is None:
            brokers = brokers or stack.enter_context(open_brokers())
            others |= {"security_protocol": "PLAINTEXT", **brokers.settings}
        namespace = f"bench-{secrets.token_hex(4)}"
        intakes = ("airtel", "countdown", "scheduler")
        settings = load_settings(
            bootstrap=brokers.bootstrap if brokers else kafka,
            namespace=namespace,
            checkpoint=(directory / "checkpoint").as_uri(),
            **{f"{each}_topic": f"{namespace}-{each}" for each in intakes},
            **others,
        )
        if kafka is not None:
            stack.callback(_clean_up, settings)
        create_topics(settings)
        yield settings


class Brokers:
    """Temporary brokers of one cluster. Each may go away: killed, or cut off from all networks."""

    def __init__(self, brokers: Sequence[LocalBroker], places: Sequence[Namespace] = ()) -> None:
        """They are cut off at their places, if they have some, or killed."""
        self._brokers, self._places, self.count = brokers, places, len(brokers)
        self.bootstrap = ",".join(each.bootstrap for each in brokers)
        #: The settings of a pipeline on them.
        self.settings = COPIED if len(brokers) >= COPIES else {}

    def begin_outage(self, number: int) -> None:
        """Take the broker away; numbers count from 0."""
        if self._places:
            self._places[number].cut()
        else:
            self._brokers[number].kill()

    def end_outage(self, number: int) -> None:
        """Let it come back."""
        if self._places:
            self._places[number].heal()
        else:
            self._brokers[number].start()


@contextmanager
def open_brokers(
    count: int = 1, outage: Outage | None = None, doors: Sequence[Proxy] = ()
) -> Iterator[Brokers]:
    """Start brokers of one cluster, with such outages. Raises SetupError.

    Three keep each record three times. Each has the `doors`.
    """
    properties = BROKER | (REPLICATED if count >= COPIES else {})
    with scratch() as directory, ExitStack() as stack:
        node = Node(properties=properties, doors=doors)
        nodes, places = [node] * count, list[Namespace]()
        if outage == "cut":
            places = stack.enter_context(namespaces(count))
            nodes = [replace(node, namespace=each) for each in places]
        brokers = new_cluster(directory, nodes)
        stack.enter_context(started(brokers))
        yield Brokers(brokers, places)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary directory. SIGTERM ends the block as Ctrl-C does: child processes are stopped."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="duetime-bench-") as directory:
            yield Path(directory)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _temporary_redis(directory: Path) -> Iterator[str]:
    """Run a Redis server with an append-only file; yield its URL. Raises SetupError."""
    # Not at the top: the Redis client is an optional dependency.
    from redis import Redis, RedisError  # noqa: PLC0415
    from redis.backoff import ConstantBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    port, log = free_port(), directory / "redis.log"
    url, options = f"redis://{HOST}:{port}/0", f"--bind {HOST} --port {port} --appendonly yes"
    command = ["redis-server", *options.split(), "--save", ""]
    with ExitStack() as stack:
        try:
            server = GuardedProcess.start(command, cwd=directory, env=os.environ, output=log)
            stack.callback(server.stop)
            with Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 100)) as client:
                client.ping()
        except (FileNotFoundError, RedisError) as error:
            advice = "is it installed (Debian: apt install redis-server)?"
            raise SetupError(f"redis-server does not start ({error}): {advice}") from error
        yield url


def _clean_up(settings: Settings) -> None:
    """Remove what the namespace has in Kafka and in another store."""
    # Not at the top: importing Spark takes a second, and `duetime bench --help` needs none.
    from duetime.spark.session import kill_jvm  # noqa: PLC0415 (as it says)

    kill_jvm()
    admin, names = AdminClient(librdkafka_properties(settings)), TopicNames(settings)
    # Kafka would remove the groups after their topics, but later. A missing group is no error.
    groups = [names.release_group, names.index_group, names.progress_group]
    admin.delete_consumer_groups(groups)
    topics = admin.list_topics(timeout=DELETE_S).topics
    found = [topic for topic in topics if topic.startswith(settings.namespace)]
    for future in admin.delete_topics(found, operation_timeout=DELETE_S).values():
        future.result()
    if settings.store_kind == "redis":
        from duetime.stores.redis.scripts import Shards  # noqa: PLC0415 (an optional dependency)

        Shards(settings).clear()


def create_destinations(
    settings: Settings, names: Sequence[str], *, partitions: int = 1, cluster: str | None = None
) -> list[str]:
    """Create topics to deliver to, stamped by the broker; return their full names."""
    topics = [destination(settings, name) for name in names]
    specs = [TopicSpec(name=topic, partitions=partitions, settings=STAMPED) for topic in topics]
    create_topics(settings.at(cluster), specs)
    return topics


def destination(settings: Settings, name: str) -> str:
    """Return the full name of a destination, which is deleted with the testbed."""
    return f"{settings.namespace}-{name}"


def progress(text: str) -> None:
    """Write what the benchmark is doing to stderr: stdout is for the result."""
    sys.stderr.write(f"{text}\n")


class Arrival(NamedTuple):
    """A record of a destination."""

    due_ms: int
    #: Arrival minus due time; negative is early.
    late_ms: int
    #: The same for each copy of a message: hashable.
    id: Any
    #: When its log got it, epoch ms: of a delayed topic.
    appended_ms: int = 0

    @classmethod
    def of(cls, record: Message, at_ms: int) -> "Arrival":
        """Return the arrival of a delivered record at this instant."""
        headers = dict(headers_of(record))
        due_ms = int(headers[H.DUE_AT_MS] or b"")
        return cls(due_ms, at_ms - due_ms, headers[H.DUE_ID])


class Appends:
    """The records appended to the topics since this was made. Topics that are missing have none.

    Methods raise KafkaError if the cluster does not answer for RESTART_S.
    """

    def __init__(self, settings: Settings, topics: Iterable[str]) -> None:
        self._settings, self._offsets = settings, Offsets(settings)
        self._starts = self._offsets.ends(
            each for topic in topics for each in self._offsets.readable_partitions(topic)
        )
        self._made_ms = SystemClock().now_ms()

    def ranges(self) -> list[OffsetRange]:
        """Return the offsets appended so far."""
        deadline_s = time.monotonic() + RESTART_S
        while True:
            try:
                ends = self._offsets.ends(self._starts)
                return [
                    OffsetRange(*each, start, ends[each]) for each, start in self._starts.items()
                ]
            except KafkaError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(POLL_INTERVAL_S)

    def count(self) -> int:
        """Return the number of records, deleted ones included."""
        return sum(each.count for each in self.ranges())

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Wait for `count` records; return whether they arrived, and show it if they did not."""
        if wait_until(lambda: self.count() >= count, timeout_s, POLL_INTERVAL_S):
            return True
        progress(f"{self.count():,} of {count:,} messages arrived within {timeout_s:.0f} s")
        return False

    def records(self) -> Iterator[Message]:
        """Read the records up to the present end."""
        with RangeReader(self._settings) as reader:
            yield from reader.records(self.ranges())

    def arrivals(self) -> list[Arrival]:
        """Read the records as messages. Raises ConfigError if their senders stamped them."""
        arrivals = []
        for record in self.records():
            kind, appended_ms = record.timestamp()
            if kind != TIMESTAMP_LOG_APPEND_TIME:
                raise ConfigError(
                    f"topic {record.topic()} keeps its senders' timestamps, so lateness cannot be "
                    "measured: set message.timestamp.type to LogAppendTime"
                )
            arrivals.append(Arrival.of(record, appended_ms))
        return arrivals

    def report(self, sent: int) -> Figures:
        """Read the records as messages, and compare them with the number of messages sent."""
        return report(self.arrivals(), sent)

    def seconds(self, *, from_first: bool = False) -> float:
        """Return the time from the making of this, or the first record, to the last one.

        There must be one.
        """
        firsts = self._offsets.first_appended_ms(self._starts, self._made_ms).values()
        first_ms = min(each for each in firsts if each >= 0) if from_first else self._made_ms
        return max(max(self._offsets.last_ms(self._starts).values()) - first_ms, 1) / 1_000


@contextmanager
def committed_arrivals(settings: Settings, topics: Sequence[str]) -> Iterator[list[Arrival]]:
    """Collect the arrivals of committed records while the block runs, by this machine's clock.

    The topics may be created after the start.
    """
    arrivals, clock = list[Arrival](), SystemClock()
    consumer = Consumer(
        librdkafka_properties(settings)
        | {"group.id": f"{settings.namespace}.bench-{secrets.token_hex(8)}"}
        | {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
        | {"isolation.level": "read_committed", "topic.metadata.refresh.interval.ms": 500}
    )
    consumer.subscribe(list(topics))

    def read() -> None:
        records, now_ms = fetched(consumer, limit=5_000, wait_s=0.1), clock.now_ms()
        # An error says that the topic does not exist so far.
        arrivals.extend(Arrival.of(each, now_ms) for each in records if not each.error())

    with closing(consumer), PeriodicThread("committed arrivals", 0, read):
        yield arrivals


def report(arrivals: Sequence[Arrival], sent: int) -> Figures:
    """Compare the arrivals with the number of messages sent: COUNTS, and lateness in ms.

    `delivered` counts messages, and `duplicated` the records beyond the first of each.
    """
    delivered, late_ms = len({each.id for each in arrivals}), [each.late_ms for each in arrivals]
    lost, duplicated = max(sent - delivered, 0), len(arrivals) - delivered
    counts = (sent, delivered, lost, duplicated, sum(each < 0 for each in late_ms))
    return {**dict(zip(COUNTS, counts, strict=True)), **percentiles(late_ms)}


def percentiles(
    values_ms: Iterable[float], names: Iterable[str] = tuple(PERCENTS), prefix: str = ""
) -> Figures:
    """Return nearest-rank percentiles of values in ms by name; None if there are no values."""
    ordered = sorted(values_ms)
    # Rounded first: 99.9 % of 1,000 is 999 and not 999.0000000000001.
    ranks = {name: math.ceil(round(len(ordered) * PERCENTS[name] / 100, 6)) for name in names}
    return {
        f"{prefix}{name}_ms": ordered[max(rank, 1) - 1] if ordered else None
        for name, rank in ranks.items()
    }


def timeline_of(arrivals: Iterable[Arrival]) -> list[Figures]:
    """Return the lateness of each second of due time, counted from the first."""
    seconds = defaultdict[int, list[int]](list)
    for each in arrivals:
        seconds[each.due_ms // 1_000].append(each.late_ms)
    return [
        {"second": second - min(seconds), "messages": len(late_ms)}
        | percentiles(late_ms, ("p50", "p99", "max"))
        for second, late_ms in sorted(seconds.items())
    ]


def summed_up(runs: Sequence[Figures]) -> Figures:
    """Combine several runs: sums of SUMMED, medians of other figures.

    `runs` is their number, and `spread` has the minimum and maximum of each median. One run is
    returned as it is.
    """
    if len(runs) == 1:
        return dict(runs[0])
    result, spread = Figures(), {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        if name in SUMMED:
            result[name] = sum(known)
            continue
        result[name] = round(statistics.median(known), 3) if known else None
        if known:
            spread[name] = [min(known), max(known)]
    return result | {"runs": len(runs), "spread": spread}


def rss_mb(*pids: int) -> int:
    """Return the resident memory of these processes, in MB."""
    command = ["ps", "-o", "rss=", "-p", ",".join(map(str, pids))]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(map(int, listing.split())) * 1_024 // 1_000_000
