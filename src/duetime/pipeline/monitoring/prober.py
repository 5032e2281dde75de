"""Prober: sends probes as any sender does, and measures how late they arrive.

Two a second, through the lanes and through the store, as long as this process leads. So lateness is
known also while no sender is active, and a leader that delivers no more gives the lead back.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from duetime.core import headers as H
from duetime.core.clock import Clock, Offset
from duetime.core.errors import error_text
from duetime.core.messages import MessageId
from duetime.core.metrics import CLOCK_OFFSET_SECONDS, LATENESS_SECONDS, PROBES
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.kafka.range_reader import headers_of
from duetime.pipeline.monitoring.synthetic_messages import AHEAD_MS, SyntheticMessages

log = logging.getLogger(__name__)

#: The paths of probes: through the lanes, and through the store.
LANES, STORE = PATHS = "lanes", "store"

#: How long Kafka may take to acknowledge probes, in seconds.
ACKNOWLEDGE_TIMEOUT_S = 1.0

#: How long Kafka may take until a probe is given up, in ms: while it takes one, no other is sent.
GIVEN_UP_MS = 10_000

#: Records read at a time: on another cluster, foreign ones are among them.
BATCH_SIZE = 1_000

#: How often two probes are sent, in seconds.
PROBE_INTERVAL_S = 1.0

#: How long without an arrival, in seconds, until probes count as lost, or held up by an outage.
SILENCE_S = 60.0

#: How often they are sent from then on, or while they cannot be read, in seconds: enough to show
#: that none arrives. Each will arrive hours late, or be a dead letter where its topic is gone.
SILENT_INTERVAL_S = 60.0

#: How long `close` waits for Kafka, in seconds; for all clusters together.
CLOSE_TIMEOUT_S = 2.0

#: The largest error of a clock offset that is published, in ms: half a round trip.
MAX_OFFSET_ERROR_MS = 100

#: A path is stuck when MISSING of its LATEST probes are missing.
MISSING, LATEST = 3, 20

#: A probe is overtaken by one that was due so much later, in seconds.
OVERTAKEN_S = 30.0

#: A clock that moves by more than the time that passes was set, in ms.
CLOCK_SET_MS = 10_000


class ProberSet:
    """The probers of this cluster and of each other cluster with a `probe_topic`. Start it once."""

    def __init__(self, settings: Settings, clock: Clock, is_obstructed: Callable[[], bool]) -> None:
        """`is_obstructed` returns whether no leader of this cluster could deliver all probes."""
        clusters = [name for name, each in settings.clusters.items() if each.probe_topic]
        here = Prober(settings, clock, is_obstructed=is_obstructed)
        self._probers = [here, *(Prober(settings, clock, each) for each in clusters)]

    @property
    def stuck_path(self) -> str | None:
        """The path on which this cluster's probes have ceased to arrive, if there is one."""
        return self._probers[0].stuck_path

    def start(self) -> None:
        """Start all probers."""
        for each in self._probers:
            each.start()

    def close(self) -> None:
        """Stop all probers at once; probes under way are abandoned."""
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for each in self._probers:
            each.stop()
        for each in self._probers:
            each.close(max(0.0, until_s - time.monotonic()))


