"""Scheduling from Python: a producer whose messages arrive when they are due. Needs no Spark.

with Producer(bootstrap="127.0.0.1:9092") as producer:
    id = producer.produce("orders", "remind me", key="42", in_=timedelta(seconds=10))
"""

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

import confluent_kafka

from duetime.clock import Clock, SystemClock
from duetime.config import Settings, load_settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError, TooLate
from duetime.message import MessageId
from duetime.outgoing import (
    Headers,
    Outgoing,
    Payload,
    Wanted,
    cancelled,
    due_time_ms,
    new_unique,
    scheduled,
)
from duetime.topics import OVERHEAD_BYTES

#: Called with None once the record has arrived, or with what went wrong; and the message's full id.
OnDelivery = Callable[[KafkaError | None, str], None]

#: How long is tried to deliver a record to the intake topic, in ms.
DELIVERY_TIMEOUT_MS = 60_000

#: How long to wait for room in a full local queue before looking again, in seconds.
FULL_QUEUE_S = 0.1

#: How long what was produced before an exception may take to arrive, in seconds.
AFTER_EXCEPTION_S = 5.0


class Producer:
    """Sends messages to be delivered later. Thread-safe, as the confluent-kafka producer inside it.

    `settings` default to those of the environment and of duetime.toml; `bootstrap` goes over them,
    and further properties of librdkafka go over both: `Producer(**{"linger.ms": 0})`. As a context
    manager it waits for all deliveries at the end.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bootstrap: str | None = None,
        clock: Clock | None = None,
        **librdkafka: Any,  # noqa: ANN401 (librdkafka's own properties)
    ) -> None:
        self._settings = _with_bootstrap(settings, bootstrap)
        self._clock = clock or SystemClock()
        self._producer = confluent_kafka.Producer(producer_properties(self._settings) | librdkafka)
        self._lock = threading.Lock()
        self._unreported = 0

    def produce(  # noqa: PLR0913 (a message has as many parts)
        self,
        topic: str,
        value: Payload = None,
        *,
        key: Payload = None,
        headers: Headers | None = None,
        at: datetime | None = None,
        in_: timedelta | None = None,
        id: str | None = None,  # noqa: A002 (what everybody calls it)
        partition: int | None = None,
        cluster: str | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> str:
        """Schedule a message for `topic`, and return its full id, which `cancel` takes.

        It is due `at` an instant (with a zone) or `in_` a while from now; what is past is due at
        once. Text is sent as UTF-8. `id` is the sender's own: sent again while it waits, with the
        same due time, a message is still delivered once. `partition` is the destination's, and
        `cluster` the name that the configuration has for the one where it is, if it is another.

        Returns before the record has arrived: see `on_delivery` and `flush`. Waits while the local
        queue is full. Raises InvalidMessage, whose `reason` says what cannot be taken, and
        KafkaError where the client has failed for good.
        """
        now_ms = self._clock.now_ms()
        record = scheduled(
            Wanted(
                topic=topic,
                value=value,
                key=key,
                headers=headers,
                partition=partition,
                cluster=cluster,
            ),
            self._settings,
            due_ms=due_time_ms(at, in_, now_ms),
            now_ms=now_ms,
            unique=new_unique() if id is None else id,
        )
        self._send(record, on_delivery)
        return str(record.id)

    def cancel(self, id: str, on_delivery: OnDelivery | None = None) -> None:  # noqa: A002
        """Ask that the message with this full id is not delivered. Safe to repeat.

        The delivery report says that the request has arrived; `WheelReader.find` says whether the
        message is cancelled. Raises InvalidMessage (bad-id), and TooLate if its release has begun.
        """
        identity = MessageId.parse(id)
        check_not_too_late(identity, self._settings, self._clock.now_ms())
        self._send(cancelled(identity, self._settings), on_delivery)

    def poll(self, timeout_s: float = 0.0) -> int:
        """Call the delivery reports that have come in, as `produce` does; returns how many."""
        return self._producer.poll(timeout_s)

    def flush(self, timeout_s: float | None = None) -> int:
        """Wait until everything has arrived or failed; returns how many are still under way."""
        return self._producer.flush(-1 if timeout_s is None else timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush. Raises KafkaError if a record failed and no `on_delivery` was told."""
        if kind is not None:
            self.flush(AFTER_EXCEPTION_S)
            return
        undelivered = self.flush() + self._take_unreported()
        if undelivered:
            raise KafkaError(
                f"{undelivered} messages did not arrive: see that the broker is up, and send them "
                "again with the same ids"
            )

    def _send(self, record: Outgoing, on_delivery: OnDelivery | None) -> None:
        report = self._reporter(str(record.id), on_delivery)
        while not self._queued(record, report):
            self._producer.poll(FULL_QUEUE_S)
        self._producer.poll(0)

    def _queued(self, record: Outgoing, report: Callable[..., None]) -> bool:
        try:
            self._producer.produce(
                record.topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                on_delivery=report,
            )
        except BufferError:
            return False
        except confluent_kafka.KafkaException as error:
            raise undelivered_error(str(record.id), error.args[0]) from error
        return True

    def _reporter(self, id: str, on_delivery: OnDelivery | None) -> Callable[..., None]:  # noqa: A002
        def report(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if on_delivery is not None:
                on_delivery(undelivered_error(id, error) if error else None, id)
            elif error is not None:
                with self._lock:
                    self._unreported += 1

        return report

    def _take_unreported(self) -> int:
        with self._lock:
            taken, self._unreported = self._unreported, 0
        return taken


def producer_properties(settings: Settings) -> dict[str, str | int | float | bool]:
    """Properties of a librdkafka producer into the intake topics."""
    ours: dict[str, str | int | float | bool] = {
        # Acknowledged by every in-sync replica, each record once however often it is retried.
        "acks": "all",
        "enable.idempotence": True,
        # librdkafka's default is not Java's: the same key must meet the same partition.
        "partitioner": "murmur2_random",
        "message.max.bytes": settings.max_message_bytes + OVERHEAD_BYTES,
        "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
    }
    return ours | librdkafka_properties(settings)


def check_not_too_late(identity: MessageId, settings: Settings, now_ms: int) -> None:
    """Raise TooLate if the message is so near that intake takes no cancel of it any more."""
    if identity.due_ms - now_ms < settings.horizon_ms:
        raise TooLate(
            f"message {identity} is delivered or about to be: it cannot be changed any more"
        )


def undelivered_error(id: str, error: confluent_kafka.KafkaError) -> KafkaError:  # noqa: A002
    """What became of a record that was not acknowledged."""
    return KafkaError(
        f"message {id} may not have arrived ({error.str()}): send it again with the same id"
    )


def _with_bootstrap(settings: Settings | None, bootstrap: str | None) -> Settings:
    if settings is None:
        return load_settings(bootstrap=bootstrap)
    return settings.model_copy(update={"bootstrap": bootstrap}) if bootstrap else settings
