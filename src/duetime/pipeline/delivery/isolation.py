"""Isolation: a destination that has failed a sink gets its records with a report for each.

A sink fails as a whole on one record that a broker refuses, with every message of that window or
query. Errors that are known before (`delivery_errors`) never reach the sink. Any other refusal (a
schema that the broker validates, a policy, a setting that has just changed) fails a sink once.
`FailedDestinations` then finds the topics that had errors and marks them as isolated. The failed
work is repeated, and its records for these topics go to `duetime.isolated`, or to another topic for
each other cluster.

The isolated query of a cluster is a micro-batch query over its topic: records for isolated
destinations, and retries to this cluster. `IsolatedSender` sends them in small requests, and the
records of a request that is refused one by one, each with its own report. A refused record fails
with the broker's reason, and all others are delivered. A record that is not acknowledged in time
may have been written all the same: its destination is read back once that is certain. Meanwhile
nothing more is sent there, because records for other destinations wait behind.

They are sent from the driver. A client in a task would know nothing of the lease, and send what it
holds when another process leads.

Source: KafkaProducer's sender metrics (`record-error-total`).
"""

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, Message, Producer
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.core import metrics
from duetime.core.errors import KafkaError, LeaderPaused, Reason
from duetime.core.settings import Settings
from duetime.kafka.leadership import check_lease
from duetime.kafka.producer import delivery_properties, enqueue, is_fatal
from duetime.pipeline.delivery.destinations import TopicMetadataCache
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import error_struct, message_columns, parsed
from duetime.pipeline.recovery.deduplicator import (
    Deduplicator,
    ReplayDetector,
    ScanRange,
    planned_scan_range,
)
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.catalyst import PlanCache
from duetime.spark.columns import delivered_headers, record_bytes
from duetime.spark.kafka_io import client_id, write_batch
from duetime.spark.task_jvms import ProducerMetrics

log = logging.getLogger(__name__)

#: The most records of a batch: all of them pass through Python, and wait for each other.
BATCH = 5_000

#: The most bytes of a batch that the driver holds at a time, unless one record is larger.
CHUNK_BYTES = 16 * 1024 * 1024

#: The most records that are sent at a time, in one request for each partition. If a broker refuses
#: a request, it has written none of its records.
REQUEST = 100

#: The interval of checks of the lease while records are not acknowledged, in seconds.
LEASE_INTERVAL_S = 0.1

#: How long a record is tried, in seconds: shorter than at a sink, since others wait behind it.
ISOLATED_TIMEOUT_S = 10.0

#: The pause after a record that was not answered, in seconds: nothing of it is on its way then.
ISOLATED_PAUSE_S = ISOLATED_TIMEOUT_S + 1.0

#: The detail of a record that no broker has acknowledged or refused.
NO_ANSWER = "no answer"

#: Answers of a broker after which the record may have been written.
UNKNOWN_OUTCOMES = (BrokerError.REQUEST_TIMED_OUT, BrokerError.NOT_ENOUGH_REPLICAS_AFTER_APPEND)

#: Errors of the client for a record that it has never sent, or that was in a request with one that
#: the broker has refused: then none of the request is written (KIP-467).
NOT_WRITTEN = (
    BrokerError._INVALID_DIFFERENT_RECORD,  # noqa: SLF001 (their public names)
    BrokerError._UNKNOWN_TOPIC,  # noqa: SLF001
    BrokerError._UNKNOWN_PARTITION,  # noqa: SLF001
    BrokerError.MSG_SIZE_TOO_LARGE,
)

#: Where Kafka's producer names a topic in an error, before it has sent anything to it. Source:
#: ProducerBatch, KafkaProducer.waitOnMetadata, TopicAuthorizationException.
TOPIC_IN_ERROR = (
    re.compile(r"Expiring \d+ record\(s\) for ([a-zA-Z0-9._-]+)-\d+:"),
    re.compile(r"Topic ([a-zA-Z0-9._-]+) not present in metadata"),
    re.compile(r"Not authorized to access topics: \[([a-zA-Z0-9._-]+)\]"),
)


