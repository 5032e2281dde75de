"""A worker's end of a queue: messages one by one, each acknowledged by itself. Needs no Spark.

The five steps of kmq: 1 read, 2 write a start marker and wait for it, 3 commit (see `reader`);
4 work, 5 write an end marker (see `message`).
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, Self

import confluent_kafka

from duetime.client import with_bootstrap
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError, KafkaError
from duetime.kmq.breaker import Breaker, BreakerPolicy
from duetime.kmq.marking import Marking
from duetime.kmq.message import Message, checked_timeout_ms
from duetime.kmq.reader import Reader
from duetime.leaving import is_static_member, leave
from duetime.tables import QueueSettings

#: How long Kafka may take to list its topics, in seconds.
TIMEOUT_S = 10.0


class Queue:
    """The messages of a topic, for as many threads, tasks and processes as there are.

        for message in Queue("jobs", group="workers"):
            with message:
                work(message.value)

    A message that is not acknowledged within `timeout` is delivered again, by the pipeline that has
    the topic among its `queues` or by kmq's own tracker. At most `batch` messages wait here for a
    worker. `settings`, `bootstrap` and further properties of librdkafka are as in `Producer`.

    Iterating ends when the queue is closed. Raises InvalidMessage (bad-timeout), ConfigError where
    topics are missing or do not fit together, and KafkaError where they cannot be read.
    """

    def __init__(  # noqa: PLR0913 (all but three have a default that does)
        self,
        topic: str,
        *,
        group: str,
        bootstrap: str | None = None,
        timeout: timedelta = timedelta(seconds=30),
        batch: int = 100,
        breaker: BreakerPolicy | None = None,
        settings: Settings | None = None,
        **librdkafka: Any,  # noqa: ANN401 (librdkafka's own properties)
    ) -> None:
        self._settings = with_bootstrap(settings, bootstrap)
        self._own = self._settings.queues.get(topic, QueueSettings())
        self._timeout_ms = checked_timeout_ms(timeout, self._own.timeout_max_ms)
        self._marking = Marking(self._settings, self._own.markers_topic(topic))
        properties = consumer_properties(self._settings, group) | librdkafka
        self._is_static = is_static_member(properties)
        self._consumer = confluent_kafka.Consumer(properties)
        _check_topics(self._consumer, topic, self._own.markers_topic(topic))
        self._consumer.subscribe([topic])
        self._breaker = Breaker(breaker or BreakerPolicy(), topic)
        self._reader = Reader(
            self._consumer,
            self._marking,
            self._breaker,
            self._message,
            batch=batch,
            timeout_ms=self._timeout_ms,
        )
        self._reader.start()

    @property
    def breaker_state(self) -> str:
        """Whether it reads: `closed` it does, `open` it does not, `half-open` it tries."""
        return self._breaker.state

    def __iter__(self) -> Iterator[Message]:
        """The messages, without end. Several threads may iterate at once."""
        while self._reader.wait():
            if message := self._reader.take():
                yield message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """The same for tasks."""
        # What waits in a thread takes nothing: a task that is cancelled loses no message.
        while self._reader.has_some() or await asyncio.to_thread(self._reader.wait):
            if message := self._reader.take():
                yield message

    def close(self) -> None:
        """Read no more, and give back what nobody has begun. Safe to repeat.

        What is being worked on can still be acknowledged.
        """
        self._reader.close()
        leave(self._consumer, is_static=self._is_static)
        self._marking.close()
        self._breaker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _message(self, record: confluent_kafka.Message) -> Message:
        return Message(
            record, self._marking, self._breaker, self._timeout_ms, self._own.timeout_max_ms
        )


def consumer_properties(settings: Settings, group: str) -> dict[str, str | int | float | bool]:
    """Properties of a worker's consumer; one of kmq's own may be in the same group."""
    ours: dict[str, str | int | float | bool] = {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
    }
    return ours | librdkafka_properties(settings)


def _check_topics(consumer: confluent_kafka.Consumer, topic: str, markers: str) -> None:
    """A marker that has no place would keep its message from being worked on for ever."""
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
            "and a marker is where its message is: they must have as many"
        )
