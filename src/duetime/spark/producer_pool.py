"""The pool of Kafka producers of Spark's connector. All sinks of one name share a producer.

Neither Spark nor Kafka has a public name for some of these fields.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from duetime.core.threads import wait_until
from duetime.spark.catalyst import java_class
from duetime.spark.session import JVM_ERRORS, jvm

POOL = "org.apache.spark.sql.kafka010.producer.InternalKafkaProducerPool"

#: Time limit for the broker to give a producer its id, and the interval of checks, in seconds.
ID_TIMEOUT_S, ID_INTERVAL_S = 5.0, 0.05


class ProducerPool:
    """The pool of one JVM."""

    def __init__(self, spark: SparkSession) -> None:
        self._java = jvm(spark)
        self._fields = java_class(self._java, "org.apache.commons.lang3.reflect.FieldUtils")
        self._methods = java_class(self._java, "org.apache.commons.lang3.reflect.MethodUtils")
        self._public = self._module(POOL)
        self._pool = self._fields.readField(self._public, "pool", True)

    def acquire(self, options: Mapping[str, str]) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return the producer of a sink with these options. The pool keeps it until `release`."""
        given = java_class(self._java, "java.util.HashMap")()
        for option in options.items():
            given.put(*option)
        python = java_class(self._java, "org.apache.spark.api.python.PythonUtils")
        by_name = self._module("org.apache.spark.sql.catalyst.util.CaseInsensitiveMap").apply(
            python.toScalaMap(given)
        )
        provider = self._module("org.apache.spark.sql.kafka010.KafkaSourceProvider")
        properties = provider.kafkaParamsForProducer(by_name)
        return self._public.acquire(properties)

    def release(self, pooled: Any) -> None:  # noqa: ANN401 (py4j has no types)
        """Let the pool close the producer when it is not used."""
        self._public.release(pooled)

    def close_all(self) -> None:
        """Close all producers."""
        self._public.reset()

    def holds(self, pooled: Any) -> bool:  # noqa: ANN401 (py4j has no types)
        """Return whether sinks of a producer's options have this one, and no other.

        The pool finds a producer by its properties. A sink has the same: both are made by
        `sink_options` and Spark's own KafkaSourceProvider.
        """
        entry = self._pool.getAsMap().get(pooled.cacheKey())
        return bool(entry.isDefined() and entry.get().producer().id() == pooled.id())

    def has_id(self, pooled: Any) -> bool:  # noqa: ANN401 (py4j has no types)
        """Return whether the broker has given a producer its id."""
        return bool(self._methods.invokeMethod(self._state(pooled), True, "hasProducerId"))

    def is_broken(self, pooled: Any) -> bool:  # noqa: ANN401 (py4j has no types)
        """Return whether a producer can never send again."""
        state = self._state(pooled)
        # One that is not idempotent has no such state.
        return state is not None and self._methods.invokeMethod(state, True, "hasFatalError")

    def errors(self, pooled: Any) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return a producer's metric of the records that could not be delivered."""
        producer, tags = pooled.producer(), java_class(self._java, "java.util.HashMap")()
        tags.put("client-id", self._fields.readField(producer, "clientId", True))
        name = java_class(self._java, "org.apache.kafka.common.MetricName")
        return producer.metrics().get(name("record-error-total", "producer-metrics", "", tags))

    def drop_broken(self) -> int:
        """Remove the producers that are broken and not in use; return how many are broken."""
        broken = [each for each in self._entries() if self.is_broken(each.producer())]
        for each in broken:
            # Expired: the pool closes it when it is not in use, under its own lock.
            self._fields.writeField(each, "_expireAt", 0, True)
        if broken:
            self._methods.invokeMethod(self._pool, True, "evictExpired")
        return len(broken)

    def _module(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return a Scala object."""
        return java_class(self._java, f"{name}$").__getattr__("MODULE$")

    def _entries(self) -> Iterator[Any]:
        entries = self._pool.getAsMap().values().iterator()
        while entries.hasNext():
            yield entries.next()

    def _state(self, pooled: Any) -> Any:  # noqa: ANN401 (py4j has no types)
        return self._fields.readField(pooled.producer(), "transactionManager", True)


class HeldProducer:
    """The producer of a sink, held so that no other takes its place unnoticed. Release it."""

    def __init__(self, pool: ProducerPool, options: Mapping[str, str]) -> None:
        """Hold the producer of a sink with these options, before it has its first row."""
        self._pool, self._pooled = pool, pool.acquire(options)
        self._producer = self._pooled.producer()
        self._errors = pool.errors(self._pooled)
        self._errors_before: float | None = None

    def is_ready(self) -> bool:
        """Wait until the broker has given it an id; return whether it has.

        While it is refused one it drops what it is given, and counts no error.
        """
        # What an earlier query has left with it is acknowledged then, or counted.
        self._producer.flush()
        self._errors_before = self._errors.metricValue()
        return wait_until(lambda: self._pool.has_id(self._pooled), ID_TIMEOUT_S, ID_INTERVAL_S)

    def flush(self) -> bool:
        """Wait until Kafka has acknowledged all that it was given before, or it gave that up.

        This takes up to `delivery.timeout.ms`. Returns whether all is acknowledged that the sink
        has given it since the start.
        """
        try:
            self._producer.flush()
            # These come last: they tell of what is in no buffer any more.
            return (
                not self._pool.is_broken(self._pooled)
                and self._errors.metricValue() == self._errors_before
                # After it was closed, the sink's rows go to another producer.
                and self._pool.holds(self._pooled)
            )
        except Py4JJavaError:
            # It is closed.
            return False

    def release(self) -> None:
        """Let the pool close it when it is not used."""
        with suppress(*JVM_ERRORS):
            self._pool.release(self._pooled)


def close_producers(spark: SparkSession) -> None:
    """Close Spark's Kafka producers, once each has sent or given up its records.

    A query that is stopped leaves its last rows to its producer, and does not wait for them. This
    takes as long as Kafka takes to answer, up to `delivery.timeout.ms`. A task that still has such
    a producer cannot send by it.
    """
    with suppress(*JVM_ERRORS):
        ProducerPool(spark).close_all()


def drop_broken_producers(spark: SparkSession) -> int:
    """Remove Kafka producers that can never send again from Spark's pool; return their number.

    An idempotent producer whose credentials are refused while it requests its id is broken for
    good, and Spark keeps a producer for as long as it is used: each second. The next task gets a
    new one. A producer that is in use at this instant is removed by a later call.
    """
    return ProducerPool(spark).drop_broken()
