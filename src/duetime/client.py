"""Scheduling from Python: a producer whose messages arrive when they are due. Needs no Spark.

`Client` and `AsyncClient` do so over HTTP, by `duetime api`; they are in `duetime.http`.

with Producer(bootstrap="127.0.0.1:9092") as producer:
    id = producer.produce("orders", "remind me", key="42", in_=timedelta(seconds=10))
"""

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import confluent_kafka
from confluent_kafka.admin import AdminClient

from duetime.clock import Clock, SystemClock, duration_ms
from duetime.config import Settings, load_settings
from duetime.connection import librdkafka_properties
from duetime.delaying import (
    check_not_compacted,
    check_not_transactional,
    delayed,
    in_batches,
)
from duetime.errors import (
    ClientFailed,
    InvalidMessage,
    KafkaError,
    Reason,
    RecordRefused,
    TooLate,
)
from duetime.message import MessageId
from duetime.outgoing import (
    ANY_PARTITION,
    Headers,
    Outgoing,
    Payload,
    Wanted,
    cancelled,
    due_time_ms,
    new_unique,
)
from duetime.producing import FULL_QUEUE_S, is_fatal
from duetime.recurrence import Recurrence
from duetime.recurring import record_of
from duetime.topics import OVERHEAD_BYTES

if TYPE_CHECKING:
    from duetime.http import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "OnDelivery", "Producer"]

#: Called with None once the record has arrived, or with what went wrong; and the message's full id.
OnDelivery = Callable[[KafkaError | None, str], None]

#: How long is tried to deliver a record to the intake topic, in ms.
DELIVERY_TIMEOUT_MS = 60_000

#: Of a producer for one record that may as well be sent twice: one that is idempotent asks for an
#: id first, and again only after half a second where it was not connected yet.
AT_ONCE: dict[str, Any] = {"enable.idempotence": False, "linger.ms": 0}

#: How long what was produced before an exception may take to arrive, in seconds.
AFTER_EXCEPTION_S = 5.0

#: What Kafka says of a record that it will not take, however often it is sent.
FOR_GOOD = frozenset(
    {
        confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE,
        confluent_kafka.KafkaError.RECORD_LIST_TOO_LARGE,
        confluent_kafka.KafkaError.INVALID_TIMESTAMP,
        confluent_kafka.KafkaError.INVALID_RECORD,
    }
)


