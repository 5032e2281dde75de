"""The pool of Kafka producers that all sinks of a JVM share: Spark's connector keeps it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from duetime.core.threads import wait_until
from duetime.spark.catalyst import java_class
from duetime.spark.session import JVM_ERRORS, jvm

#: Its class.
PRODUCERS = "org.apache.spark.sql.kafka010.producer.InternalKafkaProducerPool$"

#: How soon the tasks of a failed query have given its producer back, in seconds.
TASK_END_S = 2.0


def close_producers(spark: SparkSession) -> None:
    """Close Spark's Kafka producers, once each has sent or given up its records.

    A query that is stopped leaves its last rows to its producer, and does not wait for them. This
    takes as long as Kafka takes to answer, up to `delivery.timeout.ms`. A task that still has such
    a producer cannot send by it.
    """
    with suppress(*JVM_ERRORS):
        java_class(jvm(spark), PRODUCERS).__getattr__("MODULE$").reset()


def drop_broken_producers(spark: SparkSession) -> int:
    """Remove Kafka producers that can never send again from Spark's pool; return their number.

    An idempotent producer whose credentials are refused while it requests its id is broken for
    good, and Spark keeps a producer for as long as it is used: each second. The next task gets a
    new one. A producer that is in use at this instant is removed by a later call.
    """
    pool = ProducerPool(spark)
    broken = [entry for entry, producer in pool.entries() if pool.is_broken(producer)]
    pool.expire(broken)
    return len(broken)


def abort_producer(spark: SparkSession, client_id: str) -> None:
    """Close a producer in this JVM without sending what it holds; the next task gets a new one."""
    pool = ProducerPool(spark)

    def found() -> list[tuple[Any, Any]]:
        return [each for each in pool.entries() if pool.client_id(each[1]) == client_id]

    for _, producer in found():
        producer.close(java_class(jvm(spark), "java.time.Duration").ZERO)

    def is_gone() -> bool:
        pool.expire([entry for entry, _ in found()])
        return not found()

    # The failed tasks are ending, and give it back.
    wait_until(is_gone, TASK_END_S)


class ProducerPool:
    """Spark's pool of Kafka producers. Neither Spark nor Kafka has a public name for its fields."""

    def __init__(self, spark: SparkSession) -> None:
        java = jvm(spark)
        self._fields = java_class(java, "org.apache.commons.lang3.reflect.FieldUtils")
        self._methods = java_class(java, "org.apache.commons.lang3.reflect.MethodUtils")
        self._pool = self._field(java_class(java, PRODUCERS).__getattr__("MODULE$"), "pool")

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Yield each entry, and Kafka's producer in it."""
        entries = self._pool.getAsMap().values().iterator()
        while entries.hasNext():
            entry = entries.next()
            yield entry, entry.producer().producer()

    def client_id(self, producer: Any) -> str:  # noqa: ANN401 (py4j's objects have no type)
        """Return the producer's client id."""
        return str(self._field(producer, "clientId"))

    def is_broken(self, producer: Any) -> bool:  # noqa: ANN401 (py4j's objects have no type)
        """Return whether the producer can never send again."""
        state = self._field(producer, "transactionManager")
        return state is not None and bool(self._methods.invokeMethod(state, True, "hasFatalError"))

    def expire(self, entries: Sequence[Any]) -> None:
        """Have the pool close these, under its own lock, once they are not in use."""
        for each in entries:
            self._fields.writeField(each, "_expireAt", 0, True)
        if entries:
            self._methods.invokeMethod(self._pool, True, "evictExpired")

    def _field(self, owner: Any, name: str) -> Any:  # noqa: ANN401 (py4j's objects have no type)
        return self._fields.readField(owner, name, True)
