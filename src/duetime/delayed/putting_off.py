"""Sending what is put off: a retry into its own partition, or a dead letter."""

import threading
from datetime import timedelta
from typing import Any, NamedTuple

import confluent_kafka

from duetime.delayed.options import ConsumerOptions
from duetime.delayed.retries import Tried, dead_headers, retry_headers
from duetime.errors import KafkaError
from duetime.outgoing import Header

#: How long what was put off may take to arrive, in seconds.
TIMEOUT_S = 30.0


class Sending(NamedTuple):
    """What is put off, and its topic and perhaps partition."""

    record: confluent_kafka.Message
    headers: list[Header]
    to: dict[str, Any]


class PuttingOff:
    """The producer of a consumer; opened when something is put off first. Thread-safe."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._options = options
        self._producer: confluent_kafka.Producer | None = None
        #: What has not arrived: why, the record, its headers, and where it was sent.
        self._failed: list[tuple[str, Sending]] = []
        self._lock = threading.Lock()

    def put_off(
        self, record: confluent_kafka.Message, retry_in: timedelta | None, now_ms: int
    ) -> None:
        """Send it so that it comes again, or to the dead letters after its last attempt."""
        policy = self._options.policy
        tried = Tried.of(record).again(record, now_ms)
        if tried.attempts >= policy.attempts:
            headers = dead_headers(record, tried, policy, now_ms)
            self._send(record, headers, topic=self._options.dead_letters)
            return
        at_ms = now_ms + policy.wait_ms(tried.attempts, retry_in)
        headers = retry_headers(record, tried, policy, at_ms)
        self._send(record, headers, topic=record.topic() or "", partition=record.partition() or 0)

    def flush(self) -> None:
        """Wait until everything has arrived, after another try for what has not.

        Raises KafkaError where something has not now.
        """
        if self._producer is None:
            return
        with self._lock:
            again, self._failed = self._failed, []
        for _, sending in again:
            self._produce(sending)
        left = self._producer.flush(TIMEOUT_S)
        with self._lock:
            failed = list(self._failed)
        if left or failed:
            why = failed[0][0] if failed else "no answer"
            raise KafkaError(
                f"{left + len(failed)} records could not be put off ({why}): nothing is committed"
            )

    def _send(
        self,
        record: confluent_kafka.Message,
        headers: list[Header],
        **to: Any,  # noqa: ANN401 (topic and partition)
    ) -> None:
        if self._producer is None:
            self._producer = confluent_kafka.Producer(
                self._options.shared() | {"acks": "all", "enable.idempotence": True}
            )
        self._produce(Sending(record, headers, to))
        self._producer.poll(0)

    def _produce(self, sending: "Sending") -> None:
        assert self._producer is not None  # noqa: S101 (whoever sends has opened it)

        def report(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                with self._lock:
                    self._failed.append((error.str(), sending))

        self._producer.produce(
            value=sending.record.value(),
            key=sending.record.key(),
            headers=list(sending.headers),
            on_delivery=report,
            **sending.to,
        )
