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
from duetime.pipeline.own import Probes

log = logging.getLogger(__name__)

#: How often two are sent, in seconds.
EVERY_S = 1.0

#: How long Kafka may take to answer when it is to end, in seconds.
LEAVE_S = 2.0


class Prober:
    """Sends probes to one cluster and observes their arrivals, in a thread of its own.

    Start it once.
    """

    def __init__(self, settings: Settings, clock: Clock, cluster: str | None = None) -> None:
        self._clock = clock
        self._cluster = cluster or ""
        self._probes = Probes(settings, "probe", cluster)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._probe, name="probe", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, and leave on their way those that are."""
        self._stopping.set()
        self._thread.join(LEAVE_S)

    def _probe(self) -> None:
        while not self._stopping.is_set():
            try:
                consumer = self._probes.consumer()
            except KafkaException as error:
                log.warning("probes cannot be read error=%s", words(error))
                self._stopping.wait(EVERY_S)
                continue
            try:
                while not self._stopping.is_set():
                    now_ms = self._clock.now_ms()
                    # What is acknowledged at once says how far the clocks are apart.
                    self._probes.send(now_ms, partial(self._taken, now_ms))
                    self._observe(consumer, time.monotonic() + EVERY_S)
            except (KafkaException, BufferError) as error:
                log.warning("probes failed error=%s", words(error))
            finally:
                consumer.close()

    def _taken(self, sent_ms: int, path: str, error: KafkaError | None, record: Message) -> None:
        if error is not None:
            return
        PROBES.labels(self._cluster, path).inc()
        received_ms, stamped_ms = self._clock.now_ms(), record.timestamp()[1]
        offset = Offset.seen(sent_ms=sent_ms, stamped_ms=stamped_ms, received_ms=received_ms)
        CLOCK_OFFSET_SECONDS.set(offset.ahead_ms / 1_000)

    def _observe(self, consumer: Consumer, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0 and not self._stopping.is_set():
            for probe, late_ms in self._probes.arrived(consumer, min(left_s, 0.1)):
                LATENESS_SECONDS.labels(self._cluster, probe.path).observe(late_ms / 1_000)