class Prober:
    """Sends probes to one cluster and measures their lateness, in a thread. Start it once."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        cluster: str | None = None,
        is_obstructed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock, self._cluster, self._is_obstructed = clock, cluster or "", is_obstructed
        properties = {"message.timeout.ms": GIVEN_UP_MS}
        self._messages = SyntheticMessages(settings, cluster, **properties)
        self._delay_ms = {LANES: AHEAD_MS, STORE: settings.short_delay_threshold_ms + AHEAD_MS}
        #: Begins the unique part of our ids.
        self._mark = f"probe-{uuid.uuid4().hex[:12]}."
        self._backoffs = {path: ProbeBackoff() for path in PATHS}
        self._arrivals = {path: ProbeArrivals(settings.probe_timeout_seconds) for path in PATHS}
        #: How far the clock is ahead of the monotonic one, in ms.
        self._ahead_ms = clock.now_ms() - time.monotonic() * 1_000
        #: The paths of which one that is stuck ends the lead. Where messages wait in another store,
        #: its outage would end that of each leader.
        self._judged = PATHS if settings.store_kind == "kafka" else (LANES,)
        #: The path on which probes have ceased to arrive, if there is one.
        self.stuck_path: str | None = None
        self._consumer: Consumer | None = None
        #: Held while the clock offset is set, which must be 0 after `stop`.
        self._lock = threading.Lock()
        self._thread = PeriodicThread("probe", 0.0, self._probe)

    def start(self) -> None:
        """Start probing."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, and clear the clock offset, which only the leader measures."""
        self._thread.stopping.set()
        with self._lock:
            CLOCK_OFFSET_SECONDS.set(0)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        if self._thread.stop(timeout_s):
            self._close_consumer()

    def _probe(self) -> None:
        """Send the probes of one second, and measure what arrives in it."""
        until_s = time.monotonic() + PROBE_INTERVAL_S
        try:
            # Before the first probe is sent. Without it probes are sent, and missed.
            self._consumer = self._consumer or self._messages.consumer()
        except KafkaException as error:
            log.warning("probes cannot be read error=%s", error_text(error))
        try:
            self._send()
            self._observe(until_s)
        except (KafkaException, BufferError) as error:
            log.warning("probes failed error=%s", error_text(error))
            self._close_consumer()
        self._judge()
        if self._thread.stopping.wait(max(0.0, until_s - time.monotonic())):
            self._close_consumer()

    def _judge(self) -> None:
        """Set `stuck_path`.

        Probes under way do not count where no leader could write to the topics, or once the clock
        was set.
        """
        ahead_ms, before_ms = self._clock.now_ms() - time.monotonic() * 1_000, self._ahead_ms
        self._ahead_ms, was_set = ahead_ms, abs(ahead_ms - before_ms) > CLOCK_SET_MS
        if was_set or self._is_obstructed():
            for each in self._arrivals.values():
                each.clear()
        now_s = time.monotonic()
        stuck = (path for path in self._judged if self._arrivals[path].is_stuck(now_s))
        self.stuck_path = next(stuck, None)

    def _close_consumer(self) -> None:
        if self._consumer:
            self._consumer.close()
        self._consumer = None

    def _send(self) -> None:
        """Send the probes that are due, and wait a moment for Kafka to acknowledge them.

        The acknowledgement shows how far the clocks are apart. Raises KafkaException, BufferError.
        """
        now_s, is_readable = time.monotonic(), self._consumer is not None
        backoffs = self._backoffs.items()
        paths = [path for path, each in backoffs if each.is_due(now_s, is_readable=is_readable)]
        # While Kafka takes none, none is sent: it would be late by the prober's fault.
        if self._messages.producer.flush(0):
            return
        now_ms = self._clock.now_ms()
        for path in paths:
            delay_ms = self._delay_ms[path]
            self._arrivals[path].await_probe(now_ms + delay_ms, now_s + delay_ms / 1_000)
            try:
                self._messages.send(
                    now_ms + delay_ms,
                    b"probe",
                    unique=f"{self._mark}{path}",
                    on_delivery=partial(self._acknowledged, now_ms, path),
                )
            except (KafkaException, BufferError):
                self._arrivals[path].forget(now_ms + delay_ms)
                raise
        self._messages.producer.flush(ACKNOWLEDGE_TIMEOUT_S)

    def _acknowledged(
        self, sent_ms: int, path: str, error: KafkaError | None, record: Message
    ) -> None:
        if error is not None:
            # A broker is out of reach, or all are: see `_judge`.
            return
        PROBES.labels(self._cluster, path).inc()
        received_ms, stamped_ms = self._clock.now_ms(), record.timestamp()[1]
        offset = Offset.seen(sent_ms=sent_ms, stamped_ms=stamped_ms, received_ms=received_ms)
        with self._lock:
            if offset.error_ms <= MAX_OFFSET_ERROR_MS and not self._thread.stopping.is_set():
                CLOCK_OFFSET_SECONDS.set(offset.ahead_ms / 1_000)

    def _observe(self, until_s: float) -> None:
        """Measure what arrives until then. Raises KafkaException."""
        while self._consumer and not self._thread.stopping.is_set():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            for path, due_ms, arrived_ms in self._arrived(self._consumer, min(left_s, 0.1)):
                LATENESS_SECONDS.labels(self._cluster, path).observe((arrived_ms - due_ms) / 1_000)
                self._arrivals[path].note(due_ms, time.monotonic())
                self._backoffs[path].reset(time.monotonic())

    def _arrived(self, consumer: Consumer, timeout_s: float) -> Iterator[tuple[str, int, int]]:
        """Yield of our probes the path, and when each was due and arrived, epoch ms.

        Raises KafkaException.
        """
        for record in consumer.consume(BATCH_SIZE, timeout=timeout_s):
            if error := record.error():
                # The topic is gone, for instance: the consumer must be opened again.
                raise KafkaException(error)
            # On another cluster, others may write anything there.
            identity = (dict(headers_of(record)).get(H.DUE_ID) or b"").decode(errors="replace")
            _, is_ours, path = identity.partition(f"-{self._mark}")
            if is_ours:
                yield path, MessageId.parse(identity).due_ms, record.timestamp()[1]


