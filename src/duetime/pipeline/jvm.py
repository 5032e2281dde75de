"""The driver's JVM: how it is started, which process it is, and what it says that is passed on."""

import os
import sys
import threading
from subprocess import PIPE
from typing import IO, Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

#: What a call raises when the JVM is gone, or cannot do it: at first the one, then the other.
JVM_ERRORS = (Py4JError, ConnectionError)

#: What Java says whenever Spark starts it, and nobody can act on.
NOISE = b"WARNING: Using incubator modules"


def start_jvm(conf: SparkConf) -> None:
    """Start the driver's JVM with these settings, unless this process has one already.

    It gets a session of its own: what a terminal or a supervisor sends to all processes at once is
    for us to heed, and the JVM is stopped when windows are over. It ends if this process dies.
    """
    if SparkContext._gateway or "PYSPARK_GATEWAY_PORT" in os.environ:  # noqa: SLF001 (PySpark has no other name for it)
        return
    popen = {"start_new_session": True, "stderr": PIPE}
    gateway = launch_gateway(conf, popen)  # type: ignore[no-untyped-call]
    threading.Thread(target=_pass_on, args=(gateway.proc.stderr,), daemon=True).start()
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 (PySpark's only way)


def jvm(spark: SparkSession) -> Any:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """The driver's JVM, for what Spark's Python has no words for."""
    return spark.sparkContext._jvm  # noqa: SLF001 (PySpark's only way to its JVM)


def java_array(spark: SparkSession, *given: Any) -> Any:  # noqa: ANN401 (as above)
    """The arguments of a method that Java calls by reflection: Object[]."""
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 (as above)
    values = gateway.new_array(jvm(spark).Object, len(given))
    for position, each in enumerate(given):
        values[position] = each
    return values


def jvm_pid(spark: SparkSession) -> int:
    """The process id of the driver's JVM."""
    return int(jvm(spark).java.lang.ProcessHandle.current().pid())


class FailedSends:
    """Counts the records that this JVM's Kafka producers have given up, by their metrics."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._java = java = jvm(spark)
        self._beans = java.java.lang.management.ManagementFactory.getPlatformMBeanServer()
        # The class of this server is no part of Java's interface, and py4j may not look into it.
        interface = java.java.lang.Class.forName("javax.management.MBeanServer")
        self._methods = {each.getName(): each for each in interface.getMethods()}

    def of(self, client_id: str) -> int:
        """Of one producer, since it was opened; 0 where there is none. Source: Kafka's metrics."""
        bean = self._java.javax.management.ObjectName(
            f"kafka.producer:type=producer-metrics,client-id={client_id}"
        )
        if not self._asked("isRegistered", bean):
            return 0
        return int(self._asked("getAttribute", bean, "record-error-total"))

    def _asked(self, method: str, *given: Any) -> Any:  # noqa: ANN401 (as above)
        return self._methods[method].invoke(self._beans, java_array(self._spark, *given))


def _pass_on(words: IO[bytes]) -> None:
    for line in words:
        if not line.startswith(NOISE):
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
