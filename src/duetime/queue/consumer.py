"""The worker's end of a queue: messages one by one, each acknowledged by itself. Needs no Spark.

The five steps of kmq: 1. read, 2. write a start marker and wait for it, 3. commit (`Prefetcher`);
4. process, 5. write an end marker (`Message.ack`).
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self

import confluent_kafka
from confluent_kafka import TopicPartition

from duetime.core.errors import ClientFailed, ConfigError, KafkaError
from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings, with_bootstrap
from duetime.kafka.connection import Properties, librdkafka_properties
from duetime.kafka.consumer_group import is_static_member, leave
from duetime.kafka.offsets import Partition
from duetime.queue.circuit_breaker import BreakerPolicy, CircuitBreaker
from duetime.queue.message import MarkerProducer, Message, checked_timeout_ms, key_of

log = logging.getLogger(__name__)

#: Properties of a worker's consumer. A worker of kmq may be in the same group.
WORKER: Properties = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "allow.auto.create.topics": False,
}

#: How long Kafka may take to list its topics, in seconds.
TIMEOUT_S = 10.0

#: How long one poll for messages may take, in seconds.
POLL_TIMEOUT_S = 0.1

#: The longest wait for room in a full buffer before the next poll, in seconds: a consumer that does
#: not poll is removed from its group.
MAX_ROOM_WAIT_S = 1.0

#: How long to wait before a failed batch is read again, in seconds.
RETRY_DELAY_S = 1.0

#: How often within a timeout the waiting messages are checked.
CHECKS_PER_TIMEOUT = 8


class Queue:
    """The messages of a topic, for any number of threads, tasks and processes.

        for message in Queue("jobs", group="workers"):
            with message:
                work(message.value)

    A message that is not acknowledged within `timeout` is redelivered, by the pipeline that has the
    topic among its `queues`, or by kmq's tracker. Iteration ends when the queue is closed.

    Raises InvalidMessage (bad-timeout), ConfigError if topics are missing or do not match, and
    KafkaError if they cannot be read.

    Parameters
    ----------
    topic: the queue's topic. Its markers topic must have as many partitions.
    group: the consumer group that shares the messages.
    bootstrap, settings: as in `Producer`.
    timeout: how long processing may take; see `Message.extend_visibility`.
    prefetch: the most messages that wait here for a worker.
    breaker: when to stop reading because processing fails.
    librdkafka: further properties of librdkafka.

    """

    def __init__(  # noqa: PLR0913 (all but two have a default that fits)
        self,
        topic: str,
        *,
        group: str,
        bootstrap: str | None = None,
        timeout: timedelta = timedelta(seconds=30),
        prefetch: int = 100,
        breaker: BreakerPolicy | None = None,
        settings: Settings | None = None,
        **librdkafka: Any,  # noqa: ANN401 (librdkafka's properties)
    ) -> None:
        settings = with_bootstrap(settings, bootstrap)
        queue = settings.queues.get(topic, QueueSettings())
        timeout_ms = checked_timeout_ms(timeout, queue.max_visibility_timeout_ms)
        self._markers = MarkerProducer(settings, queue.markers_topic(topic))
        properties = {"group.id": group} | WORKER | librdkafka_properties(settings) | librdkafka
        self._is_static = is_static_member(properties)
        self._consumer = confluent_kafka.Consumer(properties)
        _check_topics(self._consumer, topic, queue.markers_topic(topic))
        self._consumer.subscribe([topic])
        self._breaker = CircuitBreaker(breaker or BreakerPolicy(), topic)
        self._prefetcher = Prefetcher(
            self._consumer,
            self._markers,
            self._breaker,
            partial(
                Message,
                markers=self._markers,
                breaker=self._breaker,
                timeout_ms=timeout_ms,
                max_timeout_ms=queue.max_visibility_timeout_ms,
            ),
            prefetch=prefetch,
            timeout_ms=timeout_ms,
        )
        self._prefetcher.start()

    @property
    def breaker_state(self) -> str:
        """`closed` if messages are read, `open` if not, `half-open` during a test."""
        return self._breaker.state

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the queue is closed. Several threads may iterate at once."""
        while self._prefetcher.wait():
            if message := self._prefetcher.take():
                yield message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages until the queue is closed. Several tasks may iterate at once."""
        # The thread only waits and takes nothing: a cancelled task loses no message.
        while self._prefetcher.has_some() or await asyncio.to_thread(self._prefetcher.wait):
            if message := self._prefetcher.take():
                yield message

    def close(self) -> None:
        """Stop reading, and give back what no worker has seen. Safe to repeat.

        Messages that are being processed can still be acknowledged.
        """
        self._prefetcher.close()
        leave(self._consumer, is_static=self._is_static)
        self._markers.close()
        self._breaker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_topics(consumer: confluent_kafka.Consumer, topic: str, markers: str) -> None:
    """Raise unless each partition has one for its markers: without it, no message is processed."""
    try:
        found = consumer.list_topics(timeout=TIMEOUT_S).topics
    except confluent_kafka.KafkaException as error:
        raise KafkaError(f"Kafka does not answer ({error.args[0].str()}): is it up?") from error
    if missing := {topic, markers} - found.keys():
        raise ConfigError(f"topic {min(missing)} is missing: create it with duetime topics")
    partitions = [len(found[name].partitions) for name in (topic, markers)]
    if len(set(partitions)) > 1:
        raise ConfigError(
            f"topics {topic} and {markers} have {partitions[0]} and {partitions[1]} partitions, "
            "and a marker has the partition of its message: give both as many"
        )


class Prefetcher:
    """A thread that buffers a few messages: marked as started, and committed.

    While workers are processing, it extends the timeouts of buffered messages. If all workers hang,
    it gives the messages back and reads nothing until a worker asks: nothing unseen counts as an
    attempt.
    """

    def __init__(  # noqa: PLR0913 (four collaborators and two limits)
        self,
        consumer: confluent_kafka.Consumer,
        markers: MarkerProducer,
        breaker: CircuitBreaker,
        make_message: Callable[[confluent_kafka.Message], Message],
        *,
        prefetch: int,
        timeout_ms: int,
    ) -> None:
        self._consumer, self._markers, self._breaker = consumer, markers, breaker
        self._make_message, self._prefetch = make_message, prefetch
        self._timeout_ms, self._timeout_s = timeout_ms, timeout_ms / 1_000
        self._buffer: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._error: Exception | None = None
        self._is_paused = False
        #: Whether the last batch of start markers ended its client.
        self._client_failed = False
        #: The message that a worker took last, and when a worker last asked for one.
        self._taken: Message | None = None
        self._asked_s = self._checked_s = time.monotonic()
        self._waiting_workers = 0
        #: Whether a worker has asked since the buffer was given back.
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="kmq-prefetcher", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def take(self) -> Message | None:
        """Return the next message whose timeout has not passed, if there is one."""
        with self._changed:
            while self._buffer:
                message, self._asked_s = self._buffer.popleft(), time.monotonic()
                self._changed.notify_all()
                if message.hold(self._asked_s):
                    self._taken = message
                    return message
        return None

    def has_some(self) -> bool:
        """Return whether a message may be buffered."""
        return bool(self._buffer)

    def wait(self) -> bool:
        """Wait until a message may be buffered; return False after the last one.

        Raises KafkaError if reading has failed for good.
        """
        with self._changed:
            self._is_wanted = True
            self._waiting_workers += 1
            try:
                self._changed.wait_for(lambda: self._buffer or self._is_over())
            finally:
                self._waiting_workers -= 1
                self._asked_s = time.monotonic()
            if self._error and not self._buffer:
                raise KafkaError(f"the queue cannot be read: {self._error}") from self._error
            return bool(self._buffer) or not self._is_over()

    def close(self) -> None:
        """Stop reading, and give back the buffered messages."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            unseen = list(self._buffer)
            self._buffer.clear()
        _give_back(unseen)

    def _is_over(self) -> bool:
        return self._closing or self._error is not None

    def _run(self) -> None:
        try:
            while not self._closing:
                self._fetch(self._room())
                self._check_waiting(time.monotonic())
        except Exception as error:  # noqa: BLE001 (raised to each worker that waits)
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def _room(self) -> int:
        """Return how many messages to read; wait a little if the buffer is over half full."""
        with self._changed:
            wait_s = min(MAX_ROOM_WAIT_S, self._timeout_s / CHECKS_PER_TIMEOUT)
            self._changed.wait_for(lambda: self._has_room() or self._closing, wait_s)
            if self._closing or not self._is_wanted or not self._has_room():
                return 0
            room = self._prefetch - len(self._buffer)
        return min(self._breaker.room(self._prefetch), room)

    def _has_room(self) -> bool:
        return len(self._buffer) <= self._prefetch // 2

    def _fetch(self, room: int) -> None:
        """Do steps 1 to 3 for one batch.

        After a crash before step 3 the messages are read again, after it they are redelivered.
        """
        self._pause(room == 0)
        # Without room the poll keeps the membership. A partition that was just assigned is not
        # paused, so one of its messages may come anyway.
        records = readable(self._consumer.consume(max(room, 1), timeout=POLL_TIMEOUT_S))
        try:
            if records:
                self._markers.start_all([key_of(each) for each in records], self._timeout_ms)
                self._client_failed = False
            self._commit(records)
        except (KafkaError, confluent_kafka.KafkaException) as error:
            # Two clients in a row that fail for good will not be the last.
            failed_before = self._client_failed
            self._client_failed = isinstance(error, ClientFailed)
            if failed_before and self._client_failed:
                raise
            log.warning("batch failed, reading it again messages=%d error=%s", len(records), error)
            self._rewind(records)
            records = []
        self._buffer_messages(records)
        if room and not records:
            self._breaker.cancel_test()

    def _pause(self, wanted: bool) -> None:  # noqa: FBT001 (the state to reach)
        if wanted:
            self._consumer.pause(self._consumer.assignment())
        elif self._is_paused:
            self._consumer.resume(self._consumer.assignment())
        self._is_paused = wanted

    def _commit(self, records: Sequence[confluent_kafka.Message]) -> None:
        """Commit: from here on the messages are ours, even if the partition is reassigned."""
        ends = [
            TopicPartition(*partition, offset + 1)
            for partition, offset in last_offsets(records).items()
        ]
        for one in self._consumer.commit(offsets=ends, asynchronous=False) if ends else ():
            if one.error is not None:
                raise confluent_kafka.KafkaException(one.error)

    def _rewind(self, records: Sequence[confluent_kafka.Message]) -> None:
        """Read the records again. Raises KafkaError if that is impossible."""
        for partition, offset in last_offsets(records[::-1]).items():
            try:
                self._consumer.seek(TopicPartition(*partition, offset))
            except confluent_kafka.KafkaException as error:
                assigned = {(each.topic, each.partition) for each in self._consumer.assignment()}
                # Reading on would skip the records. Those of a partition that was reassigned are
                # read by its new owner.
                if partition in assigned:
                    raise KafkaError(
                        f"messages cannot be read again ({error.args[0].str()})"
                    ) from error
        time.sleep(RETRY_DELAY_S)

    def _buffer_messages(self, records: Sequence[confluent_kafka.Message]) -> None:
        with self._changed:
            self._buffer.extend(map(self._make_message, records))
            self._changed.notify_all()

    def _check_waiting(self, now_s: float) -> None:
        """Extend the timeouts of buffered messages, or give them back if all workers hang."""
        if now_s < self._checked_s + self._timeout_s / CHECKS_PER_TIMEOUT:
            return
        self._checked_s = now_s
        with self._changed:
            waiting, are_abandoned = list(self._buffer), self._workers_hang(now_s)
            if are_abandoned:
                # Under the lock: a worker that asks from now on sets it again.
                self._buffer.clear()
                self._is_wanted = False
        if are_abandoned:
            _give_back(waiting)
        else:
            for message in waiting:
                message.hold(now_s)

    def _workers_hang(self, now_s: float) -> bool:
        """Return whether no worker has asked for a timeout, and the last taken is overdue."""
        if self._waiting_workers or now_s < self._asked_s + self._timeout_s:
            return False
        return self._taken is None or self._taken.is_overdue(now_s)


def _give_back(messages: Sequence[Message]) -> None:
    for message in messages:
        try:
            message.give_back()
        except KafkaError as error:
            # It is redelivered after its timeout.
            log.warning("message not given back error=%s", error)


def readable(records: Sequence[confluent_kafka.Message]) -> list[confluent_kafka.Message]:
    """Return the records that are messages. Raises KafkaError for a fatal error."""
    for each in records:
        error: Any = each.error()
        if error is not None and error.fatal():
            raise KafkaError(str(error.str()))
        if error is not None:
            log.warning("queue not read error=%s", error.str())
    return [each for each in records if each.error() is None]


def last_offsets(records: Sequence[confluent_kafka.Message]) -> dict[Partition, int]:
    """Return the offset of the last record of each partition."""
    return {(each.topic() or "", each.partition() or 0): each.offset() or 0 for each in records}