class ProbeBackoff:
    """When the probes of one path are sent: each second, and seldom while none arrives."""

    def __init__(self) -> None:
        self._arrived_s = 0.0
        #: None before the first probe.
        self._sent_s: float | None = None

    def is_due(self, now_s: float, *, is_readable: bool) -> bool:
        """Return whether to send a probe now, by the monotonic clock; if so, note that."""
        if self._sent_s is None:
            # None can have arrived before.
            self._arrived_s = now_s
        else:
            is_silent = not is_readable or now_s - self._arrived_s >= SILENCE_S
            if is_silent and now_s - self._sent_s < SILENT_INTERVAL_S:
                return False
        self._sent_s = now_s
        return True

    def reset(self, now_s: float) -> None:
        """Note that a probe arrived."""
        self._arrived_s = now_s


class ProbeArrivals:
    """Which probes of one path are missing. Instants are seconds of the monotonic clock.

    They show a leader that keeps its lease and delivers nothing: its disk is full, or it does not
    reach a broker. A backlog is not such a case, because it is sent in order.
    """

    def __init__(self, timeout_s: float) -> None:
        """A probe is missing `timeout_s` seconds after it was due, if later ones have arrived."""
        self._timeout_s = timeout_s
        #: By due time in epoch ms, the same instant by the monotonic clock.
        self._awaited: dict[int, float] = {}
        #: Of the latest probes, whether each has arrived.
        self._outcomes: deque[bool] = deque(maxlen=LATEST)
        #: When one arrived last. None before: another leader might not do better.
        self._arrived_s: float | None = None
        #: The latest due time of those that have arrived.
        self._reached_s = float("-inf")

    def await_probe(self, due_ms: int, due_s: float) -> None:
        """Note that a probe is sent."""
        self._awaited[due_ms] = due_s

    def forget(self, due_ms: int) -> None:
        """Note that a probe was not sent."""
        self._awaited.pop(due_ms, None)

    def note(self, due_ms: int, now_s: float) -> None:
        """Note that a probe arrived."""
        self._arrived_s = now_s
        due_s = self._awaited.pop(due_ms, None)
        if due_s is not None:
            self._reached_s = max(self._reached_s, due_s)
            self._outcomes.append(True)

    def clear(self) -> None:
        """Forget all probes that have not arrived."""
        self._awaited.clear()
        self._outcomes.clear()

    def is_stuck(self, now_s: float) -> bool:
        """Return whether probes have ceased to arrive, all or some."""
        if self._arrived_s is None:
            return False
        overdue = {due: at for due, at in self._awaited.items() if now_s - at > self._timeout_s}
        if now_s - self._arrived_s > self._timeout_s:
            return len(overdue) >= MISSING
        for due_ms, due_s in overdue.items():
            if self._reached_s - due_s > OVERTAKEN_S:
                del self._awaited[due_ms]
                self._outcomes.append(False)
        return self._outcomes.count(False) >= MISSING
