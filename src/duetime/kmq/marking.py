"""What writes markers: a producer into a queue's markers topic."""

import logging
import threading
from collections.abc import Callable, Sequence

import confluent_kafka

from duetime.client import producer_properties
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.kmq.markers import END_VALUE, GIVEN_BACK, GivenBack, MarkerKey, start_value
from duetime.producing import enqueue

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
        self._producer = confluent_kafka.Producer(
            producer_properties(settings) | {"linger.ms": LINGER_MS}
        )
        self._lock = threading.Lock()
        self._unwritten = 0
        self._is_closed = False

    def start_all(self, keys: Sequence[MarkerKey], timeout_ms: int) -> None:
        """Write start markers, and wait until they are there. Raises KafkaError."""
        self._write_all(keys, start_value(timeout_ms))

    def end_all(self, keys: Sequence[MarkerKey]) -> None:
        """Write end markers, and wait until they are there. Raises KafkaError."""
        self._write_all(keys, END_VALUE)

    def restart(self, key: MarkerKey, timeout_ms: int) -> None:
        """From now on its work may take so long. Not waited for."""
        self._write(key, start_value(timeout_ms), self._told)

    def give_back(self, key: MarkerKey, why: GivenBack, retry_ms: int) -> None:
        """It is not worked on any more, and to be delivered again in so many ms."""
        self._write(key, start_value(retry_ms), self._told, [(GIVEN_BACK, why.encode())])

    def end(self, key: MarkerKey) -> None:
        """Its work is done. Not waited for: at worst it is done again."""
        self._write(key, END_VALUE, self._told)

    def close(self) -> None:
        """Wait until everything is there, or has failed; from now on with each marker."""
        self._is_closed = True
        self._producer.flush(TIMEOUT_S)
        with self._lock:
            unwritten, self._unwritten = self._unwritten, 0
        if unwritten:
            log.warning("markers were not written topic=%s markers=%d", self._topic, unwritten)

    def _write_all(self, keys: Sequence[MarkerKey], value: bytes) -> None:
        failed: list[str] = []

        def told(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                failed.append(str(error.str()))

        for key in keys:
            self._write(key, value, told)
        # Others that were written meanwhile are waited for as well: no harm.
        if self._producer.flush(TIMEOUT_S) or failed:
            why = failed[0] if failed else f"no answer for {TIMEOUT_S:.0f} s"
            raise KafkaError(f"markers were not written to {self._topic} ({why})")

    def _write(
        self,
        key: MarkerKey,
        value: bytes,
        told: OnMarker,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        try:
            enqueue(
                self._producer,
                self._topic,
                value=value,
                key=key.encoded(),
                headers=headers,
                # Where its message is: so all markers of a message stay in order.
                partition=key.partition,
                on_delivery=told,
            )
        except confluent_kafka.KafkaException as error:
            raise KafkaError(
                f"a marker cannot be written to {self._topic} ({error.args[0].str()})"
            ) from error
        if self._is_closed:
            self._producer.flush(TIMEOUT_S)
        else:
            self._producer.poll(0)

    def _told(self, error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
        if error is not None:
            with self._lock:
                self._unwritten += 1
