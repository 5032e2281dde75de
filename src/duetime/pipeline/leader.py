"""What delivers, for as long as this process leads: stores, releases, queries, what goes beside."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from threading import Event
from typing import Any, Protocol, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duetime.callbacks import Callbacks
from duetime.clock import Clock
from duetime.config import Settings
from duetime.metrics import RECOVERY_SECONDS
from duetime.pipeline.begin import Begin
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.fence import Fence
from duetime.pipeline.health import Health, note_batch
from duetime.pipeline.housekeeping import free_read
from duetime.pipeline.indexing import Indexing
from duetime.pipeline.isolated import ISOLATED
from duetime.pipeline.isolation import Isolation
from duetime.pipeline.jvm import ProducerMetrics
from duetime.pipeline.kafka import REST_S, client_id
from duetime.pipeline.notices import Noticing, notices
from duetime.pipeline.outbox import OUTBOX, query_name
from duetime.pipeline.probe import Probers
from duetime.pipeline.queries import Growth, Queries
from duetime.pipeline.recurring import RECURRING
from duetime.pipeline.release import Release
from duetime.pipeline.saving import SAVED_KEPT_MS, SAVING
from duetime.pipeline.transaction_watch import TransactionWatch
from duetime.pipeline.transactional import TransactionalDelivery
from duetime.pipeline.turn import Turn
from duetime.pipeline.waking import Waking
from duetime.pipeline.written import Written
from duetime.standing import RESCUES_TOLD
from duetime.stores import Store
from duetime.stores.kafka import KafkaStore
from duetime.stores.keeping import Keeping
from duetime.stores.opening import open_store
from duetime.topics import TopicNames, visible

log = logging.getLogger(__name__)

#: The query whose topic is ours alone: what is read and committed is of no more use.
LANES = "lanes"
#: The one whose topics may get more partitions.
INTAKE = "intake"
#: And the one whose topic tells who cancels a message when it is tried again: it may wait so long.
FAILURES = "failures"

#: How long what was read stays where turns deliver it to, in ms: who recovers finds there that it
#: is sent.
DELIVERED_KEPT_MS = 3_600_000

#: How often a producer has to hold nothing, and how long lies between two looks, in seconds.
QUIET_LOOKS, QUIET_S = 2, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a process has, whether it leads or stands by."""

    spark: SparkSession
    settings: Settings
    clock: Clock
    #: By cluster; None is this one.
    written: Mapping[str | None, Written]
    destinations: Mapping[str | None, Destinations]
    turn: Turn
    sends: ProducerMetrics
    isolation: Isolation
    #: Set once the process has warmed up.
    warm: Event
    #: What `written` reads is not freed meanwhile.
    keeping: Keeping
    #: None where a leader that is paused keeps its JVM.
    fence: Fence | None
    #: Whether this process may send at this instant, for what sends from Python.
    holds_lease: Callable[[], bool]


class Beside(Protocol):
    """What works in threads of its own while we lead."""

    def start(self) -> None:
        """Begin."""

    def close(self) -> None:
        """End."""


