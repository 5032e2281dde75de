"""Punctuality, measured all the time: two messages of our own a second, and how late they come.

One goes through the lanes and one through the store, by the way that everybody's take: from the
intake topic to a topic of our own, where the broker stamps them. What is measured is what a message
sent now would meet, also when nobody else sends any.
"""

import logging
import threading
import time
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from duetime.clock import Clock, Offset
from duetime.config import Settings
from duetime.errors import words
from duetime.metrics import CLOCK_OFFSET_SECONDS, LATENESS_SECONDS, PROBES
from duetime.pipeline.own import PATHS, Probes

log = logging.getLogger(__name__)

#: How often two are sent, in seconds.
EVERY_S = 1.0

#: Where none has come for so long, in seconds, they are lost, or wait for the end of an outage:
SILENT_S = 60.0
#: then, or where nobody can read them, they are sent this often, in seconds: enough to tell that
#: none comes. Each will come hours late, or be a dead letter where its topic is gone.
SELDOM_S = 60.0

#: How long Kafka may take to answer when they are to end, in seconds; all of them together.
LEAVE_S = 2.0

#: How much may be unknown of how far the clocks are apart, in ms: half an answer's way.
SURE_MS = 100


class Probers:
    """One for this cluster, and one for each other that is probed. Start them once."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        clusters = [name for name, each in settings.clusters.items() if each.probe_topic]
        self._probers = [Prober(settings, clock, each) for each in (None, *clusters)]

    def start(self) -> None:
        """Begin."""
        for each in self._probers:
            each.start()

    def close(self) -> None:
        """End all of them at once, and leave on their way what is."""
        until_s = time.monotonic() + LEAVE_S
        for each in self._probers:
            each.stop()
        for each in self._probers:
            each.join(until_s - time.monotonic())


class Prober:
    """Sends probes to one cluster and observes their arrivals, in a thread of its own.

    Start it once.
    """

    def __init__(self, settings: Settings, clock: Clock, cluster: str | None = None) -> None:
        self._clock = clock
        self._cluster = cluster or ""
        self._probes = Probes(settings, "probe", cluster)
        self._consumer: Consumer | None = None
        self._rhythms = {path: Rhythm() for path in PATHS}
        self._stopping = threading.Event()
        #: Held while it tells what it may not when it has ended.
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._probe, name="probe", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, and take back what only one that leads can say."""
        self._stopping.set()
        with self._telling:
            CLOCK_OFFSET_SECONDS.set(0)

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, if that takes no longer."""
        self._thread.join(max(0.0, timeout_s))

    def close(self) -> None:
        """End, and leave on their way those that are."""
        self.stop()
        self.join(LEAVE_S)

    def _probe(self) -> None:
        while not self._stopping.is_set():
            until_s = time.monotonic() + EVERY_S
            self._begin_to_read()
            try:
                self._send()
                self._observe(until_s)
            except (KafkaException, BufferError) as error:
                log.warning("probes failed error=%s", words(error))
                self._end_reading()
            self._stopping.wait(max(0.0, until_s - time.monotonic()))
        self._end_reading()

    def _begin_to_read(self) -> None:
        """Before the next are sent; where that fails they are sent all the same, and are missed."""
        try:
            self._consumer = self._consumer or self._probes.consumer()
        except KafkaException as error:
            log.warning("probes cannot be read error=%s", words(error))

    def _end_reading(self) -> None:
        if self._consumer:
            self._consumer.close()
        self._consumer = None

    def _send(self) -> None:
        """Those whose turn it is. Raises KafkaException, BufferError."""
        now_s = time.monotonic()
        is_read = self._consumer is not None
        rhythms = self._rhythms.items()
        paths = [path for path, each in rhythms if each.is_next(now_s, is_read=is_read)]
        now_ms = self._clock.now_ms()
        # What is acknowledged at once says how far the clocks are apart.
        self._probes.send(now_ms, partial(self._taken, now_ms), paths)

    def _taken(self, sent_ms: int, path: str, error: KafkaError | None, record: Message) -> None:
        if error is not None:
            return
        PROBES.labels(self._cluster, path).inc()
        received_ms, stamped_ms = self._clock.now_ms(), record.timestamp()[1]
        offset = Offset.seen(sent_ms=sent_ms, stamped_ms=stamped_ms, received_ms=received_ms)
        with self._telling:
            if offset.error_ms <= SURE_MS and not self._stopping.is_set():
                CLOCK_OFFSET_SECONDS.set(offset.ahead_ms / 1_000)

    def _observe(self, until_s: float) -> None:
        """What comes until then. Raises KafkaException."""
        consumer = self._consumer
        while consumer and not self._stopping.is_set():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            for probe, late_ms in self._probes.arrived(consumer, min(left_s, 0.1)):
                LATENESS_SECONDS.labels(self._cluster, probe.path).observe(late_ms / 1_000)
                self._rhythms[probe.path].heard(time.monotonic())


class Rhythm:
    """When probes of one path are sent: each second, and seldom where they do not come."""

    def __init__(self) -> None:
        self._heard_s = 0.0
        #: None before the first.
        self._sent_s: float | None = None

    def is_next(self, now_s: float, *, is_read: bool) -> bool:
        """Whether one is sent now, by the monotonic clock; the next then counts from here."""
        if self._sent_s is None:
            # None can have come before.
            self._heard_s = now_s
        elif now_s - self._sent_s < SELDOM_S and self._is_vain(now_s, is_read=is_read):
            return False
        self._sent_s = now_s
        return True

    def _is_vain(self, now_s: float, *, is_read: bool) -> bool:
        return not is_read or now_s - self._heard_s >= SILENT_S

    def heard(self, now_s: float) -> None:
        """One has come."""
        self._heard_s = now_s
