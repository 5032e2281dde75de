"""Producers: properties, hand-over to a full queue, transactions, and copies with fallbacks."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, Message, Producer

from duetime.core import headers as H
from duetime.core.errors import KafkaError, Reason
from duetime.core.records import ANY_PARTITION, IntakeRecord
from duetime.core.settings import Settings
from duetime.core.topics import OVERHEAD_BYTES
from duetime.kafka.connection import Properties, librdkafka_properties

#: Called with the outcome of a record.
OnDelivery = Callable[[BrokerError | None, Message], None]

#: Called with the error of a copy that has failed, or with the record of one that has arrived.
OnFailure = Callable[[BrokerError], None]
OnArrival = Callable[[Message], None]

#: How long a producer tries to deliver a record to the intake topic, in ms.
DELIVERY_TIMEOUT_MS = 60_000

#: How long to wait for room in a full local queue before trying again, in seconds.
FULL_QUEUE_S = 0.1

#: Timeout of one step of a transaction, in seconds.
TIMEOUT_S = 20.0

#: Other transactions wait for this one: if it is left open, it may not last for long.
TRANSACTION = {"transaction.timeout.ms": 10_000, "delivery.timeout.ms": 10_000}

#: Errors for a record that is larger than its topic takes.
TOO_LARGE = (BrokerError.MSG_SIZE_TOO_LARGE, BrokerError.RECORD_LIST_TOO_LARGE)

#: Properties of a producer of copies. The broker decides what a topic takes, and 10**9 is the most
#: that librdkafka allows. A batch is refused as a whole: only a record that is larger than 64 KiB
#: goes alone, and no topic of duetime's takes less.
OF_ANY_SIZE = {"message.max.bytes": 1_000_000_000, "batch.size": 64 * 1024}

#: Acknowledged by every in-sync replica, each record once however often it is retried. With more
#: than one request in flight, librdkafka reports a record as delivered that no broker has: one that
#: a new leader has refused, if the leader takes the next request. A broker takes any first sequence
#: of a producer that it does not know (confluent-kafka-go's issue 921).
_IDEMPOTENT: Properties = {
    "acks": "all",
    "enable.idempotence": True,
    "max.in.flight.requests.per.connection": 1,
}

#: A key goes to the partition where Kafka's Java producer sends it, which librdkafka does not by
#: default.
_RELIABLE: Properties = _IDEMPOTENT | {"partitioner": "murmur2_random"}


def producer_properties(settings: Settings) -> Properties:
    """Return the properties of a librdkafka producer into the intake topics."""
    ours: Properties = {
        "message.max.bytes": settings.max_message_bytes + OVERHEAD_BYTES,
        "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
    }
    return _RELIABLE | ours | librdkafka_properties(settings)


def delivery_properties(settings: Settings) -> Properties:
    """Return the properties of a librdkafka producer into destinations."""
    ours: Properties = {
        "linger.ms": 0,
        "message.max.bytes": settings.max_message_bytes + 4 * OVERHEAD_BYTES,
        "allow.auto.create.topics": False,
    }
    return librdkafka_properties(settings) | _RELIABLE | ours


def enqueue(  # noqa: PLR0913 (the parts of a record)
    producer: Producer,
    topic: str,
    *,
    value: bytes | None,
    key: bytes | None,
    headers: Sequence[H.Header],
    partition: int,
    on_delivery: OnDelivery,
) -> None:
    """Produce a record; while the queue is full, serve delivery reports. Raises KafkaException."""
    while True:
        try:
            producer.produce(
                topic,
                value=value,
                key=key,
                headers=list(headers),
                partition=partition,
                on_delivery=on_delivery,
            )
        except BufferError:
            producer.poll(FULL_QUEUE_S)
        else:
            return


def is_fatal(error: BrokerError) -> bool:
    """Return whether the client has failed for good, and takes no more records."""
    return error.fatal() or error.code() == BrokerError._FATAL  # noqa: SLF001 (its public name)


@contextmanager
def transaction(
    settings: Settings, name: str
) -> Iterator[Callable[[Iterable[IntakeRecord]], None]]:
    """Send several records or none: one transaction into `duetime.in.tx`.

    Yields the function that sends records. Commits at the end, aborts on any error. Of two at once
    with one name, the later one fences off the earlier one. Raises KafkaError.
    """
    producer = Producer(
        producer_properties(settings)
        | TRANSACTION
        | {"transactional.id": f"{settings.namespace}.{name}"}
    )

    def send(records: Iterable[IntakeRecord]) -> None:
        for record in records:
            producer.produce(
                record.topic, value=record.value, key=record.key, headers=list(record.headers)
            )
        producer.flush(TIMEOUT_S)

    try:
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
    except KafkaException as error:
        raise _nothing_changed(error.args[0]) from error
    try:
        yield send
        producer.commit_transaction(TIMEOUT_S)
    except KafkaException as error:
        raise _transaction_failed(producer, error.args[0]) from error
    except BaseException:
        with suppress(KafkaException):
            producer.abort_transaction(TIMEOUT_S)
        raise


def _transaction_failed(producer: Producer, error: BrokerError) -> KafkaError:
    # If Kafka does not get our abort, it aborts at the transaction's timeout.
    if error.txn_requires_abort():
        with suppress(KafkaException):
            producer.abort_transaction(TIMEOUT_S)
    if error.txn_requires_abort() or error.fatal():
        return _nothing_changed(error)
    return KafkaError(
        f"the outcome of the transaction is unknown ({error.str()}): check before you repeat it"
    )


def _nothing_changed(error: BrokerError) -> KafkaError:
    return KafkaError(f"not done ({error.str()}): nothing is changed, try again")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutboundRecord:
    """A copy of a record for its next topic, or for the dead letters.

    A copy that is too large for its topic is refused at each try. So `less` is sent in its place
    then: one that has less, and at last only says where the record is.
    """

    topic: str
    partition: int = ANY_PARTITION
    key: bytes | None = field(default=None, repr=False)
    value: bytes | None = field(default=None, repr=False)
    headers: Sequence[H.Header] = field(repr=False)
    less: "OutboundRecord | None" = None


class CopyProducer:
    """Sends copies of records; those of a partition keep their order. Thread-safe.

    A copy that is too large is replaced by its `less`. Replacements are sent by `serve` and
    `flush`: a delivery report cannot wait for room in the producer's queue.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """`properties` are librdkafka's, for the cluster."""
        self._producer = Producer(dict(properties) | _IDEMPOTENT | OF_ANY_SIZE)
        self._replacements = deque[tuple[OutboundRecord, OnFailure]]()
        self._lock = threading.Lock()

    def send(
        self, copy: OutboundRecord, on_failure: OnFailure, on_arrival: OnArrival = lambda _: None
    ) -> None:
        """Send a copy, and do not wait. Neither function is called for one that is replaced."""

        def fail(error: BrokerError) -> None:
            if error.code() in TOO_LARGE and copy.less is not None:
                self.replace(copy.less, on_failure)
            else:
                on_failure(error)

        def report(error: BrokerError | None, sent: Message) -> None:
            if error is None:
                on_arrival(sent)
            else:
                fail(error)

        try:
            enqueue(
                self._producer,
                copy.topic,
                value=copy.value,
                key=copy.key,
                headers=copy.headers,
                partition=copy.partition,
                on_delivery=report,
            )
        except KafkaException as error:
            fail(error.args[0])

    def replace(self, copy: OutboundRecord, on_failure: OnFailure) -> None:
        """Have a copy sent in place of one that failed."""
        self._replacements.append((copy, on_failure))

    def serve(self) -> None:
        """Serve delivery reports, and send replacements."""
        self._producer.poll(0)
        with self._lock:
            while self._replacements:
                self.send(*self._replacements.popleft())

    def flush(self, timeout_s: float) -> int:
        """Wait until all copies have arrived or failed; return how many have not."""
        left = self._producer.flush(timeout_s)
        while self._replacements and not left:
            self.serve()
            left = self._producer.flush(timeout_s)
        return left

    def purge(self) -> None:
        """Drop what is not sent."""
        self._producer.purge()
        self._replacements.clear()

    def close(self, timeout_s: float) -> None:
        """Drop what is not sent, and wait for what is under way; replace nothing more."""
        self.purge()
        self._producer.flush(timeout_s)


def dead_letter(
    topic: str, record: Message, own: Sequence[H.Header], texts: Mapping[str, object]
) -> OutboundRecord:
    """Return a dead letter with the sender's headers, and those of `H.dead_letter`.

    One that is not whole says so, and where its record is: it cannot be redriven.
    """
    left = f"it is too large for a dead letter: its record is {place(record)}"
    detail = f"{texts[H.DUE_ERROR_DETAIL]}; {left}"
    lost = {**texts, H.DUE_ERROR: Reason.RECORD_DELETED, H.DUE_ERROR_DETAIL: detail}
    lost_headers = H.dead_letter(lost)
    without_value = OutboundRecord(
        topic=topic,
        key=record.key(),
        headers=[*own, *lost_headers],
        less=error_only(topic, own, lost_headers),
    )
    return OutboundRecord(
        topic=topic,
        key=record.key(),
        value=record.value(),
        headers=[*own, *H.dead_letter(texts)],
        less=without_value,
    )


def error_only(topic: str, own: Sequence[H.Header], error: Sequence[H.Header]) -> OutboundRecord:
    """Return a record with the error's headers, and of the sender's only the webhook."""
    webhooks = [
        (name, url)
        for name, url in own
        if name == H.DUE_CALLBACK and len(url or b"") < H.CALLBACK_BYTES
    ]
    return OutboundRecord(topic=topic, headers=[*webhooks[-1:], *error])


def place(record: Message) -> str:
    """Return a record's topic, partition and offset, with slashes."""
    return f"{record.topic()}/{record.partition()}/{record.offset()}"
