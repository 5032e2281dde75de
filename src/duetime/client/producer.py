"""The Kafka producer of an application: schedules and cancels messages.

```
with Producer(bootstrap="127.0.0.1:9092") as producer:
    id = producer.produce("orders", "remind me", key="42", in_=timedelta(seconds=10))
```
"""

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

import confluent_kafka
from confluent_kafka.admin import AdminClient

from duetime.core.clock import Clock, SystemClock, duration_ms
from duetime.core.cron import Recurrence
from duetime.core.errors import (
    ClientFailed,
    InvalidMessage,
    KafkaError,
    Reason,
    RecordRefused,
    TooLate,
)
from duetime.core.messages import MessageId
from duetime.core.records import (
    ANY_PARTITION,
    Headers,
    IntakeRecord,
    MessageSpec,
    Payload,
    cancel_record,
    check_not_transactional,
    delayed_record,
    due_time_ms,
    intake_record,
    new_unique,
    round_up_to_batch,
)
from duetime.core.settings import Settings, with_bootstrap
from duetime.kafka.admin import check_not_compacted
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.producer import FULL_QUEUE_S, TOO_LARGE, is_fatal, producer_properties

#: Delivery callback. It gets None or the error, and the full id of the message.
OnDelivery = Callable[[KafkaError | None, str], None]

#: Properties of a producer that sends one record, which may arrive twice. An idempotent producer
#: asks for an id first, and repeats that only after half a second if it is not connected yet.
SINGLE_RECORD: dict[str, Any] = {"enable.idempotence": False, "linger.ms": 0}

#: Time to flush when the `with` block has raised, in seconds.
FLUSH_AFTER_ERROR_S = 5.0

#: Error codes of a record that Kafka refuses however often it is sent.
PERMANENT_ERRORS = frozenset(
    (
        *TOO_LARGE,
        confluent_kafka.KafkaError.INVALID_TIMESTAMP,
        confluent_kafka.KafkaError.INVALID_RECORD,
    )
)