class Producer:
    """Sends messages to be delivered later. Thread-safe, as the confluent-kafka producer inside it.

    `settings` default to those of the environment and of duetime.toml; `bootstrap` goes over them,
    and further properties of librdkafka go over both: `Producer(**{"linger.ms": 0})`. As a context
    manager it waits for all deliveries at the end.

    With `deliver_together`, records of delayed topics that are due within one stretch of so long
    are delivered together, at its end: cheaper to read, and later by as much at most.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bootstrap: str | None = None,
        clock: Clock | None = None,
        deliver_together: timedelta | None = None,
        **librdkafka: Any,  # noqa: ANN401 (librdkafka's own properties)
    ) -> None:
        self._settings = with_bootstrap(settings, bootstrap)
        self._clock = clock or SystemClock()
        self._librdkafka = librdkafka
        self._batch_ms = duration_ms(deliver_together) if deliver_together else 0
        #: Delayed topics that were looked at.
        self._known_delayed: set[str] = set()
        self._producer = confluent_kafka.Producer(producer_properties(self._settings) | librdkafka)
        self._lock = threading.Lock()
        #: Whether this thread is in a report.
        self._in_report = threading.local()
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
        deliver_after: datetime | None = None,
        recurrence: Recurrence | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> str:
        """Schedule a message for `topic`, and return its full id, which `cancel` takes.

        It is due `at` an instant (with a zone) or `in_` a while from now; what is past is due at
        once. Text is sent as UTF-8. `id` is the sender's own: sent again while it waits, with the
        same due time, a message is still delivered once. `partition` is the destination's, and
        `cluster` the name that the configuration has for the one where it is, if it is another.

        With `deliver_after`, an instant, the record goes to a delayed topic itself, named here by
        its own name or by that of its visible one; `partition` is that topic's.

        With a `recurrence` it comes again and again, from now or from its due time on: a series,
        and what is returned is its name, the `id`. Sent again under that name, it takes the place
        of the series that there is.

        Returns before the record has arrived: see `on_delivery` and `flush`. Calls the reports of
        earlier ones that have come in; what they raise is raised, and the record is on its way
        then. Waits while the local queue is full; where a report sends, it raises KafkaError
        instead. Raises InvalidMessage, whose `reason` says what cannot be taken, and KafkaError
        where the client has failed for good.
        """
        wanted = Wanted(
            topic=topic,
            value=value,
            key=key,
            headers=headers,
            partition=partition,
            cluster=cluster,
        )
        unique = new_unique() if id is None else id
        now_ms = self._clock.now_ms()
        if deliver_after is None:
            record = record_of(
                wanted,
                recurrence,
                self._settings,
                at=at,
                in_=in_,
                now_ms=now_ms,
                unique=unique,
            )
        elif recurrence is not None:
            raise InvalidMessage(
                Reason.TWO_DUE_TIMES, "a series has runs: give its start with at or in_, or none"
            )
        else:
            due_ms = due_time_ms(at, in_, now_ms, deliver_after)
            record = self._delayed(wanted, due_ms, now_ms, unique)
        self.send(record, on_delivery)
        self._serve()
        return record.name

    def cancel(self, id: str, on_delivery: OnDelivery | None = None) -> None:  # noqa: A002
        """Ask that the message with this full id is not delivered. Safe to repeat.

        The delivery report says that the request has arrived; `WheelReader.find` says whether the
        message is cancelled. Raises InvalidMessage (bad-id), and TooLate if its release has begun.
        """
        identity = MessageId.parse(id)
        check_not_too_late(identity, self._settings, self._clock.now_ms())
        self.send(cancelled(identity, self._settings), on_delivery)
        self._serve()

    def send(self, record: Outgoing, on_delivery: OnDelivery | None = None) -> None:
        """Send a record that is made already; as `produce`, but reports wait for `poll`."""
        while not self.offer(record, on_delivery):
            self.poll(FULL_QUEUE_S)

    def offer(self, record: Outgoing, on_delivery: OnDelivery | None = None) -> bool:
        """The same without waiting: returns whether there was room in the local queue."""
        try:
            self._producer.produce(
                record.topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                partition=ANY_PARTITION if record.partition is None else record.partition,
                on_delivery=self._reporter(str(record.id), on_delivery),
            )
        except BufferError:
            return False
        except confluent_kafka.KafkaException as error:
            raise undelivered_error(str(record.id), error.args[0]) from error
        return True

    def poll(self, timeout_s: float = 0.0) -> int:
        """Call the delivery reports that have come in, as `produce` does; returns how many.

        Raises ClientFailed where the client has failed for good: some reports may never come.
        """
        if self._is_in_report():
            # confluent-kafka would end the process.
            raise KafkaError("a delivery report cannot wait for others: send from outside of it")
        try:
            return self._producer.poll(timeout_s)
        except confluent_kafka.KafkaException as error:
            raise _client_failed(error.args[0]) from error

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

    def _delayed(self, wanted: Wanted, due_ms: int, now_ms: int, unique: str) -> Outgoing:
        check_not_transactional(self._librdkafka)
        record = delayed(
            wanted,
            self._settings,
            deliver_after_ms=in_batches(due_ms, self._batch_ms),
            now_ms=now_ms,
            unique=unique,
        )
        if record.topic not in self._known_delayed:
            admin = AdminClient(librdkafka_properties(self._settings))
            if check_not_compacted(admin, record.topic):
                self._known_delayed.add(record.topic)
        return record

    def _serve(self) -> None:
        """Call the reports that have come in; where one of them sends, its own caller does."""
        if not self._is_in_report():
            self.poll()

    def _is_in_report(self) -> bool:
        return getattr(self._in_report, "now", False)

    def _reporter(self, id: str, on_delivery: OnDelivery | None) -> Callable[..., None]:  # noqa: A002
        def report(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if on_delivery is not None:
                self._in_report.now = True
                try:
                    on_delivery(undelivered_error(id, error) if error else None, id)
                finally:
                    self._in_report.now = False
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
            f"message {identity} is due or about to be: it is on its way, and cannot be changed"
        )


def undelivered_error(id: str, error: confluent_kafka.KafkaError) -> KafkaError:  # noqa: A002
    """What became of a record that was not acknowledged."""
    if is_fatal(error):
        return _client_failed(error)
    if error.code() in FOR_GOOD:
        return RecordRefused(
            f"Kafka refuses message {id} ({error.str()}): see max_message_bytes, and the intake "
            "topic's max.message.bytes"
        )
    return KafkaError(
        f"message {id} may not have arrived ({error.str()}): send it again with the same id"
    )


def _client_failed(error: confluent_kafka.KafkaError) -> ClientFailed:
    return ClientFailed(
        f"Kafka's client has failed for good ({error.str()}): send with another one, and what was "
        "not acknowledged again with the same ids"
    )


def with_bootstrap(settings: Settings | None, bootstrap: str | None) -> Settings:
    """The settings, those of the environment where none are given, for this cluster."""
    if settings is None:
        return load_settings(bootstrap=bootstrap)
    return settings.model_copy(update={"bootstrap": bootstrap}) if bootstrap else settings


if not TYPE_CHECKING:  # a checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:
        # httpx takes longer to import than all the rest, and most need none of it.
        if name in ("AsyncClient", "Client"):
            return getattr(import_module("duetime.http"), name)
        raise AttributeError(f"module {__name__} has no attribute {name}")
