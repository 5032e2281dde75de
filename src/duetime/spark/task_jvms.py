"""The JVMs that run tasks: what rows read there as system properties, and how their producers fare.

A row cannot ask the driver. So the driver publishes what rows need as properties of the JVM that
they run in: leases, and the table of destinations. A row that wants something sets a property, its
flag. In local mode there is one JVM, this one; on a cluster, `executors` has the others.

On a cluster the driver reaches an executor by an *exchange*, a Spark job of one task. It sets
properties there, and returns the executor's clocks, what rows have requested, and the metrics of
its producers. It travels as every task does, encrypted and authenticated as Spark is configured to,
and needs no other port.
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.core.errors import SetupError
from duetime.core.threads import wait_until
from duetime.spark import catalyst
from duetime.spark.catalyst import PlanCache, java_array, java_class
from duetime.spark.producer_pool import HeldProducer, ProducerPool, close_producers
from duetime.spark.session import jvm

#: A key=value of an ObjectName, and a "name = value" of an AttributeList, both as Java prints them.
KEY = re.compile(r"[:,]([\w-]+)=([^,]*)")
ATTRIBUTE = re.compile(r"([\w-]+) = ([^,\]]*)")

#: The attributes of Kafka's producers that are read here.
ERRORS, SENT = "record-error-total", "record-send-total"
BUFFER, AVAILABLE = "buffer-total-bytes", "buffer-available-bytes"
ATTRIBUTES = (ERRORS, SENT, BUFFER, AVAILABLE)

#: Checks in a row that must find a producer empty, and their interval in seconds.
QUIET_CHECKS, QUIET_INTERVAL_S = 3, 0.1

#: The keys of an MBean's name, and its numbers.
Bean = tuple[dict[str, str], dict[str, float]]

#: The request of an exchange, in JSON: the executor that it is for, properties to set, and flags
#: whose requests are taken.
REQUEST_TYPE = "executor string, properties map<string,string>, flags array<string>"

#: The beans of every exchange: Kafka's producers, in all and by topic.
PRODUCER_BEANS = (
    "kafka.producer:type=producer-metrics,*",
    "kafka.producer:type=producer-topic-metrics,*",
)


class TaskJvms(Protocol):
    """The JVMs that run tasks. Thread-safe. All but `close` raise JVM_ERRORS."""

    @property
    def producers(self) -> "ProducerMetrics":
        """The metrics of their Kafka producers."""

    @property
    def executors(self) -> Collection[str]:
        """The executors that are there; none in local mode."""

    def publish(self, properties: Mapping[str, str]) -> None:
        """Set system properties in each; in one that comes later, before it has any lease."""

    def extend_lease(self, name: str, until_s: float) -> None:
        """Let rows pass `lease_is_held` until this instant of time.monotonic()."""

    def end_lease(self, name: str) -> None:
        """Let no row pass any more; return once it holds in each JVM."""

    def take_requests(self, flag: str) -> list[str]:
        """Return the names that rows have requested since the last call.

        A row sets the property `<flag>.<name>`, then `<flag>`.
        """

    def settle(self) -> None:
        """Return once no producer holds a record, which takes up to `delivery.timeout.ms`."""

    def close(self) -> None:
        """Stop the threads."""


class DriverJvm:
    """This process's JVM, which runs all tasks in local mode."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark, self._jvm = spark, jvm(spark)
        self._system = java_class(self._jvm, "java.lang.System")
        self.beans = JvmBeans(spark)
        self.producers: ProducerMetrics = DriverProducers(self.beans)
        self.executors: Collection[str] = ()

    def publish(self, properties: Mapping[str, str]) -> None:
        """Set the system properties with one call for all of them."""
        if not properties:
            return
        table = java_class(self._jvm, "java.util.Properties")()
        text = "\n".join(f"{name}={value}" for name, value in properties.items())
        table.load(java_class(self._jvm, "java.io.StringReader")(text))
        self._system.getProperties().putAll(table)

    def extend_lease(self, name: str, until_s: float) -> None:
        """Set the lease. Java's nanoTime is the clock of time.monotonic()."""
        self._system.setProperty(name, str(int(until_s * 1e9)))

    def end_lease(self, name: str) -> None:
        """Set the lease to an instant that is over."""
        self.extend_lease(name, 0)

    def take_requests(self, flag: str) -> list[str]:
        """Return and clear the requests."""
        if self._system.clearProperty(flag) is None:
            return []
        requests = self._names(f"{flag}.")
        for each in requests:
            self._system.clearProperty(each)
        return [each.removeprefix(f"{flag}.") for each in requests]

    def properties(self, prefix: str) -> dict[str, str]:
        """Return the properties whose names begin with this. No value may have a comma."""
        names = self._names(prefix)
        found = java_class(self._jvm, "java.util.HashMap")(self._system.getProperties())
        found.keySet().retainAll(names)
        # As text, in one call.
        pairs = [each.partition("=") for each in found.toString()[1:-1].split(", ") if each]
        return {name: value for name, _, value in pairs}

    def _names(self, prefix: str) -> list[str]:
        names = java_class(self._jvm, "java.lang.String").join(
            "\n", self._system.getProperties().stringPropertyNames()
        )
        return [each for each in names.split("\n") if each.startswith(prefix)]

    def hold_producer(self, options: Mapping[str, str]) -> HeldProducer:
        """Return the producer of a sink with these options."""
        return HeldProducer(ProducerPool(self._spark), options)

    def settle(self) -> None:
        """Close the producers: each sends or gives up its records before."""
        close_producers(self._spark)

    def close(self) -> None:
        """Do nothing: there are no threads."""


