"""Copies of a record, for its next topic or the dead letters: as much of it as Kafka takes.

A copy that is too large for its topic is refused however often it is sent. So there is one behind
it that has less, and at last one that only says where the record is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, Message, Producer

from duetime.errors import Reason
from duetime.message import (
    CALLBACK_BYTES,
    DUE_CALLBACK,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    last_words,
)
from duetime.outgoing import ANY_PARTITION, Header
from duetime.producing import enqueue

#: What Kafka says of a record that is larger than its topic takes.
TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)

#: Properties of a producer of copies. What a topic takes is for the broker to say, and 10**9 is the
#: most that librdkafka allows. A batch is refused as a whole: only a record that is larger than 64
#: KiB goes alone, and no topic of duetime's takes less.
OF_ANY_SIZE = {"message.max.bytes": 1_000_000_000, "batch.size": 64 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """A copy, and what is sent where its topic takes no copy of that size."""

    topic: str
    partition: int = ANY_PARTITION
    key: bytes | None = field(default=None, repr=False)
    value: bytes | None = field(default=None, repr=False)
    headers: Sequence[Header] = field(repr=False)
    less: "Copy | None" = None


def dead_letter(
    topic: str, record: Message, own: Sequence[Header], words: Mapping[str, object]
) -> Copy:
    """A dead letter with the sender's headers and these words at the end.

    One that is not whole says so, and where its record is: nobody may bring it back.
    """
    left = f"it is too large for a dead letter: its record is {place(record)}"
    detail = f"{words[DUE_ERROR_DETAIL]}; {left}"
    lost = last_words({**words, DUE_ERROR: Reason.GONE, DUE_ERROR_DETAIL: detail})
    return Copy(
        topic=topic,
        key=record.key(),
        value=record.value(),
        headers=[*own, *last_words(words)],
        less=Copy(
            topic=topic,
            key=record.key(),
            headers=[*own, *lost],
            less=place_only(topic, own, lost),
        ),
    )


def place_only(topic: str, own: Sequence[Header], said: Sequence[Header]) -> Copy:
    """Nothing of the record but what is said of it, and who is to be told."""
    told = [
        (name, url)
        for name, url in own
        if name == DUE_CALLBACK and len(url or b"") < CALLBACK_BYTES
    ]
    return Copy(topic=topic, headers=[*told[-1:], *said])


def place(record: Message) -> str:
    """Where the record is."""
    return f"{record.topic()}/{record.partition()}/{record.offset()}"


def hand_over(
    producer: Producer, copy: Copy, on_delivery: Callable[[KafkaError | None, Message], None]
) -> None:
    """Give it to the producer. Raises KafkaException."""
    enqueue(
        producer,
        copy.topic,
        value=copy.value,
        key=copy.key,
        headers=copy.headers,
        partition=copy.partition,
        on_delivery=on_delivery,
    )
