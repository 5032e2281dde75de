"""What Prometheus is told of the one that leads: what waits, what was counted, how queries fare.

Only from what is true by itself: offsets of topics, Spark's query progress, Kafka's own metrics.
Counters go on from where the topics ended when this pipeline began to lead.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pyspark.sql.streaming import StreamingQuery

from duetime import metrics
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import DuetimeError, words
from duetime.pipeline.jvm import ProducerMetrics
from duetime.pipeline.kafka import client_id
from duetime.pipeline.outbox import query_name
from duetime.pipeline.queue_health import QueueHealth, forget, more_than
from duetime.pipeline.turn import PRODUCERS
from duetime.status import late_of
from duetime.stores import Pending
from duetime.stores.offsets import Offsets
from duetime.stores.opening import open_reader
from duetime.stores.reader import WheelReader
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How often is looked, in seconds.
EVERY_S = 10.0

#: How long a look may take that is under way when it is to end, in seconds.
LEAVE_S = 2.0

#: The sinks that write to destinations on this cluster, among other topics.
SENDERS = ("intake", "intake-tx", "lanes", *PRODUCERS, "recover", "failures", "recurring")

#: What the intake topics are called in metrics, in their order.
CONTRACTS = ("native", "control", "airtel", "countdown", "scheduler", "transactional")


class Health:
    """Looks every so often, in a thread of its own. Start it once."""

    def __init__(self, settings: Settings, clock: Clock, sends: ProducerMetrics | None) -> None:
        """`sends` are the metrics of all producers; None where some run in other JVMs."""
        self._clock = clock
        names = TopicNames(settings)
        self._levels = settings.wheel_levels
        self._offsets = Offsets(settings, f"{settings.namespace}.health")
        # Aerospike would have to read all that waits.
        counts = settings.store_kind != "aerospike"
        self._reader = open_reader(settings) if counts else WheelReader(settings)
        self._deliveries = list[Deliveries]()
        if sends:
            clusters = (None, *settings.clusters)
            self._deliveries = [Deliveries(settings, sends, each) for each in clusters]
        self._queues = None
        if settings.queues:
            self._queues = QueueHealth(settings, clock, self._offsets, self._tell)
        contracts = zip(CONTRACTS, names.intake, strict=True)
        self._counters = {topic: metrics.INTAKE.labels(name) for name, topic in contracts} | {
            names.rejected: metrics.REJECTED,
            names.failed: metrics.FAILED,
            names.dead: metrics.DEAD,
        }
        self._totals = self._ends()
        self._stopping = threading.Event()
        #: Held while it tells what it may not when it has ended.
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, and take back what only the one that leads can say."""
        self._stopping.set()
        self._thread.join(LEAVE_S)
        if not self._thread.is_alive():
            self._reader.close()
            self._offsets.close()
            if self._queues:
                self._queues.close()
        with self._telling:
            forget()
            metrics.QUERY_BATCH_SECONDS.clear()
            _say_what_waits({}, late=0, lag_ms=0)

    def look(self) -> None:
        """Look once. What does not answer leaves the rest to be seen."""
        queues = [self._queues.look] if self._queues else []
        deliveries = (each.look for each in self._deliveries)
        for part in (self._look_at_what_waits, self._count, *deliveries, *queues):
            if self._stopping.is_set():
                return
            try:
                part()
            except Exception as error:  # noqa: BLE001 (whatever it was, it is looked again)
                log.warning("could not look for metrics error=%s", words(error))

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(EVERY_S)

    def _tell(self, say: Callable[[], None]) -> None:
        """Say it, unless it is to end: a look under way then is of no more use."""
        with self._telling:
            if not self._stopping.is_set():
                say()

    def _look_at_what_waits(self) -> None:
        now_ms = self._clock.now_ms()
        try:
            slots = self._reader.pending(now_ms)
        except DuetimeError:
            self._tell(partial(_say_what_waits, {}, late=math.nan, lag_ms=math.nan))
            raise
        late, lag_ms = late_of(slots, now_ms)
        levels = by_level(slots, self._levels)
        self._tell(partial(_say_what_waits, levels, late=late, lag_ms=lag_ms))

    def _count(self) -> None:
        for topic, end in self._ends().items():
            self._counters[topic].inc(more_than(self._totals.get(topic, end), end))
            # What is missing for once has none, and is not new when it is found again.
            self._totals[topic] = end or self._totals.get(topic, 0)

    def _ends(self) -> dict[str, int]:
        """How many records were ever appended to each topic that we may read."""
        # Who may write there need not be allowed to read.
        ends = self._offsets.appended(self._counters)
        return {topic: count for topic, count in ends.items() if count is not None}


