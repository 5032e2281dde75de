"""The driver's JVM: how it is started, which process it is, and what it says that is passed on."""

import sys
import threading
from contextlib import suppress
from subprocess import PIPE, TimeoutExpired
from typing import IO, Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from duetime.config import is_submitted
from duetime.errors import SetupError
from duetime.java import java_class

#: What a call raises when the JVM is gone, or cannot do it: at first the one, then the other.
JVM_ERRORS = (Py4JError, ConnectionError)

#: The object that keeps the producers of all sinks, which belongs to Spark's connector.
PRODUCERS = "org.apache.spark.sql.kafka010.producer.InternalKafkaProducerPool$"

#: What Java says whenever Spark starts it, and nobody can act on.
NOISE = b"WARNING: Using incubator modules"


def start_jvm(conf: SparkConf) -> None:
    """Start the driver's JVM with these settings, unless this process has one already.

    It gets a session of its own: what a terminal or a supervisor sends to all processes at once is
    for us to heed, and the JVM is stopped when windows are over. It ends if this process dies.
    """
    if SparkContext._gateway or is_submitted():  # noqa: SLF001 (PySpark has no other name for it)
        return
    popen = {"start_new_session": True, "stderr": PIPE}
    gateway = launch_gateway(conf, popen)  # type: ignore[no-untyped-call]
    threading.Thread(target=_pass_on, args=(gateway.proc.stderr,), daemon=True).start()
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 (PySpark's only way)


def end_jvm() -> None:
    """End the driver's JVM, which outlives its Spark, where this process has started one.

    Its Kafka producers ask for their topics every few seconds for as long as it lives, and brokers
    that create topics would bring back what was deleted.
    """
    if process := _let_go():
        process.kill()
        process.wait()


def end_well(within_s: float) -> None:
    """Let it end by itself, and wait for that. Raises SetupError."""
    if process := _let_go():
        # It ends with the program that started it, and takes this for that.
        process.stdin.close()
        try:
            process.wait(within_s)
        except TimeoutExpired as error:
            process.kill()
            raise SetupError(
                f"Spark's JVM did not end within {within_s:.0f} s: try again"
            ) from error


def _let_go() -> Any:  # noqa: ANN401 (py4j's gateway has no type)
    """The process of the JVM, which PySpark knows no more; None where we have started none."""
    gateway: Any = SparkContext._gateway  # noqa: SLF001 (as below)
    if gateway is None or is_submitted():
        return None
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 (as below)
    gateway.shutdown()
    return gateway.proc


def jvm(spark: SparkSession) -> Any:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """The driver's JVM, for what Spark's Python has no words for."""
    return spark.sparkContext._jvm  # noqa: SLF001 (PySpark's only way to its JVM)


def java_array(spark: SparkSession, *given: Any, of: str = "Object") -> Any:  # noqa: ANN401 (as above)
    """An array of a class of java.lang; Object[] are what a method called by reflection takes."""
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 (as above)
    values = gateway.new_array(java_class(jvm(spark), f"java.lang.{of}"), len(given))
    for position, each in enumerate(given):
        values[position] = each
    return values


def jvm_pid(spark: SparkSession) -> int:
    """The process id of the driver's JVM."""
    return int(java_class(jvm(spark), "java.lang.ProcessHandle").current().pid())


def close_producers(spark: SparkSession) -> None:
    """Close Spark's Kafka producers, which send or give up before what they hold.

    A query that is stopped leaves its last rows to its producer, and does not wait for them. That
    takes as long as Kafka takes to answer, up to `delivery.timeout.ms`. Whoever has one of these
    producers still cannot send by it.
    """
    with suppress(*JVM_ERRORS):
        java_class(jvm(spark), PRODUCERS).__getattr__("MODULE$").reset()


def drop_broken_producers(spark: SparkSession) -> int:
    """Let go of Kafka producers that can never send again; returns how many there were.

    An idempotent producer whose credentials are refused while it asks for its id is broken for
    good, and Spark keeps one for as long as it is used: each second. Whoever asks for it next gets
    a new one. One that is in use at this instant is let go at a later call.
    """
    java = jvm(spark)
    fields = java_class(java, "org.apache.commons.lang3.reflect.FieldUtils")
    methods = java_class(java, "org.apache.commons.lang3.reflect.MethodUtils")
    # Neither Spark nor Kafka has a public name for it.
    pool = fields.readField(java_class(java, PRODUCERS).__getattr__("MODULE$"), "pool", True)
    entries, broken = pool.getAsMap().values().iterator(), 0
    while entries.hasNext():
        entry = entries.next()
        state = fields.readField(entry.producer().producer(), "transactionManager", True)
        if state is not None and methods.invokeMethod(state, True, "hasFatalError"):
            # Long ago: the pool closes what is not in use, under its own lock.
            fields.writeField(entry, "_expireAt", 0, True)
            broken += 1
    if broken:
        methods.invokeMethod(pool, True, "evictExpired")
    return broken


class ProducerMetrics:
    """What Kafka's own metrics say of the producers in this JVM, since each was opened."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        java = jvm(spark)
        self._name = java_class(java, "javax.management.ObjectName")
        factory = java_class(java, "java.lang.management.ManagementFactory")
        self._beans = factory.getPlatformMBeanServer()
        # The class of this server is no part of Java's interface, and py4j may not look into it.
        interface = java_class(java, "java.lang.Class").forName("javax.management.MBeanServer")
        self._given_up = java_array(spark, "record-error-total", of="String")
        self._sent = java_array(spark, "record-send-total", of="String")
        self._room = [
            java_array(spark, f"buffer-{each}-bytes", of="String")
            for each in ("total", "available")
        ]
        self._methods = {each.getName(): each for each in interface.getMethods()}

    def given_up(self, client_id: str) -> int:
        """How many records a producer could not deliver; 0 where there is none of this name."""
        return self._sum(f"type=producer-metrics,client-id={client_id}", self._given_up)

    def errors(self) -> dict[tuple[str, str], int]:
        """How many records each producer could not deliver to each topic, where there are any."""
        found = {}
        for client in self._names("type=producer-metrics,*", "client-id"):
            if not self.given_up(client):
                continue
            topics = f"type=producer-topic-metrics,client-id={client}"
            for topic in self._names(f"{topics},*", "topic"):
                if count := self._sum(f"{topics},topic={topic}", self._given_up):
                    found[client, topic] = count
        return found

    def sent(self, client_id: str, topic: str | None = None) -> int:
        """How many records it has sent, to all topics or to one; each try counts."""
        if topic is None:
            return self._sum(f"type=producer-metrics,client-id={client_id}", self._sent)
        bean = f"type=producer-topic-metrics,client-id={client_id},topic={topic}"
        return self._sum(bean, self._sent)

    def unacknowledged_bytes(self, client_id: str) -> int:
        """How much of its buffer a producer's records take, until they are acknowledged."""
        name = f"type=producer-metrics,client-id={client_id}"
        total, available = (self._sum(name, each) for each in self._room)
        return total - available

    def _sum(self, name: str, attributes: Any) -> int:  # noqa: ANN401 (as above)
        bean = self._name(f"kafka.producer:{name}")
        if not self._asked("isRegistered", bean):
            return 0
        # A producer that is just being opened has a bean already, and not this attribute.
        found = self._asked("getAttributes", bean, attributes)
        # By number: the end of Java's iterators is an exception, which PySpark takes long to name.
        return int(sum(found.get(number).getValue() for number in range(found.size())))

    def _names(self, pattern: str, key: str) -> list[str]:
        """One part of the names of all beans that match."""
        found = self._asked("queryNames", self._name(f"kafka.producer:{pattern}"), None)
        return [each.getKeyProperty(key) for each in found.toArray()]

    def _asked(self, method: str, *given: Any) -> Any:  # noqa: ANN401 (as above)
        return self._methods[method].invoke(self._beans, java_array(self._spark, *given))


def _pass_on(words: IO[bytes]) -> None:
    for line in words:
        if not line.startswith(NOISE):
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
