"""Prometheus metrics of the leader, and warnings of open transactions.

Metrics are read from the outside: offsets of topics, Spark's query progress, the metrics of Kafka's
producers, and the commits of the tracker. So a queue's oldest message ages while the tracker sleeps
or stands still. Counters start from the ends of the topics when this process begins to lead.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyspark.sql.streaming import StreamingQuery

from duetime.client.status import count_overdue
from duetime.core import metrics
from duetime.core.clock import Clock
from duetime.core.errors import DuetimeError, error_text
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames, message_topics
from duetime.kafka.offsets import Offsets
from duetime.kafka.range_reader import OpenTransaction, open_transactions, remedy
from duetime.pipeline import INTAKE, INTAKE_TX, LANES, OUTBOX, RECOVER, RETRIES, SCHEDULES
from duetime.pipeline.release.job import PRODUCERS
from duetime.queue.stats import TrackerOffsets, TrackerState
from duetime.spark.kafka_io import client_id
from duetime.spark.task_jvms import ProducerMetrics
from duetime.stores.factory import open_reader
from duetime.stores.wheel_reader import WheelReader

log = logging.getLogger(__name__)

#: How often the metrics are updated, in seconds.
UPDATE_INTERVAL_S = 10.0

#: How long `close` waits for an update under way, in seconds.
CLOSE_TIMEOUT_S = 2.0

#: How often open transactions are looked up, in seconds.
CHECK_INTERVAL_S = 10.0

#: How long a transaction in the topic for transactions may be open without a warning, in seconds.
EXPECTED_S = 60.0

#: The pause between two warnings of one topic, in seconds.
WARNING_INTERVAL_S = 3_600.0

#: The sinks that write to destinations on this cluster, among other topics.
SENDERS = (INTAKE, INTAKE_TX, LANES, *PRODUCERS, RECOVER, RETRIES, SCHEDULES)

#: The label of each intake topic, in the order of `TopicNames.intake`.
CONTRACTS = ("native", "control", "airtel", "countdown", "scheduler", "transactional")


class MetricsExporter:
    """Updates the metrics in a thread of its own, from `start` to `close`. Start it once."""

    def __init__(self, settings: Settings, clock: Clock, sends: ProducerMetrics) -> None:
        self._clock, self._levels = clock, settings.wheel_levels
        self._offsets = Offsets(settings, f"{settings.namespace}.health")
        # Aerospike would have to read all messages to count them.
        is_counted = settings.store_kind != "aerospike"
        self._reader = open_reader(settings) if is_counted else WheelReader(settings)
        clusters = (None, *settings.clusters)
        self._deliveries = [DeliveryCounter(settings, sends, each) for each in clusters]
        self._queues = None
        if settings.queues:
            self._queues = QueueMetrics(settings, clock, self._offsets, self._publish)
        names = TopicNames(settings)
        intake = zip(CONTRACTS, names.intake, strict=True)
        self._counters = {topic: metrics.INTAKE.labels(contract) for contract, topic in intake} | {
            names.rejected: metrics.REJECTED,
            names.retry: metrics.FAILED,
            names.dead_letter: metrics.DEAD,
        }
        self._totals = self._appended()
        #: Held while gauges are set that must be empty after `close`.
        self._lock = threading.Lock()
        self._thread = PeriodicThread("health", UPDATE_INTERVAL_S, self.update)

    def start(self) -> None:
        """Start updating."""
        self._thread.start()

    def close(self) -> None:
        """Stop updating, and clear the gauges that only the leader has values for."""
        if self._thread.stop(CLOSE_TIMEOUT_S):
            self._reader.close()
            self._offsets.close()
            if self._queues:
                self._queues.close()
        with self._lock:
            metrics.QUEUE_IN_FLIGHT.clear()
            metrics.QUEUE_OLDEST_SECONDS.clear()
            metrics.QUERY_BATCH_SECONDS.clear()
            _set_pending({}, late=0, lag_ms=0)

    def update(self) -> None:
        """Update all metrics once. A source that does not answer leaves the others updated."""
        parts = [self._update_pending, self._count_records]
        parts += [each.update for each in self._deliveries]
        if self._queues:
            parts.append(self._queues.update)
        for part in parts:
            if self._thread.stopping.is_set():
                return
            try:
                part()
            except Exception as error:  # noqa: BLE001 (the next update tries again)
                log.warning("could not update metrics error=%s", error_text(error))

    def _publish(self, set_gauges: Callable[[], None]) -> None:
        with self._lock:
            if not self._thread.stopping.is_set():
                set_gauges()

    def _update_pending(self) -> None:
        now_ms = self._clock.now_ms()
        try:
            slots = self._reader.pending(now_ms)
        except DuetimeError:
            self._publish(partial(_set_pending, {}, late=math.nan, lag_ms=math.nan))
            raise
        levels = dict.fromkeys(range(self._levels), 0)
        for each in slots:
            levels[each.slot.level] = levels.get(each.slot.level, 0) + each.count
        late, lag_ms = count_overdue(slots, now_ms)
        self._publish(partial(_set_pending, levels, late=late, lag_ms=lag_ms))

    def _count_records(self) -> None:
        for topic, total in self._appended().items():
            self._counters[topic].inc(increase(self._totals.get(topic, total), total))
            # A topic that is missing for a moment has 0, and nothing new when it is back.
            self._totals[topic] = total or self._totals.get(topic, 0)

    def _appended(self) -> dict[str, int]:
        """Return how many records were ever appended to each topic that we may read."""
        # Permission to write to a topic does not include permission to read it.
        totals = self._offsets.appended(self._counters)
        return {topic: total for topic, total in totals.items() if total is not None}


def _set_pending(levels: Mapping[int, int], *, late: float, lag_ms: float) -> None:
    """Set messages by level, how many are overdue, and for how long; NaN is unknown."""
    if not levels:
        metrics.PENDING.clear()
    for level, count in levels.items():
        metrics.PENDING.labels(str(level)).set(count)
    metrics.OVERDUE.set(late)
    metrics.OLDEST_OVERDUE_SECONDS.set(lag_ms / 1_000)


def note_batch(name: str, query: StreamingQuery) -> None:
    """Set the metric of how long the last batch of a query took."""
    progress = query.lastProgress
    took_ms = progress["durationMs"].get("triggerExecution") if progress else None
    if took_ms is not None:
        metrics.QUERY_BATCH_SECONDS.labels(name).set(took_ms / 1_000)


class DeliveryCounter:
    """Counts the records that sinks sent to destinations on a cluster; None is this one.

    Records to internal topics do not count. The count is never too high, except for what Kafka's
    client sends twice.
    """

    def __init__(self, settings: Settings, sends: ProducerMetrics, cluster: str | None) -> None:
        at = settings.at(cluster)
        senders = (f"{OUTBOX}{cluster}", RECOVER) if cluster else SENDERS
        self._internal, self._sends = _internal_topics(settings, cluster), sends
        self._clients = [client_id(at, each) for each in senders]
        self._totals = dict.fromkeys(self._clients, 0)
        self._counted = dict.fromkeys(self._clients, 0)
        self._metric = metrics.DELIVERED.labels(cluster or "")
        # What was sent before is not new.
        self._new()

    def update(self) -> None:
        """Count what was sent since the last update."""
        self._metric.inc(self._new())

    def _new(self) -> int:
        return sum(self._new_of(client) for client in self._clients)

    def _new_of(self, client: str) -> int:
        # The total first: what is sent meanwhile makes the difference too low for once, not high.
        total = self._sends.sent(client)
        if total == self._totals[client]:
            return 0
        sent = total - sum(self._sends.sent(client, topic) for topic in self._internal)
        if total < self._totals[client]:
            # The producer was opened again, and counts from 0.
            self._counted[client] = 0
        before = self._counted[client]
        self._totals[client], self._counted[client] = total, max(before, sent)
        return self._counted[client] - before


def _internal_topics(settings: Settings, cluster: str | None) -> list[str]:
    """Return the topics of a cluster that sinks write to and that are no destinations."""
    if cluster:
        topic = settings.clusters[cluster].probe_topic
        return [topic] if topic else []
    names = TopicNames(settings)
    return [*message_topics(settings), *names.own, names.schedules]


@dataclass(slots=True)
class QueueCounter:
    """Turns the totals of a queue into increases of two counters."""

    #: How often a message was delivered again or given up, ever; and how many were given up.
    out: int
    dead: int
    #: Redeliveries to count; below 0 where a dead letter is there before the tracker's commit.
    uncounted: int = 0

    def update(self, out: int, dead: int) -> tuple[int, int]:
        """Return how many more were delivered again, and given up. Never too many."""
        more_dead = increase(self.dead, dead)
        self.uncounted += increase(self.out, out) - more_dead
        # A topic that cannot be read for a moment has 0: its letters are not new after that.
        self.out, self.dead = out, dead or self.dead
        redelivered = max(0, self.uncounted)
        self.uncounted -= redelivered
        return redelivered, more_dead


class QueueMetrics:
    """Updates the metrics of all queues. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        offsets: Offsets,
        publish: Callable[[Callable[[], None]], None],
    ) -> None:
        """`publish` sets gauges unless the exporter is closed. Raises KafkaError."""
        self._clock, self._offsets, self._publish = clock, offsets, publish
        self._dead_topics = {name: each.dead_topic(name) for name, each in settings.queues.items()}
        self._tracker = TrackerOffsets(settings)
        self._counters = {
            queue: QueueCounter(state.redelivered_total, dead)
            for queue, (state, dead) in self._read().items()
        }

    def update(self) -> None:
        """Update once. Raises KafkaError."""
        now_ms = self._clock.now_ms()
        for queue, (state, dead) in self._read().items():
            self._publish(partial(_set_queue, queue, state, now_ms))
            more_out, more_dead = self._counters[queue].update(state.redelivered_total, dead)
            metrics.QUEUE_REDELIVERED.labels(queue).inc(more_out)
            metrics.QUEUE_DEAD.labels(queue).inc(more_dead)

    def close(self) -> None:
        """Close the connection."""
        self._tracker.close()

    def _read(self) -> dict[str, tuple[TrackerState, int]]:
        """Return the tracker's state of each queue, and how many dead letters it ever had."""
        # In this order: a letter is written before its commit, and counts for no redelivery.
        states = {queue: self._tracker.of(queue) for queue in self._dead_topics}
        letters = self._offsets.appended(self._dead_topics.values())
        return {
            queue: (state, letters[self._dead_topics[queue]] or 0)
            for queue, state in states.items()
        }


