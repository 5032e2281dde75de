"""Sending what is put off: a retry into its own partition, or a dead letter."""

import threading
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import confluent_kafka

from duetime.copies import OF_ANY_SIZE, TOO_LARGE, Copy, dead_letter, hand_over
from duetime.delayed.options import ConsumerOptions
from duetime.delayed.retries import Tried, dead_words, retry_headers, senders
from duetime.errors import KafkaError

#: How long what was put off may take to arrive, in seconds.
TIMEOUT_S = 30.0

#: Answers that another try will not change.
REFUSED = (
    *TOO_LARGE,
    confluent_kafka.KafkaError.INVALID_RECORD,
    confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED,
)


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """What is put off."""

    copy: Copy
    #: What is sent where the topic does not take this one.
    instead: Copy | None = None


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
        #: What is sent in place of what was too large: not in a report, where nothing can wait for
        #: room in the producer's queue.
        self._less: deque[Copy] = deque()
        self._lock = threading.Lock()

    def put_off(
        self, record: confluent_kafka.Message, retry_in: timedelta | None, now_ms: int
    ) -> None:
        """Send it so that it comes again, or to the dead letters after its last attempt."""
        policy = self._options.policy
        tried = Tried.of(record).again(record, now_ms)
        words = dead_words(record, tried, policy, now_ms)
        dead = dead_letter(self._options.dead_letters, record, senders(record), words)
        if tried.attempts >= policy.attempts:
            self._send(Sending(dead))
            return
        at_ms = now_ms + policy.wait_ms(tried.attempts, retry_in)
        retry = Copy(
            topic=record.topic() or "",
            partition=record.partition() or 0,
            key=record.key(),
            value=record.value(),
            headers=retry_headers(record, tried, policy, at_ms),
        )
        self._send(Sending(retry, dead))

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
        while self._less and not left:
            self._send(Sending(self._less.popleft()))
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
                self._options.shared() | {"acks": "all", "enable.idempotence": True} | OF_ANY_SIZE
            )

        def report(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                self._note(error, sending)

        try:
            hand_over(self._producer, sending.copy, report)
        except confluent_kafka.KafkaException as error:
            self._note(error.args[0], sending)
        self._producer.poll(0)

    def _note(self, error: confluent_kafka.KafkaError, sending: Sending) -> None:
        if error.code() in TOO_LARGE and sending.copy.less is not None:
            # Not by the next commit: there may be none, where this one is not survived.
            self._less.append(sending.copy.less)
            return
        again = sending
        if sending.instead is not None and error.code() in REFUSED:
            again = Sending(sending.instead)
        with self._lock:
            self._failed.append(Failed(error.str(), again))
