"""A plan that is made once and used again over other records of the same topics' shape.

Spark analyses, optimises and plans each DataFrame anew. Of a turn, which differs from the last one
in the offsets that it reads, that is two thirds of the work (measured on 2 cores after some
hundred turns of 20 messages: 450 ms with it, 165 ms without). So the physical plan of the first is
kept. Of each further one only the read at its bottom is planned, and put in the place of the first
one's; what is above it is copied, which Spark itself does whenever it rewrites a plan.

It takes what Spark has no public names for (SparkPlan.withNewChildren, BatchScanExec.copy), in the
release that duetime is pinned to.
"""

import threading
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from duetime.java import java_class, scala_list
from duetime.pipeline.jvm import jvm

#: The fields of a BatchScanExec that are another read's own; the rest is as in the kept plan.
READ = ("output", "scan")


class PlannedOnce:
    """Rows that some steps make of a Kafka read, planned at the first call. Thread-safe.

    The steps must be the same for each read, whatever it reads: they are not called again.
    """

    def __init__(self, spark: SparkSession, steps: Callable[[DataFrame], DataFrame]) -> None:
        self._spark = spark
        self._steps = steps
        self._lock = threading.Lock()
        self._kept: _Kept | None = None

    def __call__(self, records: DataFrame) -> DataFrame:
        """What the steps make of these records, which are one read of Kafka and nothing else."""
        with self._lock:
            if self._kept is None:
                self._kept = _Kept(self._spark, self._steps(records))
        return self._kept.over(records)


class _Kept:
    """The physical plan of rows: the read at its bottom, and the steps above it."""

    def __init__(self, spark: SparkSession, rows: DataFrame) -> None:
        self._spark = spark
        self._session: Any = spark._jsparkSession  # noqa: SLF001 (PySpark's only way to it)
        self._sessions = java_class(jvm(spark), "org.apache.spark.sql.classic.SparkSession")
        jrows: Any = rows._jdf  # noqa: SLF001 (as above)
        self._schema = jrows.schema()
        *self._steps, self._read = _down(jrows.queryExecution().executedPlan())

    def over(self, records: DataFrame) -> DataFrame:
        # A plan belongs to the session of the thread that makes it.
        self._sessions.setActiveSession(self._session)
        plan = self._reading(records)
        for step in reversed(self._steps):
            plan = step.withNewChildren(scala_list([plan]))
        rows = self._session.internalCreateDataFrame(plan.execute(), self._schema, False)
        return DataFrame(rows, self._spark)

    def _reading(self, records: DataFrame) -> Any:  # noqa: ANN401 (py4j's view of a plan has no type)
        """The kept read, of other offsets: its columns are those that the steps know."""
        jrecords: Any = records._jdf  # noqa: SLF001 (as above)
        *_, relation = _down(jrecords.queryExecution().optimizedPlan())
        kept = self._read
        fields = range(len(READ), kept.productArity())
        others = (kept.productElement(field) for field in fields)
        return kept.copy(kept.output(), relation.scan(), *others)


def _down(plan: Any) -> list[Any]:  # noqa: ANN401 (as above)
    """The nodes from the top of a plan to its read; each has one below it."""
    nodes = [plan]
    while not (children := nodes[-1].children()).isEmpty():
        nodes.append(children.head())
    return nodes
