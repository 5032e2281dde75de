"""Punctuality, measured all the time: two messages of our own a second, and how late they come.

One goes through the lanes and one through the store, by the way that everybody's take: from the
intake topic to a topic of our own, where the broker stamps them. What is measured is what a message
sent now would meet, also when nobody else sends any.
"""

import logging
import threading
import time
import uuid
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from duetime.clock import Clock, Offset
from duetime.config import Settings
from duetime.errors import words
from duetime.message import DUE_AT_MS, DUE_ID
from duetime.metrics import CLOCK_OFFSET_SECONDS, LATENESS_SECONDS, PROBES
from duetime.pipeline.own import OwnMessages
from duetime.stores.records import headers_of

log = logging.getLogger(__name__)

#: How often two are sent, in seconds.
EVERY_S = 1.0

#: How long before they are due, in ms: well within the lanes; and beyond the horizon by as much.
AHEAD_MS = 500

#: How long Kafka may take to answer when it is to end, in seconds.
LEAVE_S = 2.0

LANES, STORE = "lanes", "store"

#: At most so many are taken at a time: while a pipeline warms up, more than ours arrive.
TAKEN = 1_000


class Prober:
    """Sends probes and observes their arrivals, in a thread of its own. Start it once."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._own = OwnMessages(settings)
        self._delay_ms = {LANES: AHEAD_MS, STORE: settings.horizon_ms + AHEAD_MS}
        #: Tells ours from those of whoever led before.
        self._run = uuid.uuid4().hex[:12]
        self._sent = 0
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
                consumer = self._own.consumer()
            except KafkaException as error:
                log.warning("probes cannot be read error=%s", words(error))
                self._stopping.wait(EVERY_S)
                continue
            try:
                while not self._stopping.is_set():
                    # While Kafka takes none, none is sent: it would be late by its own fault.
                    if not self._own.producer.flush(0):
                        self._send()
                    self._observe(consumer, time.monotonic() + EVERY_S)
            except (KafkaException, BufferError) as error:
                log.warning("probes failed error=%s", words(error))
            finally:
                consumer.close()

    def _send(self) -> None:
        now_ms = self._clock.now_ms()
        for path, delay_ms in self._delay_ms.items():
            self._sent += 1
            unique = f"probe-{self._run}.{path}.{self._sent}"
            taken = partial(self._taken, path, now_ms)
            self._own.send(now_ms + delay_ms, b"probe", unique=unique, on_delivery=taken)
        # What is acknowledged at once says how far the clocks are apart.
        self._own.producer.flush(EVERY_S)

    def _taken(self, path: str, sent_ms: int, error: KafkaError | None, record: Message) -> None:
        if error is not None:
            return
        PROBES.labels(path).inc()
        received_ms, stamped_ms = self._clock.now_ms(), record.timestamp()[1]
        offset = Offset.seen(sent_ms=sent_ms, stamped_ms=stamped_ms, received_ms=received_ms)
        CLOCK_OFFSET_SECONDS.set(offset.ahead_ms / 1_000)

    def _observe(self, consumer: Consumer, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0 and not self._stopping.is_set():
            for record in consumer.consume(TAKEN, timeout=min(left_s, 0.1)):
                if not record.error():
                    self._arrived(record)

    def _arrived(self, record: Message) -> None:
        headers = dict(headers_of(record))
        name = (headers.get(DUE_ID) or b"").decode()
        _, ours, rest = name.partition(f"-probe-{self._run}.")
        if ours:
            late_ms = record.timestamp()[1] - int(headers[DUE_AT_MS] or 0)
            LATENESS_SECONDS.labels(rest.split(".")[0]).observe(late_ms / 1_000)