class Producer:
    """Producer of delayed messages. Thread-safe, like the confluent-kafka producer inside it.

    As a context manager it flushes at the end.

    Parameters
    ----------
    settings
        Default: the environment and duetime.toml.
    bootstrap
        Kafka's bootstrap servers, in place of those of the settings.
    clock
        Default: the system's.
    batch_window
        Deliver records of delayed topics that are due within one window of this length together, at
        its end. This is cheaper to read, and delays a record by at most one window.
    **librdkafka
        Further properties of librdkafka, over the settings: `Producer(**{"linger.ms": 0})`.

    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bootstrap: str | None = None,
        clock: Clock | None = None,
        batch_window: timedelta | None = None,
        **librdkafka: Any,  # noqa: ANN401 (librdkafka's properties)
    ) -> None:
        self._settings = with_bootstrap(settings, bootstrap)
        self._clock = clock or SystemClock()
        self._librdkafka = librdkafka
        self._batch_ms = duration_ms(batch_window) if batch_window else 0
        self._checked_topics: set[str] = set()
        self._producer = confluent_kafka.Producer(producer_properties(self._settings) | librdkafka)
        self._lock = threading.Lock()
        #: `active` is true while this thread is in a delivery callback.
        self._callback = threading.local()
        self._unreported = 0

    def produce(  # noqa: PLR0913 (the parts of a message)
        self,
        topic: str,
        value: Payload = None,
        *,
        key: Payload = None,
        headers: Headers | None = None,
        at: datetime | None = None,
        in_: timedelta | None = None,
        id: str | None = None,  # noqa: A002 (the field's word)
        partition: int | None = None,
        cluster: str | None = None,
        deliver_after: datetime | None = None,
        recurrence: Recurrence | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> str:
        """Schedule a message for `topic`, and return its full id, which `cancel` takes.

        It is due `at` an instant with a zone, or `in_` a delay from now; the past is due at once.
        The key, the value and those of headers are bytes, or text to be sent as UTF-8. `id` is the
        idempotency key (default: random): a message sent again with the same key and due time,
        while the first one is pending, is delivered once. `partition` is that of the destination
        (default: by the key), and `cluster` the name of its cluster in the settings, if another.

        With `deliver_after`, an instant with a zone, the record goes to a delayed topic; `topic` is
        its name, or that of its visible topic. With a `recurrence` it is a schedule, which starts
        at the due time, or now; its name, the `id`, is returned. It replaces one of that name.

        Returns before Kafka has acknowledged the record: see `on_delivery` and `flush`. Blocks
        while the local queue is full. Also calls the callbacks of earlier records; an exception of
        a callback is raised here, and the record is on its way nevertheless.

        Raises InvalidMessage, whose `reason` says why intake would reject the message, and
        KafkaError if the client has failed for good, or the queue is full inside of a callback.
        """
        spec = MessageSpec(
            topic=topic, value=value, key=key, headers=headers, partition=partition, cluster=cluster
        )
        unique = new_unique() if id is None else id
        now_ms = self._clock.now_ms()
        if deliver_after is None:
            record = intake_record(
                spec, recurrence, self._settings, at=at, in_=in_, now_ms=now_ms, unique=unique
            )
        elif recurrence is not None:
            raise InvalidMessage(
                Reason.TWO_DUE_TIMES,
                "a schedule takes no deliver_after: give its start with at or in_, or omit it",
            )
        else:
            due_ms = due_time_ms(at, in_, now_ms, deliver_after)
            record = self._delayed_record(spec, due_ms, now_ms, unique)
        self.send(record, on_delivery)
        self._serve_callbacks()
        return record.name

    def cancel(self, id: str, on_delivery: OnDelivery | None = None) -> None:  # noqa: A002
        """Request that the message with this full id is not delivered. Safe to repeat.

        The delivery report says that the request has arrived. `cancel_and_confirm` waits until it
        has taken effect. Raises InvalidMessage (bad-id), and TooLate if the release has begun.
        """
        identity = MessageId.parse(id)
        if identity.due_ms - self._clock.now_ms() < self._settings.short_delay_threshold_ms:
            raise TooLate(
                f"message {identity} is due or about to be: it is on its way, and cannot be changed"
            )
        self.send(cancel_record(identity, self._settings), on_delivery)
        self._serve_callbacks()

    def send(self, record: IntakeRecord, on_delivery: OnDelivery | None = None) -> None:
        """Send a finished record. Blocks while the local queue is full."""
        while not self.offer(record, on_delivery):
            self.poll(FULL_QUEUE_S)

    def offer(self, record: IntakeRecord, on_delivery: OnDelivery | None = None) -> bool:
        """Send a finished record without blocking; return whether the local queue had room."""
        try:
            self._producer.produce(
                record.topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                partition=ANY_PARTITION if record.partition is None else record.partition,
                on_delivery=self._delivery_callback(str(record.id), on_delivery),
            )
        except BufferError:
            return False
        except confluent_kafka.KafkaException as error:
            raise _delivery_error(str(record.id), error.args[0]) from error
        return True

    def poll(self, timeout_s: float = 0.0) -> int:
        """Call the delivery callbacks of what has arrived or failed; return their number.

        Raises ClientFailed if the client has failed for good: some callbacks may never be called.
        """
        if self._in_callback():
            # confluent-kafka would end the process.
            raise KafkaError("a delivery callback cannot wait for others: send from outside of it")
        try:
            return self._producer.poll(timeout_s)
        except confluent_kafka.KafkaException as error:
            raise _client_failed(error.args[0]) from error

    def flush(self, timeout_s: float | None = None) -> int:
        """Wait until all records have arrived or failed; return the number still in flight."""
        return self._producer.flush(-1 if timeout_s is None else timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush. Raises KafkaError if a record without `on_delivery` failed."""
        if kind is not None:
            self.flush(FLUSH_AFTER_ERROR_S)
            return
        in_flight = self.flush()
        with self._lock:
            undelivered, self._unreported = in_flight + self._unreported, 0
        if undelivered:
            raise KafkaError(
                f"{undelivered} messages did not arrive: check that the broker is up, and send "
                "them again with the same ids"
            )

    def _delayed_record(
        self, spec: MessageSpec, due_ms: int, now_ms: int, unique: str
    ) -> IntakeRecord:
        check_not_transactional(self._librdkafka)
        deliver_after_ms = round_up_to_batch(due_ms, self._batch_ms)
        record = delayed_record(
            spec, self._settings, deliver_after_ms=deliver_after_ms, now_ms=now_ms, unique=unique
        )
        if record.topic not in self._checked_topics:
            admin = AdminClient(librdkafka_properties(self._settings))
            if check_not_compacted(admin, record.topic):
                self._checked_topics.add(record.topic)
        return record

    def _serve_callbacks(self) -> None:
        # Inside of a callback, the outer call serves the others.
        if not self._in_callback():
            self.poll()

    def _in_callback(self) -> bool:
        return getattr(self._callback, "active", False)

    def _delivery_callback(
        self,
        id: str,  # noqa: A002
        on_delivery: OnDelivery | None,
    ) -> Callable[[confluent_kafka.KafkaError | None, confluent_kafka.Message], None]:
        def report(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if on_delivery is not None:
                self._callback.active = True
                try:
                    on_delivery(_delivery_error(id, error) if error else None, id)
                finally:
                    self._callback.active = False
            elif error is not None:
                with self._lock:
                    self._unreported += 1

        return report


def _delivery_error(id: str, error: confluent_kafka.KafkaError) -> KafkaError:  # noqa: A002
    if is_fatal(error):
        return _client_failed(error)
    if error.code() in PERMANENT_ERRORS:
        return RecordRefused(
            f"Kafka refuses message {id} ({error.str()}): see max_message_bytes, and the intake "
            "topic's max.message.bytes"
        )
    return KafkaError(
        f"message {id} may not have arrived ({error.str()}): send it again with the same id"
    )


def _client_failed(error: confluent_kafka.KafkaError) -> ClientFailed:
    return ClientFailed(
        f"Kafka's client has failed for good ({error.str()}): create another producer, and send "
        "what was not acknowledged again with the same ids"
    )