def _say_what_waits(levels: Mapping[int, int], *, late: float, lag_ms: float) -> None:
    """How much by level, and of all how much is late and for how long; NaN: nobody knows."""
    if not levels:
        metrics.PENDING.clear()
    for level, count in levels.items():
        metrics.PENDING.labels(str(level)).set(count)
    metrics.OVERDUE.set(late)
    metrics.OLDEST_OVERDUE_SECONDS.set(lag_ms / 1_000)


def by_level(slots: Iterable[Pending], levels: int) -> dict[int, int]:
    """How many records wait on each level, 0 included."""
    counts = dict.fromkeys(range(levels), 0)
    for each in slots:
        counts[each.slot.level] = counts.get(each.slot.level, 0) + each.count
    return counts


def note_batch(name: str, query: StreamingQuery) -> None:
    """Note how long a query's last batch took."""
    progress = query.lastProgress
    took_ms = progress["durationMs"].get("triggerExecution") if progress else None
    if took_ms is not None:
        metrics.QUERY_BATCH_SECONDS.labels(name).set(took_ms / 1_000)


class Deliveries:
    """Counts what the sinks have sent to a cluster, without what went to topics of our own.

    Never too many, but for what Kafka's client sends once more. None is this cluster.
    """

    def __init__(self, settings: Settings, sends: ProducerMetrics, cluster: str | None) -> None:
        at = settings.at(cluster) if cluster else settings
        senders = (query_name(cluster), "recover") if cluster else SENDERS
        self._own = _own(settings, cluster)
        self._sends = sends
        self._clients = [client_id(at, each) for each in senders]
        self._totals = dict.fromkeys(self._clients, 0)
        self._counted = dict.fromkeys(self._clients, 0)
        self._count = metrics.DELIVERED.labels(cluster or "")
        # What was sent before is counted already.
        self._more()

    def look(self) -> None:
        """Count what was sent since the last time."""
        self._count.inc(self._more())

    def _more(self) -> int:
        return sum(self._more_of(client) for client in self._clients)

    def _more_of(self, client: str) -> int:
        # In this order: what is sent meanwhile makes it too few for once, and not too many.
        total = self._sends.sent(client)
        if total == self._totals[client]:
            return 0
        sent = total - sum(self._sends.sent(client, topic) for topic in self._own)
        if total < self._totals[client]:
            # The producer was opened anew.
            self._counted[client] = 0
        before = self._counted[client]
        self._totals[client], self._counted[client] = total, max(before, sent)
        return self._counted[client] - before


def _own(settings: Settings, cluster: str | None) -> list[str]:
    """Topics of a cluster that are no destinations, and that the sinks write to all the same."""
    if cluster:
        probed = settings.clusters[cluster].probe_topic
        return [probed] if probed else []
    names = TopicNames(settings)
    wheel = (names.wheel(level) for level in range(settings.wheel_levels))
    outboxes = (names.outbox(each) for each in settings.clusters)
    ended = (names.isolated, names.sending, names.failed, names.dead, names.rejected)
    return [*wheel, *outboxes, *ended, *names.own, names.lanes, names.store, names.series]
