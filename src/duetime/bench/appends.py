"""How many records some topics have got, and when: from the broker's offsets and stamps alone."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, OffsetSpec

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError

#: How often is looked whether all records have come, in seconds. What is measured is stamped by the
#: broker, so this may be coarse, and must not take CPU from what is measured.
LOOK_S = 0.5

#: How long one request may take, in seconds.
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When the first and the last of some records were appended, epoch ms."""

    first_ms: int
    last_ms: int

    @property
    def seconds(self) -> float:
        """How long it took; never 0."""
        return max(self.last_ms - self.first_ms, 1) / 1_000


class Appends:
    """What was appended to the topics since `mark` was called last, or ever."""

    def __init__(self, settings: Settings, topics: Iterable[str]) -> None:
        self._admin = AdminClient(librdkafka_properties(settings))
        self._topics = list(topics)
        self._places = [place for topic in self._topics for place in self._partitions(topic)]
        self._marked = 0

    def mark(self) -> None:
        """Count from here on."""
        self._marked = self._total()

    def count(self) -> int:
        """Records appended, freed ones included."""
        return self._total() - self._marked

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Whether at least so many records came within the time. Looks now and then."""
        deadline = time.monotonic() + timeout_s
        while self.count() < count:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def span(self, since_ms: int) -> Span:
        """When the first and the last record after the instant were appended.

        Raises KafkaError where there is none.
        """
        firsts = self._stamps(OffsetSpec.for_timestamp(since_ms))
        lasts = self._stamps(OffsetSpec.max_timestamp())
        if not firsts or not lasts:
            raise KafkaError(
                f"nothing was appended to {', '.join(self._topics)}: nothing to measure"
            )
        return Span(first_ms=min(firsts), last_ms=max(lasts))

    def _partitions(self, topic: str) -> list[TopicPartition]:
        try:
            found = self._admin.list_topics(topic, timeout=TIMEOUT_S).topics[topic]
        except KafkaException as error:
            raise _no_answer(error) from error
        return [TopicPartition(topic, partition) for partition in found.partitions]

    def _total(self) -> int:
        return sum(one.offset for one in self._answers(OffsetSpec.latest()))

    def _stamps(self, spec: OffsetSpec) -> list[int]:
        return [
            one.timestamp for one in self._answers(spec) if one.offset >= 0 and one.timestamp >= 0
        ]

    def _answers(self, spec: OffsetSpec) -> list[ListOffsetsResultInfo]:
        wanted: dict[Any, OffsetSpec] = dict.fromkeys(self._places, spec)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                futures = self._admin.list_offsets(wanted, request_timeout=TIMEOUT_S)
                return [future.result() for future in futures.values()]
            except KafkaException as error:
                # A busy broker may lose its partitions for a moment.
                if time.monotonic() > deadline:
                    raise _no_answer(error) from error
            time.sleep(LOOK_S)


def _no_answer(error: KafkaException) -> KafkaError:
    return KafkaError(f"Kafka did not answer ({error.args[0].str()}): is the broker up?")