def _set_queue(queue: str, state: TrackerState, now_ms: int) -> None:
    oldest_ms = now_ms if state.oldest_ms is None else min(state.oldest_ms, now_ms)
    metrics.QUEUE_IN_FLIGHT.labels(queue).set(state.in_flight)
    metrics.QUEUE_OLDEST_SECONDS.labels(queue).set((now_ms - oldest_ms) / 1_000)


def increase(before: int, now: int) -> int:
    """Return by how much a total has grown; it starts from 0 when its topic is created again."""
    return now - before if now >= before else now


class TransactionWatch:
    """Measures the open transactions of the intake topics, and warns of them. Start it once."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        names = TopicNames(settings)
        self._transactional = names.transactional
        self._contracts = dict(zip(names.intake, CONTRACTS, strict=True))
        self._offsets = Offsets(settings, f"{settings.namespace}.transactions")
        #: When the next warning of a topic may be logged, by the monotonic clock.
        self._next_warning_s: dict[str, float] = {}
        self._thread = PeriodicThread("transactions", CHECK_INTERVAL_S, self._check)

    def start(self) -> None:
        """Start checking."""
        self._thread.start()

    def close(self) -> None:
        """Stop checking, and clear the metric."""
        if self._thread.stop(CLOSE_TIMEOUT_S):
            self._offsets.close()
            metrics.OPEN_TRANSACTION_SECONDS.clear()

    def check(self) -> None:
        """Check once. Raises DuetimeError, Unreadable."""
        found = open_transactions(self._settings, self._offsets, self._contracts)
        now_ms = self._clock.now_ms()
        for topic, contract in self._contracts.items():
            in_topic = [each for each in found if each.topic == topic]
            longest_s = self._warn(in_topic, now_ms) if in_topic else 0.0
            metrics.OPEN_TRANSACTION_SECONDS.labels(contract).set(longest_s)

    def _check(self) -> None:
        try:
            self.check()
        except Exception as error:  # noqa: BLE001 (the next check tries again)
            log.warning("could not look up open transactions error=%s", error_text(error))

    def _warn(self, in_topic: Sequence[OpenTransaction], now_ms: int) -> float:
        """Warn of the oldest, unless that was done lately; return its age in seconds."""
        oldest = min(in_topic, key=lambda each: each.since_ms)
        topic, age_s = oldest.topic, max(0.0, (now_ms - oldest.since_ms) / 1_000)
        is_expected = topic == self._transactional and age_s <= EXPECTED_S
        now_s = time.monotonic()
        if not is_expected and now_s >= self._next_warning_s.get(topic, 0.0):
            self._next_warning_s[topic] = now_s + WARNING_INTERVAL_S
            log.warning(
                "transaction is open topic=%s partition=%d seconds=%.0f: %s",
                topic,
                oldest.partition,
                age_s,
                remedy(topic, self._transactional),
            )
        return age_s