class FailedDestinations:
    """Finds the destinations that failed a sink, and isolates them. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        destinations: Mapping[str | None, TopicMetadataCache],
        sends: ProducerMetrics,
    ) -> None:
        """`destinations` are by the name of the cluster; None is this one."""
        self._destinations = destinations
        self._sends = sends
        self._internal = f"{settings.namespace}."
        #: The prefix of the client ids of a cluster's producers.
        self._clusters = {client_id(settings.at(name), ""): name for name in settings.clusters}
        self._lock = threading.Lock()
        self._errors: dict[tuple[str, str], int] = {}
        #: Topics that have failed a sink, by the client id of its producer, until `blame` is called
        #: for it. A topic may fail several sinks at once, and the first call finds the errors of
        #: all.
        self._failed: dict[str, set[str]] = defaultdict(set)

    def blame(self, error: BaseException, client: str) -> set[str]:
        """Isolate the destinations that have failed; return those that failed this client's sink.

        Where internal topics failed too, it is an outage of brokers and no destination's fault:
        none is isolated, since a backlog of all would take hours on that way.
        """
        try:
            with self._lock:
                found = self._by_metrics() | {(client, topic) for topic in named_topics(str(error))}
                self._isolate(found)
                return self._failed.pop(client, set())
        except Exception:
            # The failed work is repeated anyway.
            log.exception("could not find which destination has failed")
            return set()

    def await_quiet(self, client_id: str, timeout_s: float) -> bool:
        """See `ProducerMetrics.await_quiet`."""
        return self._sends.await_quiet(client_id, timeout_s)

    def _by_metrics(self) -> set[tuple[str, str]]:
        """Return the client ids and topics with errors since the last call."""
        errors = self._sends.errors()
        before, self._errors = self._errors, errors
        return {key for key, count in errors.items() if count > before.get(key, 0)}

    def _cluster(self, client_id: str) -> str | None:
        known = (name for prefix, name in self._clusters.items() if client_id.startswith(prefix))
        return next(known, None)

    def _isolate(self, found: set[tuple[str, str]]) -> None:
        """Isolate topics, and note them for their clients, unless it is an outage of brokers."""
        by_cluster = {(client, self._cluster(client), topic) for client, topic in found}
        if any(
            not cluster and topic.startswith(self._internal) for _, cluster, topic in by_cluster
        ):
            self._failed.clear()
            return
        for client, cluster, topic in by_cluster:
            destinations = self._destinations.get(cluster)
            # The topic that an error names need not exist.
            if destinations is None or not destinations.knows(topic):
                continue
            # A cluster that is away fails all of its topics.
            if cluster and not destinations.is_reached:
                continue
            destinations.isolate(topic)
            self._failed[client].add(topic)


def named_topics(error: str) -> set[str]:
    """Return the topics that the text of an error names."""
    return {topic for pattern in TOPIC_IN_ERROR for topic in pattern.findall(error)}


class Undelivered(NamedTuple):
    """A record that was not delivered, by its offset in `duetime.isolated`."""

    offset: int
    detail: str
    #: Whether it may have been written.
    is_unknown: bool


class IsolatedSender:
    """Sends a cluster's batches, with reports. Executors read and check; the driver sends."""

    def __init__(  # noqa: PLR0913 (what all queries share)
        self,
        spark: SparkSession,
        settings: Settings,
        destinations: TopicMetadataCache,
        written: DeliveryLog,
        started_ms: int,
        *,
        name: str,
        sender: "RecordSender",
    ) -> None:
        """`destinations` and `written` are the cluster's.

        `name` is the query's, and its producer's; it began at `started_ms`.
        """
        self._name = name
        self._settings, self._router, self._sender = settings, Router(settings), sender
        self._destinations, self._written = destinations, written
        self._cluster = written.cluster
        self._replays = ReplayDetector(written, started_ms)
        self._scan_range = planned_scan_range(spark)
        self._planned = PlanCache(spark, lambda batch: self._checked(parsed(batch)))

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Send the batch. A crash between two lines repeats it, without what is written by then."""
        scope = self._scan_range(batch)
        if scope is None:
            return
        if replay := self._replays.check(number, lambda: scope):
            left = replay.deduplicator.drop_moved_on(parsed(batch), replay.scan_range)
            checked = self._checked(left).localCheckpoint()
        else:
            checked = self._planned(batch).localCheckpoint()
        is_here = F.col("cluster").eqNullSafe(F.lit(self._cluster))
        is_sent = F.col("error").isNull() & is_here
        # A record for another cluster goes to the topic of that one.
        self._return(checked.where(~is_sent))
        topics = scope.destinations.get(self._cluster)
        if topics:
            started_ms = int(time.time() * 1_000)
            sent = ScanRange(since_ms=started_ms, destinations={self._cluster: topics})
            self._deliver(checked.where(is_sent), sent)

    def _checked(self, records: DataFrame) -> DataFrame:
        return self._router.checked(records, message_columns())

    def _deliver(self, rows: DataFrame, scope: ScanRange) -> None:
        """Send the rows; those that are not delivered go to the retry topic."""
        started_s = time.monotonic()
        self._destinations.require_reached(started_s)
        undelivered, count = self._send(rows)
        if refused := [row for row in undelivered if not row.is_unknown]:
            self._fail(rows, refused, Reason.REFUSED_BY_BROKER)
        if unknown := [row for row in undelivered if row.is_unknown]:
            self._destinations.require_reached(started_s)
            # A batch that is held up here holds up others: the next one is not sent there.
            for topic in self._topics(rows, unknown):
                self._destinations.hold(topic)
            time.sleep(ISOLATED_PAUSE_S)
            missing = Deduplicator(self._written).drop_moved_on(rows, scope)
            self._fail(missing, unknown, Reason.NOT_ACKNOWLEDGED)
        for topic in self._topics(rows, undelivered):
            self._destinations.isolate(topic)
        metrics.DELIVERED.labels(self._cluster or "").inc(count - len(undelivered))

    def _send(self, rows: DataFrame) -> tuple[list[Undelivered], int]:
        """Send each once; return those that were not acknowledged, and the number of all."""
        message = message_columns()
        records = rows.select(
            "offset",
            message.topic.alias("topic"),
            message.partition.cast("int").alias("partition"),
            "key",
            "value",
            delivered_headers(message.headers).alias("headers"),
        )
        columns = F.col("key"), F.col("value"), F.col("headers")
        sizes = sorted(map(tuple, records.select("offset", record_bytes(*columns)).collect()))
        held = (
            sorted(records.where(F.col("offset").between(first, last)).collect())
            for first, last in chunks(sizes, CHUNK_BYTES)
        )
        groups = (
            rows[first : first + REQUEST] for rows in held for first in range(0, len(rows), REQUEST)
        )
        send = partial(self._sender.send, cluster=self._cluster, term=self._settings.term)
        return list(send_groups(groups, send)), len(sizes)

    def _fail(self, rows: DataFrame, undelivered: list[Undelivered], reason: Reason) -> None:
        """Send these of the rows to the retry topic, with the broker's answer."""
        details = F.create_map(
            *(F.lit(each) for row in undelivered for each in (row.offset, row.detail))
        )
        error = error_struct(F.lit(str(reason)), details[F.col("offset")])
        failed = rows.where(F.col("offset").isin([row.offset for row in undelivered]))
        self._return(failed.withColumn("error", error))

    def _return(self, rows: DataFrame) -> None:
        """Send rows on that are not sent from here: see `Router.returned`."""
        write_batch(self._router.returned(rows), self._settings, self._name)

    def _topics(self, rows: DataFrame, undelivered: list[Undelivered]) -> list[str]:
        offsets = [row.offset for row in undelivered]
        if not offsets:
            return []
        found = rows.where(F.col("offset").isin(offsets))
        return [row.due_topic for row in found.select("due_topic").distinct().collect()]


