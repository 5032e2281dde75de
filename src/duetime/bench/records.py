"""What the load generator sends: records of each shape, as librdkafka's `produce` takes them.

native    to duetime.in, with due-* headers           the way of every message
airtel    to the Airtel topic, a JSON object          the way of `bench intake`
waiting   straight to where messages wait             what intake would have written there
delayed   to a delayed topic, with deliver-after-ms   the way of `bench delayed`
"""

import os
from collections.abc import Callable, Sequence
from enum import StrEnum

from duetime.config import Settings
from duetime.message import (
    DELIVER_AFTER_MS,
    DELIVER_ID,
    DUE_AT_MS,
    DUE_CLUSTER,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
)
from duetime.outgoing import ANY_PARTITION
from duetime.topics import TopicNames

#: How many different keys the messages have.
KEYS = 1_000

#: As confluent-kafka's types have it.
Header = tuple[str, str | bytes | None]

#: topic, value, key, headers, partition.
Record = tuple[str, bytes, bytes, list[Header], int]

#: (number, due_ms, now_ms) -> the record.
Maker = Callable[[int, int, int], Record]


class Shape(StrEnum):
    """Which contract the records are written in."""

    NATIVE = "native"
    AIRTEL = "airtel"
    WAITING = "waiting"
    DELAYED = "delayed"


def maker(
    shape: Shape, settings: Settings, destinations: Sequence[str], label: str, value_bytes: int
) -> Maker:
    """Makes records to the destinations in turn; the sender's own ids are `<label>-<number>`."""
    make = {
        Shape.NATIVE: native,
        Shape.AIRTEL: airtel,
        Shape.WAITING: waiting,
        Shape.DELAYED: delayed,
    }[shape]
    return make(settings, destinations, label, value_bytes)


def to_cluster(make: Maker, cluster: str) -> Maker:
    """The same native records for another cluster."""
    address: Header = (DUE_CLUSTER, cluster.encode())

    def there(number: int, due_ms: int, now_ms: int) -> Record:
        topic, value, key, headers, partition = make(number, due_ms, now_ms)
        return topic, value, key, [*headers, address], partition

    return there


def native(settings: Settings, destinations: Sequence[str], label: str, value_bytes: int) -> Maker:
    """Records for the native intake topic."""
    intake, value, keys = TopicNames(settings).native, os.urandom(value_bytes), _keys()
    addresses = [(DUE_TOPIC, each.encode()) for each in destinations]

    def make(number: int, due_ms: int, _now_ms: int) -> Record:
        headers: list[Header] = [
            addresses[number % len(addresses)],
            (DUE_AT_MS, b"%d" % due_ms),
            (DUE_ID, f"{label}-{number}".encode()),
        ]
        return intake, value, keys[number % KEYS], headers, ANY_PARTITION

    return make


def airtel(settings: Settings, destinations: Sequence[str], label: str, value_bytes: int) -> Maker:
    """Records for the Airtel topic; `value` is a JSON object of about `value_bytes`."""
    intake, keys = TopicNames(settings).airtel, _keys()
    start = f'{{"event":"reminder","customer":"{label}","attempt":1,"text":"'
    value = start + "x" * (value_bytes - len(start) - 2) + '"}'

    def make(number: int, due_ms: int, _now_ms: int) -> Record:
        to, key = destinations[number % len(destinations)], keys[number % KEYS]
        text = f'{{"topic":"{to}","key":"{number % KEYS}","value":{value},"postTime":{due_ms}}}'
        return intake, text.encode(), key, [], ANY_PARTITION

    return make


def waiting(settings: Settings, destinations: Sequence[str], label: str, value_bytes: int) -> Maker:
    """Records for the store's topics, where intake would put them at `now_ms`."""
    places, value, keys = _places(settings), os.urandom(value_bytes), _keys()
    addresses = [(DUE_TOPIC, each.encode()) for each in destinations]

    def make(number: int, due_ms: int, now_ms: int) -> Record:
        topic, partition = places(due_ms, now_ms)
        headers: list[Header] = [
            addresses[number % len(addresses)],
            (DUE_PARTITION, None),
            (DUE_STATE, b"%d" % now_ms),
            (DUE_AT_MS, b"%d" % due_ms),
            (DUE_ID, f"{due_ms:012x}-{label}-{number}".encode()),
        ]
        return topic, value, keys[number % KEYS], headers, partition

    return make


def _places(settings: Settings) -> Callable[[int, int], tuple[str, int]]:
    """(due_ms, now_ms) -> topic and partition of what waits."""
    wheel, names = settings.wheel, TopicNames(settings)
    topics = [names.wheel(level) for level in range(wheel.levels)]

    def slot(due_ms: int, now_ms: int) -> tuple[str, int]:
        found = wheel.place(due_ms, now_ms)
        return topics[found.level], wheel.partition(found)

    return slot if settings.store_kind == "kafka" else lambda *_: (names.store, ANY_PARTITION)


def delayed(settings: Settings, topics: Sequence[str], label: str, value_bytes: int) -> Maker:  # noqa: ARG001 (as the others)
    """Records for delayed topics."""
    value, keys = os.urandom(value_bytes), _keys()

    def make(number: int, due_ms: int, _now_ms: int) -> Record:
        headers: list[Header] = [
            (DELIVER_AFTER_MS, b"%d" % due_ms),
            (DELIVER_ID, f"{due_ms:012x}-{label}-{number}".encode()),
        ]
        to = topics[number % len(topics)]
        return to, value, keys[number % KEYS], headers, ANY_PARTITION

    return make


def _keys() -> list[bytes]:
    return [str(number).encode() for number in range(KEYS)]
