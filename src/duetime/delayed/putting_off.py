"""Sending what is put off: a retry into its own partition, or a dead letter."""

import threading
from datetime import timedelta
from typing import Any

import confluent_kafka

from duetime.delayed.options import ConsumerOptions
from duetime.delayed.retries import Tried, dead_headers, retry_headers
from duetime.errors import KafkaError
from duetime.outgoing import Header

#: How long what was put off may take to arrive, in seconds.
TIMEOUT_S = 30.0


class PuttingOff:
    """The producer of a consumer; opened when something is put off first. Thread-safe."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._options = options
        self._producer: confluent_kafka.Producer | None = None
        self._failed: list[str] = []
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
        """Wait until everything has arrived. Raises KafkaError where something has not."""
        if self._producer is None:
            return
        left = self._producer.flush(TIMEOUT_S)
        with self._lock:
            failed, self._failed = self._failed, []
        if left or failed:
            why = failed[0] if failed else "no answer"
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
        self._producer.produce(
            value=record.value(),
            key=record.key(),
            headers=list(headers),
            on_delivery=self._report,
            **to,
        )
        self._producer.poll(0)

    def _report(
        self, error: confluent_kafka.KafkaError | None, _record: confluent_kafka.Message
    ) -> None:
        if error is not None:
            with self._lock:
                self._failed.append(error.str())