class ProducerMetrics(ABC):
    """Kafka's metrics of the producers in the JVMs that run tasks, since each was opened."""

    def given_up(self, client_id: str) -> int:
        """Return the records that a producer could not deliver; 0 for an unknown name."""
        return self._total(f"type=producer-metrics,client-id={client_id}", ERRORS)

    def refresh(self) -> None:
        """Read them again. In this process, each call reads them."""
        return

    def errors(self) -> dict[tuple[str, str], int]:
        """Return the undelivered records by client id and topic, where there are any."""
        self.refresh()
        found: dict[tuple[str, str], int] = defaultdict(int)
        beans = self._read("type=producer-metrics,*")
        clients = {keys["client-id"] for keys, values in beans if values.get(ERRORS)}
        for client in clients:
            for keys, values in self._read(f"type=producer-topic-metrics,client-id={client},*"):
                if count := int(values.get(ERRORS, 0)):
                    found[client, keys["topic"]] += count
        return dict(found)

    def sent(self, client_id: str, topic: str | None = None) -> int:
        """Return the records that a producer has sent, to all topics or to one; retries count."""
        if topic is None:
            return self._total(f"type=producer-metrics,client-id={client_id}", SENT)
        return self._total(f"type=producer-topic-metrics,client-id={client_id},topic={topic}", SENT)

    def unacknowledged_bytes(self, client_id: str | None = None) -> int:
        """Return the bytes of unacknowledged records in a producer's buffer, or in all buffers."""
        self.refresh()
        of_client = "*" if client_id is None else f"client-id={client_id}"
        found = self._read(f"type=producer-metrics,{of_client}")
        return int(sum(each.get(BUFFER, 0) - each.get(AVAILABLE, 0) for _, each in found))

    def await_quiet(self, client_id: str | None, timeout_s: float) -> bool:
        """Wait until each record of one or all is acknowledged or given up; return whether it is.

        Several checks in a row must find that: a task that is being stopped may hand over one more
        record.
        """
        quiet = 0

        def is_quiet() -> bool:
            nonlocal quiet
            quiet = 0 if self.unacknowledged_bytes(client_id) else quiet + 1
            return quiet == QUIET_CHECKS

        return wait_until(is_quiet, timeout_s, QUIET_INTERVAL_S)

    def _total(self, pattern: str, attribute: str) -> int:
        return int(sum(values.get(attribute, 0) for _, values in self._read(pattern)))

    @abstractmethod
    def _read(self, pattern: str) -> Iterable[Bean]:
        """Return keys and attributes of each bean `kafka.producer:<pattern>`."""


class DriverProducers(ProducerMetrics):
    """The producers in this process's JVM."""

    def __init__(self, beans: "JvmBeans") -> None:
        self._beans = beans

    def _read(self, pattern: str) -> Iterable[Bean]:
        return self._beans.read(f"kafka.producer:{pattern}", ATTRIBUTES)


class JvmBeans:
    """The MBeans of this process's JVM. Thread-safe."""

    def __init__(self, spark: SparkSession) -> None:
        java = jvm(spark)
        self._name = java_class(java, "javax.management.ObjectName")
        factory = java_class(java, "java.lang.management.ManagementFactory")
        self._server = factory.getPlatformMBeanServer()
        # The server's class is internal to Java, where py4j has no access: call by reflection.
        interface = java_class(java, "java.lang.Class").forName("javax.management.MBeanServer")
        self._methods = {each.getName(): each for each in interface.getMethods()}
        # An array takes a call for each item.
        self._attributes = cache(partial(java_array, of="String"))

    def keys(self, pattern: str) -> list[dict[str, str]]:
        """Return the keys in the name of each bean that matches a pattern, in one call."""
        names = self._invoke("queryNames", self._name(pattern), None).toString()
        return [dict(KEY.findall(each)) for each in names[1:-1].split(", ") if each]

    def read(self, pattern: str, attributes: Sequence[str]) -> Iterator[Bean]:
        """Yield keys and attributes of each bean that matches a pattern."""
        wanted = self._attributes(*attributes)
        for name in self._invoke("queryNames", self._name(pattern), None).toArray():
            # As text, in one call. A bean that is just being registered lacks attributes.
            found = self._invoke("getAttributes", name, wanted).toString()
            yield bean(f"{name.toString()} {found}")

    def _invoke(self, method: str, *given: Any) -> Any:  # noqa: ANN401 (py4j has no types)
        return self._methods[method].invoke(self._server, java_array(*given))


