"""Sending what is put off: a retry into its own partition, or a dead letter."""

import threading
from dataclasses import dataclass
from datetime import timedelta

import confluent_kafka

from duetime.delayed.options import ConsumerOptions
from duetime.delayed.retries import Tried, dead_headers, retry_headers
from duetime.errors import KafkaError
from duetime.outgoing import ANY_PARTITION, Header
from duetime.producing import enqueue

#: How long what was put off may take to arrive, in seconds.
TIMEOUT_S = 30.0

#: The largest that librdkafka allows: what a topic takes is for the broker to say.
MOST_BYTES = 1_000_000_000

#: Answers that another try will not change.
REFUSED = (
    confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE,
    confluent_kafka.KafkaError.INVALID_RECORD,
    confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED,
)


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """What is put off, and where to."""

    record: confluent_kafka.Message
    headers: list[Header]
    topic: str
    partition: int = ANY_PARTITION
    #: What is sent where the topic does not take this one.
    instead: "Sending | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """What has not arrived, and why."""

    why: str
    sending: Sending


class PuttingOff:
    """The producer of a consumer; opened when something is put off first. Thread-safe."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._options = options
        self._producer: confluent_kafka.Producer | None = None
        self._failed: list[Failed] = []
        self._lock = threading.Lock()

    def put_off(
        self, record: confluent_kafka.Message, retry_in: timedelta | None, now_ms: int
    ) -> None:
        """Send it so that it comes again, or to the dead letters after its last attempt."""
        policy = self._options.policy
        tried = Tried.of(record).again(record, now_ms)
        headers = dead_headers(record, tried, policy, now_ms)
        dead = Sending(record, headers, self._options.dead_letters)
        if tried.attempts >= policy.attempts:
            self._send(dead)
            return
        at_ms = now_ms + policy.wait_ms(tried.attempts, retry_in)
        headers = retry_headers(record, tried, policy, at_ms)
        self._send(Sending(record, headers, record.topic() or "", record.partition() or 0, dead))

    def flush(self) -> None:
        """Wait until everything has arrived, after another try for what has not.

        Raises KafkaError where something has not now.
        """
        if self._producer is None:
            return
        with self._lock:
            again = list(self._failed)
        for each in again:
            self._send(each.sending)
            with self._lock:
                self._failed.remove(each)
        left = self._producer.flush(TIMEOUT_S)
        with self._lock:
            failed = list(self._failed)
        if left or failed:
            why = failed[0].why if failed else "no answer"
            raise KafkaError(
                f"{left + len(failed)} records could not be put off ({why}): nothing is committed"
            )

    def _send(self, sending: Sending) -> None:
        if self._producer is None:
            self._producer = confluent_kafka.Producer(
                self._options.shared()
                | {"acks": "all", "enable.idempotence": True, "message.max.bytes": MOST_BYTES}
            )

        def report(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                self._note(error, sending)

        try:
            enqueue(
                self._producer,
                sending.topic,
                value=sending.record.value(),
                key=sending.record.key(),
                headers=sending.headers,
                partition=sending.partition,
                on_delivery=report,
            )
        except confluent_kafka.KafkaException as error:
            self._note(error.args[0], sending)
        self._producer.poll(0)

    def _note(self, error: confluent_kafka.KafkaError, sending: Sending) -> None:
        again = sending.instead if error.code() in REFUSED else None
        with self._lock:
            self._failed.append(Failed(error.str(), again or sending))