def chunks(sizes: Iterable[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Group offsets with their sizes in bytes; return the first and the last offset of each group.

    A group has at most `most` bytes, or one record.
    """
    found, total = list[tuple[int, int]](), 0
    for offset, size in sizes:
        if not found or total + size > most:
            found.append((offset, offset))
            total = 0
        found[-1], total = (found[-1][0], offset), total + size
    return found


def send_groups(
    groups: Iterable[Sequence[Row]], send: Callable[[list[Row]], list[Undelivered]]
) -> Iterator[Undelivered]:
    """Send each group; yield what was not delivered.

    A topic that has not answered holds up the others once: no later group has records for it.
    """
    silent = set[str]()
    for rows in groups:
        skipped = [row.offset for row in rows if row.topic in silent]
        yield from (Undelivered(offset, NO_ANSWER, is_unknown=True) for offset in skipped)
        undelivered = send([row for row in rows if row.topic not in silent])
        unknown = {each.offset for each in undelivered if each.is_unknown}
        silent |= {row.topic for row in rows if row.offset in unknown}
        yield from undelivered


class RecordSender:
    """Sends records from this process, each with a report of its own, while the lease is held.

    One thread sends for each cluster.
    """

    def __init__(self, settings: Settings, holds_lease: Callable[[int], bool]) -> None:
        """`holds_lease` returns whether this process holds the lease of a term now."""
        self._settings, self._holds_lease = settings, holds_lease
        #: By cluster, None is this one, and the most records of a request.
        self._clients: dict[tuple[str | None, int], Producer] = {}
        #: Held from the look at the lease until the client has the record.
        self._sending = threading.Lock()

    def send(self, rows: Sequence[Row], cluster: str | None, term: int) -> list[Undelivered]:
        """Send rows of offset, topic, partition, key, value and headers, in a term's batch.

        They are REQUEST at most, so that those of a partition keep their order: where a broker
        refuses a request, its records go one by one before any later ones. Raises LeaderPaused
        without the lease, and KafkaError when the client has failed for good: some were sent, and
        nothing more is.
        """
        undelivered = self._send(rows, (cluster, REQUEST), term)
        if refused := {each.offset for each in undelivered if not each.is_unknown}:
            alone = [row for row in rows if row.offset in refused]
            unknown = [each for each in undelivered if each.is_unknown]
            undelivered = unknown + self._send(alone, (cluster, 1), term)
        return undelivered

    def _send(
        self, rows: Iterable[Row], client_of: tuple[str | None, int], term: int
    ) -> list[Undelivered]:
        client, undelivered = self._client(client_of), dict[int, Undelivered]()
        holds_lease, broken = partial(self._holds_lease, term), list[BrokerError]()

        def report(offset: int, error: BrokerError | None, _message: Message | None) -> None:
            if error is None:
                undelivered.pop(offset, None)
            else:
                undelivered[offset] = Undelivered(offset, error.str(), _is_unknown(error))
                if is_fatal(error):
                    broken.append(error)

        try:
            for row in rows:
                if broken:
                    break
                # Until it is reported: a client that ends reports nothing.
                undelivered[row.offset] = Undelivered(row.offset, NO_ANSWER, is_unknown=True)
                with self._sending:
                    check_lease(holds_lease)
                    self._enqueue(client, row, partial(report, row.offset))
            until_s = time.monotonic() + 2 * ISOLATED_TIMEOUT_S
            while client.flush(LEASE_INTERVAL_S) and time.monotonic() < until_s:
                check_lease(holds_lease)
        except LeaderPaused:
            _drop(client)
            raise
        if broken:
            # The batch is repeated by a client that works.
            self._clients.pop(client_of, None)
            raise KafkaError(f"the isolated producer has failed ({broken[0].str()})")
        return list(undelivered.values())

    def _enqueue(
        self,
        client: Producer,
        row: Row,
        report: Callable[[BrokerError | None, Message | None], None],
    ) -> None:
        try:
            enqueue(
                client,
                row.topic,
                value=_bytes(row.value),
                key=_bytes(row.key),
                headers=[(name, _bytes(value)) for name, value in row.headers],
                partition=-1 if row.partition is None else row.partition,
                on_delivery=report,
            )
        except KafkaException as error:
            report(error.args[0], None)

    def settle(self) -> None:
        """Drop what is not sent, and wait for the answers to the rest, once the lease has ended.

        From any thread.
        """
        with self._sending:
            # No record follows that was checked before.
            pass
        for client in [*self._clients.values()]:
            _drop(client)

    def _client(self, client_of: tuple[str | None, int]) -> Producer:
        if client_of not in self._clients:
            cluster, records = client_of
            properties = sender_properties(self._settings.at(cluster), records)
            self._clients[client_of] = Producer(properties)
        return self._clients[client_of]


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def _drop(client: Producer) -> None:
    until_s = time.monotonic() + ISOLATED_TIMEOUT_S
    while len(client) and time.monotonic() < until_s:
        # Each time: a request that fails is queued again.
        client.purge(in_flight=False)
        client.flush(LEASE_INTERVAL_S)


def _is_unknown(error: BrokerError) -> bool:
    """Return whether the record may have been written."""
    is_answer = error.code() > 0
    return error.code() in UNKNOWN_OUTCOMES or not (is_answer or error.code() in NOT_WRITTEN)


def sender_properties(settings: Settings, records: int) -> dict[str, str | int | float | bool]:
    """Return librdkafka properties of the producer for a cluster, with `records` to a request."""
    return delivery_properties(settings) | {
        # A record that is refused fails its whole request.
        "batch.num.messages": records,
        # Until the flush, so that the records of a partition are in one request.
        "linger.ms": 0 if records == 1 else 1_000,
        "delivery.timeout.ms": int(ISOLATED_TIMEOUT_S * 1_000),
        "request.timeout.ms": 5_000,
    }