class Leader:
    """Delivers from `start` to `stop`, for one term. Not thread-safe."""

    def __init__(self, means: Means) -> None:
        self._means, self._settings = means, means.settings
        self._to_stop = ExitStack()

    def start(self, is_wanted: Callable[[], bool], first_s: float = 0.0) -> None:
        """Start what delivers; what is late already has Spark for itself for so long, in seconds.

        `is_wanted` says whether we lead still: starting may take minutes.
        What was started is stopped, where it does not get through.
        """
        with ExitStack() as unless_started:
            unless_started.callback(self._to_stop.close)
            if self._means.fence:
                self._means.fence.start()
                self._to_stop.callback(self._means.fence.stop)
            stores = self._stores()
            self._start([self._transactional()])
            self._releases = [self._release(each) for each in stores]
            self._queries = self._begun_by(self._notices(stores[-1]))
            # What they tell when they have been begun is of no more use behind that.
            self._to_stop.callback(RECOVERY_SECONDS.clear)
            self._to_stop.callback(self._queries.stop)
            for release in self._releases:
                self._to_stop.callback(release.stop)
            self._start(self._beside())
            from_ms = self._means.clock.now_ms()
            self._rescue(first_s)
            for release in self._releases:
                release.start(from_ms)
            self._queries.start(self._visit, is_wanted)
            self._start(self._probes())
            unless_started.pop_all()

    def look_around(self) -> None:
        """Start what has failed again, free what is of no more use, and keep commits true."""
        self._queries.look_around(self._visit)
        self._wheel.look_after(self._means.clock.now_ms())

    def told(self) -> dict[str, Any]:
        """What whoever asks for the state of the pipelines is told. From any thread.

        The last is what can be done without, where all would be too long for a note.
        """
        rescues = sorted(each for release in self._releases for each in release.rescues)
        return {
            "rescued": sum(release.rescued for release in self._releases),
            "queries": self._queries.told(),
            "rescues": [astuple(each) for each in rescues[-RESCUES_TOLD:]],
        }

    def stop(self) -> None:
        """Stop all of it, once open windows have ended. Safe to repeat."""
        self._to_stop.close()

    def join(self) -> None:
        """Wait until nothing is under way any more."""
        for release in self._releases:
            release.join()

    def _stores(self) -> list[Store[Any]]:
        """The wheel, and where else messages wait: what was left in the middle is read now."""
        self._wheel = KafkaStore(self._settings, self._means.keeping, self._means.holds_lease)
        self._to_stop.callback(self._wheel.close)
        store = open_store(self._settings)
        if store is None:
            return [self._wheel]
        self._to_stop.callback(store.close)
        return [self._wheel, store]

    def _release(self, store: Store[Any]) -> Release[Any]:
        means = self._means
        return Release(
            settings=means.settings,
            store=store,
            turn=means.turn,
            clock=means.clock,
            is_warm=means.warm.is_set,
        )

    def _notices(self, store: Store[Any]) -> Callable[[DataFrame, int], None] | None:
        """What to do when a store tells that messages are due; None where it does not."""
        if self._settings.store_kind != "aerospike" or not self._settings.aerospike_notices:
            return None
        take_up = self._releases[-1].take_up
        return notices(self._settings, cast("Noticing", store), take_up, self._means.clock)

    def _begun_by(self, notice: Callable[[DataFrame, int], None] | None) -> Queries:
        means, waking = self._means, None
        if means.settings.queues:
            waking = Waking(means.settings, means.clock)
            self._start([waking])
        begin = Begin(means.spark, means.settings, means.written, means.destinations, means.clock)
        self._to_stop.callback(begin.close)
        return Queries(
            begin.all(notice, waking),
            refresh=means.destinations[None].refresh,
            given_up=self._given_up,
            blame=means.isolation.blame,
            elsewhere=[query_name(cluster) for cluster in means.settings.clusters],
            growth=Growth(partitions=self._partitions, drain=self._drain),
            moved=begin.moved,
        )

    def _beside(self) -> Iterator[Beside]:
        settings, means = self._settings, self._means
        yield TransactionWatch(settings, means.clock)
        yield Indexing(means.spark, settings, means.clock)
        if settings.callback_hosts:
            yield Callbacks(settings)
        for topic in visible(settings):
            # With NumPy and Arrow, which nothing else needs.
            from duetime.delayed.visible import Visible  # noqa: PLC0415 (as it says)

            yield Visible(settings, topic, means.holds_lease)
        if settings.metrics_port:
            # On a cluster, other JVMs than this one send, too.
            is_local = str(means.spark.sparkContext.master).startswith("local")
            yield Health(settings, means.clock, means.sends if is_local else None)

    def _probes(self) -> Iterator[Beside]:
        if self._settings.metrics_port and self._settings.probes:
            yield Probers(self._settings, self._means.clock)

    def _start(self, them: Iterable[Beside]) -> None:
        for each in them:
            self._to_stop.callback(each.close)
            each.start()

    def _rescue(self, first_s: float) -> None:
        """What is late already goes first."""
        late = [self._rescued(release) for release in self._releases]
        wait([turn for turns in late for turn in turns[:1]], timeout=first_s)

    @staticmethod
    def _rescued(release: Release[Any]) -> list[Future[None]]:
        """Rescue what is late. A store that cannot be read now stops nothing else."""
        try:
            return release.rescue_once()
        except Exception:
            log.exception("could not rescue at start; the next look is in rescue_every_ms")
            return []

    def _visit(self, name: str, query: StreamingQuery) -> None:
        now_ms = self._means.clock.now_ms()
        if self._settings.metrics_port:
            note_batch(name, query)
        if name == LANES:
            free_read(self._wheel, query)
        elif name == FAILURES:
            free_read(self._wheel, query, now_ms - self._settings.retry_backoff_max_ms)
        elif name.startswith(OUTBOX) or name in (RECURRING, ISOLATED):
            free_read(self._wheel, query, now_ms - DELIVERED_KEPT_MS)
        elif name == SAVING:
            free_read(self._wheel, query, now_ms - SAVED_KEPT_MS)

    def _transactional(self) -> TransactionalDelivery:
        means = self._means
        isolate = means.destinations[None].isolate
        return TransactionalDelivery(
            self._settings, means.clock, means.holds_lease, isolate, self._free_sent
        )

    def _free_sent(self, end: int) -> None:
        kept_since_ms = None
        if self._settings.transactional_delivery:
            kept_since_ms = self._means.clock.now_ms() - DELIVERED_KEPT_MS
        # Where it is switched off nobody commits there any more, and offsets expire.
        self._wheel.free({(TopicNames(self._settings).sending, 0): end}, kept_since_ms)

    def _partitions(self, name: str) -> Mapping[str, int]:
        """How many partitions the topics have that others may add some to."""
        known = self._means.destinations[None].partitions
        topics = TopicNames(self._settings).intake if name == INTAKE else []
        return {topic: known[topic] for topic in topics if topic in known}

    def _drain(self, name: str) -> None:
        """Wait until what a stopped query has sent is acknowledged, or too old to be."""
        until_s, quiet = time.monotonic() + REST_S, 0
        # Twice: a task that is being stopped may hand over one more record.
        while quiet < QUIET_LOOKS and time.monotonic() < until_s:
            time.sleep(QUIET_S)
            held = self._means.sends.unacknowledged_bytes(client_id(self._settings, name))
            quiet = 0 if held else quiet + 1

    def _given_up(self, name: str) -> int:
        """How many records the producer of a query could not deliver."""
        cluster = name.removeprefix(OUTBOX) if name.startswith(OUTBOX) else None
        at = self._settings.at(cluster) if cluster else self._settings
        return self._means.sends.given_up(client_id(at, name))
