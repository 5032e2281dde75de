"""Exchange: a Spark job of one task, by which the driver reaches one executor.

It sets system properties there, and returns the executor's clocks, what rows have requested, and
the metrics of its producers. It travels as every task does, encrypted and authenticated as Spark is
configured to, and needs no other port.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.core.errors import SetupError
from duetime.spark import catalyst
from duetime.spark.catalyst import PlanCache, java_array, java_class
from duetime.spark.session import jvm
from duetime.spark.task_jvms import ATTRIBUTES, Bean, bean

#: A request, in JSON: the executor that it is for, properties to set, and flags whose requests are
#: taken.
REQUEST_TYPE = "executor string, properties map<string,string>, flags array<string>"

#: The beans of every exchange: Kafka's producers, in all and by topic.
PRODUCER_BEANS = (
    "kafka.producer:type=producer-metrics,*",
    "kafka.producer:type=producer-topic-metrics,*",
)


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
