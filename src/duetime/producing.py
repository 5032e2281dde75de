"""Handing a record to a producer of confluent-kafka whose local queue may be full."""

from collections.abc import Callable, Sequence

from confluent_kafka import KafkaError, Message, Producer

from duetime.outgoing import Header

#: How long to wait for room in a full local queue before looking again, in seconds.
FULL_QUEUE_S = 0.1


def enqueue(  # noqa: PLR0913 (a record has as many parts)
    producer: Producer,
    topic: str,
    *,
    value: bytes | None,
    key: bytes | None,
    headers: Sequence[Header],
    partition: int,
    on_delivery: Callable[[KafkaError | None, Message], None],
) -> None:
    """Hand it over; while the queue is full, serve delivery reports. Raises KafkaException."""
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


def is_fatal(error: KafkaError) -> bool:
    """Whether the client has failed for good: it takes nothing any more."""
    return error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001 (its public name)
