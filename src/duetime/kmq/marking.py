"""What writes markers: a producer into a queue's markers topic.

One that fails for good is replaced, and what it still held is lost. Of each marker that is safe: a
batch whose start markers are not there is read again, and a message whose end is lost comes again.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import confluent_kafka

from duetime.client import producer_properties
from duetime.config import Settings
from duetime.errors import ClientFailed, KafkaError
from duetime.kmq.markers import END_VALUE, GIVEN_BACK, GivenBack, MarkerKey, start_value
from duetime.producing import enqueue, is_fatal

#: Called with what went wrong, if something did.
OnMarker = Callable[[confluent_kafka.KafkaError | None, confluent_kafka.Message], None]

log = logging.getLogger(__name__)

#: How long start markers may take to be acknowledged, in seconds.
TIMEOUT_S = 30.0

#: Markers are small, and batches of them are not: a few ms of company is worth it.
LINGER_MS = 2


class Marking:
    """Writes the markers of one queue. Thread-safe, as the producer inside it."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._topic = topic
        self._properties = producer_properties(settings) | {"linger.ms": LINGER_MS}
        self._producer = confluent_kafka.Producer(self._properties)
        self._lock = threading.Lock()
        self._unwritten = 0
        self._is_closed = False

    def start_all(self, keys: Sequence[MarkerKey], timeout_ms: int) -> None:
        """Write start markers, and wait until they are there.

        Raises KafkaError; ClientFailed where another client is to try, which is there by then.
        """
        self._write_all(keys, start_value(timeout_ms))

    def end_all(self, keys: Sequence[MarkerKey]) -> None:
        """Write end markers, and wait until they are there. Raises as `start_all` does."""
        self._write_all(keys, END_VALUE)

    def restart(self, key: MarkerKey, timeout_ms: int) -> None:
        """From now on its work may take so long. Not waited for."""
        self._write(key, start_value(timeout_ms))

    def give_back(self, key: MarkerKey, why: GivenBack, retry_ms: int) -> None:
        """It is not worked on any more, and to be delivered again in so many ms."""
        self._write(key, start_value(retry_ms), [(GIVEN_BACK, why.encode())])

    def end(self, key: MarkerKey) -> None:
        """Its work is done. Not waited for: at worst it is done again."""
        self._write(key, END_VALUE)

    def close(self) -> None:
        """Wait until everything is there, or has failed; from now on with each marker."""
        self._is_closed = True
        with suppress(confluent_kafka.KafkaException):
            self._producer.flush(TIMEOUT_S)
        with self._lock:
            unwritten, self._unwritten = self._unwritten, 0
        self._tell_unwritten(unwritten)

    def _write_all(self, keys: Sequence[MarkerKey], value: bytes) -> None:
        producer, failed = self._producer, list[str]()

        def told(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                failed.append(str(error.str()))

        try:
            for key in keys:
                self._produce(producer, key, value, told)
            # Others that were written meanwhile are waited for as well: no harm.
            left = producer.flush(TIMEOUT_S)
        except confluent_kafka.KafkaException as error:
            raise self._failed(producer, error.args[0]) from error
        if left or failed:
            why = failed[0] if failed else f"no answer for {TIMEOUT_S:.0f} s"
            raise KafkaError(f"markers were not written to {self._topic} ({why})")

    def _write(
        self, key: MarkerKey, value: bytes, headers: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        """Not waited for. By another client, where this one has failed for good."""
        try:
            self._write_by(self._producer, key, value, headers)
        except ClientFailed:
            self._write_by(self._producer, key, value, headers)

    def _write_by(
        self,
        producer: confluent_kafka.Producer,
        key: MarkerKey,
        value: bytes,
        headers: Sequence[tuple[str, bytes]],
    ) -> None:
        try:
            self._produce(producer, key, value, self._told, headers)
            if self._is_closed:
                producer.flush(TIMEOUT_S)
        except confluent_kafka.KafkaException as error:
            raise self._failed(producer, error.args[0]) from error

    def _produce(
        self,
        producer: confluent_kafka.Producer,
        key: MarkerKey,
        value: bytes,
        told: OnMarker,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """Raises KafkaException."""
        enqueue(
            producer,
            self._topic,
            value=value,
            key=key.encoded(),
            headers=headers,
            # Where its message is: so all markers of a message stay in order.
            partition=key.partition,
            on_delivery=told,
        )
        producer.poll(0)

    def _failed(
        self, producer: confluent_kafka.Producer, error: confluent_kafka.KafkaError
    ) -> KafkaError:
        """What to raise. A client that has failed for good is replaced, by who finds it first."""
        detail = f"a marker cannot be written to {self._topic} ({error.str()})"
        if not is_fatal(error):
            return KafkaError(detail)
        with self._lock:
            if self._producer is producer:
                log.error("another client takes its place: %s", detail)
                self._tell_unwritten(len(producer))
                self._producer = confluent_kafka.Producer(self._properties)
        return ClientFailed(detail)

    def _tell_unwritten(self, markers: int) -> None:
        if markers:
            log.warning("markers were not written topic=%s markers=%d", self._topic, markers)

    def _told(self, error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
        if error is not None:
            with self._lock:
                self._unwritten += 1