def bean(text: str) -> Bean:
    """Return keys and numbers of "<ObjectName> <AttributeList>", as Java prints them."""
    name, _, attributes = text.partition(" ")
    return dict(KEY.findall(name)), {key: float(n) for key, n in ATTRIBUTE.findall(attributes)}


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """The state of an executor, and when it was asked for it."""

    #: The executor's monotonic clock, System.nanoTime.
    nano_ns: int
    #: Names that rows have requested, by flag.
    requests: Mapping[str, list[str]]
    beans: list[Bean]
    #: When the exchange began and ended, by this process's monotonic clock.
    started_s: float
    ended_s: float
    #: How far the executor's wall clock is from this machine's at least, in ms.
    skew_ms: float


class Exchange:
    """Makes exchanges with executors. Thread-safe."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark, self._context = spark, spark.sparkContext._jsc.sc()  # noqa: SLF001 (PySpark's only way to it)
        java = jvm(spark)
        rows = "org.apache.spark.sql.catalyst.expressions.GenericInternalRow"
        self._row = java_class(java, rows)
        self._utf8 = java_class(java, "org.apache.spark.unsafe.types.UTF8String")
        row_type = java_class(java, "java.lang.Class").forName(
            "org.apache.spark.sql.catalyst.InternalRow"
        )
        self._tag = java_class(java, "scala.reflect.ClassTag").apply(row_type)
        self._pair = java_class(java, "scala.Tuple2")
        self._schema = spark.range(0).selectExpr("string(id) as request")._jdf.schema()  # noqa: SLF001 (PySpark's only way to it)
        self._plans = PlanCache(spark, answers)

    def __call__(
        self, executor: str, location: str, properties: Mapping[str, str], flags: Iterable[str]
    ) -> ExecutorReport:
        """Exchange with an executor. Raises SetupError if another one has answered.

        Raises Py4JError or PySparkException where the executor is gone.
        """
        flags = list(flags)
        request = {"executor": executor, "properties": properties, "flags": flags}
        rows = self._rows(json.dumps(request), location)
        started_s, started_ms = time.monotonic(), time.time() * 1_000
        (row,) = self._plans(rows).collect()
        ended_ms, ended_s = time.time() * 1_000, time.monotonic()
        if row.executor != executor:
            raise SetupError(f"executor {executor} had no free core for an exchange")
        return ExecutorReport(
            nano_ns=row.nano_ns,
            requests={
                flag: [each.removeprefix(f"{flag}.") for each in found]
                for flag, found in zip(flags, row.requests, strict=True)
            },
            beans=[bean(each) for each in row.beans],
            started_s=started_s,
            ended_s=ended_s,
            # Java's clock has whole ms.
            skew_ms=max(0.0, row.now_ms - ended_ms, started_ms - row.now_ms - 1),
        )

    def _rows(self, request: str, location: str) -> DataFrame:
        """Return one row, in a partition that prefers a location."""
        values = java_array(self._utf8.fromString(request))
        places = catalyst.seq([location])
        placed = catalyst.seq([self._pair(self._row(values), places)])
        return catalyst.frame(self._spark, self._context.makeRDD(placed, self._tag), self._schema)


def answers(requests: DataFrame) -> DataFrame:
    """Return the answer to each request (string, REQUEST_TYPE). Runs in the executor."""
    request = F.from_json("request", REQUEST_TYPE)
    # A task whose executor is gone runs on another, whose clock is another. In their order: leases
    # are last.
    replaced = F.when(
        F.col("request.executor") == F.col("executor"),
        F.transform(
            F.map_entries("request.properties"),
            lambda each: catalyst.set_system_property(each["key"], each["value"]),
        ),
    )

    def taken(flag: Any) -> Any:  # noqa: ANN401 (the stubs of `transform` want it)
        prefix = F.concat(flag, F.lit("."))
        mine = F.filter(catalyst.property_names(), lambda each: each.startswith(prefix))
        requested = F.filter(mine, lambda each: catalyst.clear_property(each).isNotNull())
        is_flagged = catalyst.clear_property(flag).isNotNull()
        return F.when(is_flagged, requested).otherwise(F.array().cast("array<string>"))

    beans = (catalyst.beans(F.lit(each), ATTRIBUTES) for each in PRODUCER_BEANS)
    addressed = requests.select(request.alias("request"), catalyst.executor_id().alias("executor"))
    return addressed.select(
        F.size(replaced).alias("replaced"),
        "executor",
        catalyst.nano_time().alias("nano_ns"),
        catalyst.current_time_ms().alias("now_ms"),
        F.transform("request.flags", taken).alias("requests"),
        F.concat(*beans).alias("beans"),
    )
