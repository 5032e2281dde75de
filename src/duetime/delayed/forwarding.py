"""The sending side of a visible topic: what goes there, elsewhere, or was there already."""

import re
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Self

import confluent_kafka
from confluent_kafka import Message, TopicPartition

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.copies import OF_ANY_SIZE, TOO_LARGE, Copy, hand_over
from duetime.delayed.consumer import DelayedConsumer
from duetime.delayed.log import LogReader, Place
from duetime.delayed.message import DelayedMessage
from duetime.delayed.outcomes import FINAL, Outcomes
from duetime.errors import KafkaError
from duetime.message import DUE_ID
from duetime.stores.records import headers_of
from duetime.topics import visible

#: How long a flush may take, in seconds: longer than the producer tries.
FLUSH_S = 30.0


class Forwarding:
    """Sends what is due, and knows what was sent before. Used by one thread."""

    def __init__(self, settings: Settings, topic: str, timeout_ms: int) -> None:
        self._outcomes = Outcomes(settings, topic)
        self._from, self._to = topic, visible(settings)[topic]
        properties = librdkafka_properties(settings)
        self._reader = LogReader(properties)
        self._clock = SystemClock()
        self._producer = confluent_kafka.Producer(
            properties
            | {
                "acks": "all",
                # One after the other, whatever has to be tried again.
                "enable.idempotence": True,
                "linger.ms": 0,
                "delivery.timeout.ms": timeout_ms,
                "topic.metadata.propagation.max.ms": 1_000,
            }
            | OF_ANY_SIZE
        )
        #: Where the destination is to be read back from, by the partition: its end, once what was
        #: found there has been passed.
        self._ends: dict[int, int] = {}
        #: What was found there already, by the offset in the delayed topic.
        self._found: dict[int, set[int]] = {}
        #: Until when what was found is due, epoch ms.
        self._found_until_ms: dict[int, int] = {}
        #: What is sent in place of what has failed: not in a report, where nothing can wait for
        #: room in the producer's queue.
        self._instead: deque[Copy] = deque()
        self._broken: str | None = None

    def begin(self, consumer: DelayedConsumer, places: Sequence[TopicPartition]) -> None:
        """Read back what was sent after the last commit. Raises KafkaError."""
        # The commit below is of all partitions.
        self._arrived()
        notes = consumer.notes()
        for each in places:
            start, end = notes.get((each.topic, each.partition), ""), self._end(each.partition)
            # A destination that was created anew has less than there was.
            begin = min(int(start), end) if start.isdecimal() else end
            sent = self._sent_since((self._to, each.partition), begin, end)
            self._found[each.partition] = set(sent)
            # By another's clock, which may be ahead of ours.
            self._found_until_ms[each.partition] = max(sent.values(), default=0)
            self._ends[each.partition] = begin
        # Before the first record is sent it must be known where to read back from.
        consumer.commit(asynchronous=False, notes=self._notes())

    def forward(self, message: DelayedMessage) -> None:
        """Send it to its destination, or say why not where that is told; not waited for."""
        found = self._found.get(message.partition(), set())
        if (message.deliver_after_ms or 0) > self._found_until_ms.get(message.partition(), 0):
            # What was sent before is due before, and has been passed.
            found.clear()
        if message.offset() in found:
            found.remove(message.offset())
        else:
            copy, is_delivery = self._outcomes.of(message)
            self._send(copy, message if is_delivery else None)

    def check(self) -> None:
        """Raises KafkaError where it is not known whether something has arrived."""
        self._producer.poll(0)
        self._send_instead()
        if self._broken:
            raise KafkaError(f"what is visible is not known ({self._broken}): it is read back")

    def commit(self, consumer: DelayedConsumer, *, wait: bool = False) -> None:
        """Commit, once everything has arrived; or ask for it, and do not wait for the answer.

        Raises KafkaError.
        """
        self._arrived()
        consumer.commit(asynchronous=not wait, notes=self._notes())

    def give_up(self, why: str) -> None:
        """Commit nothing more: what was taken in was perhaps not sent."""
        self._broken = self._broken or why

    def hand_over(self, consumer: DelayedConsumer) -> None:
        """Commit for whoever has the partitions next, who reads back what is not known."""
        if not self._broken:
            self.commit(consumer, wait=True)

    def abandon(self) -> None:
        """Others have the partitions: what was not sent yet is theirs."""
        self._producer.purge()
        self._instead.clear()

    def close(self) -> None:
        """Send nothing more, and close the connections."""
        self._producer.purge()
        self._producer.flush(FLUSH_S)
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arrived(self) -> None:
        """Wait until all that was sent is there. Raises KafkaError."""
        left = self._producer.flush(FLUSH_S)
        while self._instead and not left:
            self._send_instead()
            left = self._producer.flush(FLUSH_S)
        self.check()
        if left:
            raise KafkaError(f"{left} records have not arrived in time: they are read back")

    def _notes(self) -> dict[Place, str]:
        return {(self._from, partition): str(end) for partition, end in self._ends.items()}

    def _end(self, partition: int) -> int:
        # A destination that is not there yet has nothing to be read back.
        return self._reader.bounds((self._to, partition))[1] if self._is_there(partition) else 0

    def _is_there(self, partition: int) -> bool:
        found = self._producer.list_topics(timeout=FLUSH_S).topics.get(self._to)
        return found is not None and partition in found.partitions

    def _sent_since(self, place: Place, start: int, end: int) -> dict[int, int]:
        """When what is in this stretch of the destination was due, by its offset before."""
        topic = re.escape(self._from)
        ours = re.compile(rf"([0-9a-f]{{12}})-@{topic}\.{place[1]}\.([0-9]{{1,18}})")
        records = chain.from_iterable(self._reader.batches(place, start, end))
        names = (dict(headers_of(record)).get(DUE_ID) or b"" for record in records)
        found = (ours.fullmatch(name.decode(errors="replace")) for name in names)
        return {int(each[2]): int(each[1], 16) for each in found if each}

    def _send(self, copy: Copy, message: DelayedMessage | None = None) -> None:
        """The message, where this is its delivery: what becomes of it is noted then."""

        def report(error: confluent_kafka.KafkaError | None, sent: Message) -> None:
            if error is not None:
                self._failed(error, copy, message)
            elif message is not None:
                self._note(message.partition(), (sent.offset() or 0) + 1)

        try:
            hand_over(self._producer, copy, report)
        except confluent_kafka.KafkaException as error:
            self._failed(error.args[0], copy, message)

    def _send_instead(self) -> None:
        while self._instead:
            self._send(self._instead.popleft())

    def _note(self, partition: int, end: int) -> None:
        # What was found is to be found again, until it has been passed.
        if not self._found.get(partition):
            self._ends[partition] = max(self._ends.get(partition, 0), end)

    def _failed(
        self, error: confluent_kafka.KafkaError, copy: Copy, message: DelayedMessage | None
    ) -> None:
        why = FINAL.get(error.code())
        if copy.less is not None and error.code() in TOO_LARGE:
            self._instead.append(copy.less)
        elif why is not None and message is not None:
            now_ms = self._clock.now_ms()
            self._instead.append(self._outcomes.undelivered(message, why, error.str(), now_ms))
        else:
            self._broken = error.str()
