"""A plan that is made once and used again over other records of the same topics' shape.

Spark analyses, optimises and plans each DataFrame anew. Of a turn, which differs from the last one
in the offsets that it reads, that is two thirds of the work (measured on 2 cores after some
hundred turns of 20 messages: 450 ms with it, 165 ms without). So the physical plan of the first is
kept. Of each further one only the read at its bottom is made, and put in the place of the first
one's; what is above it is copied, which Spark itself does whenever it rewrites a plan.

It takes what Spark has no public names for (SparkPlan.withNewChildren, and the nodes of READS), in
the release that duetime is pinned to.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from duetime.java import java_class, scala_list
from duetime.pipeline.jvm import jvm


class Read(NamedTuple):
    """A node that reads records, and the one field of it that differs from read to read."""

    node: str
    field: str
    #: The same before it is planned.
    relation: str
    its_field: str


#: Of Kafka; of a store of rows, by a function in Python; and of a micro-batch, or of `one_read`.
READS = [
    Read("BatchScanExec", "scan", "DataSourceV2ScanRelation", "scan"),
    Read("MapInArrowExec", "func", "MapInArrow", "functionExpr"),
    Read("RDDScanExec", "rdd", "LogicalRDD", "rdd"),
]


#: The node of `DataFrame.observe`.
OBSERVING = "CollectMetricsExec"


class PlannedOnce:
    """Rows that some steps make of a read of records, planned at the first call. Thread-safe.

    The steps must be the same for each read, whatever it reads: they are not called again.
    """

    def __init__(self, spark: SparkSession, steps: Callable[[DataFrame], DataFrame]) -> None:
        self._spark = spark
        self._steps = steps
        self._lock = threading.Lock()
        self._kept: _Kept | None = None

    def __call__(self, records: DataFrame) -> DataFrame:
        """What the steps make of these records, which are one read (READS) and nothing else."""
        return self.observed(records).rows

    def observed(self, records: DataFrame) -> "Observed":
        """The same, for steps that `observe` a number."""
        with self._lock:
            if self._kept is None:
                self._kept = _Kept(self._spark, self._steps(records))
        return self._kept.over(records)


@dataclass(frozen=True, slots=True)
class Observed:
    """Rows that are not computed yet, and what is known when they are."""

    rows: DataFrame
    #: The node that observes; None where the steps have none.
    node: Any

    def count(self) -> int:
        """The first number that the steps observe in the rows. Call it once they are computed."""
        found: int = self.node.collectedMetrics().getLong(0)
        return found


def one_read(spark: SparkSession, records: DataFrame) -> DataFrame:
    """Records that are made of several reads, as one: what they are made by is planned here."""
    jrecords: Any = records._jdf  # noqa: SLF001 (PySpark's only way to it)
    return _frame(spark, jrecords.queryExecution().toRdd(), jrecords.schema())


class _Kept:
    """The physical plan of rows: the read at its bottom, and the steps above it."""

    def __init__(self, spark: SparkSession, rows: DataFrame) -> None:
        self._spark = spark
        self._sessions = java_class(jvm(spark), "org.apache.spark.sql.classic.SparkSession")
        jrows: Any = rows._jdf  # noqa: SLF001 (as above)
        self._schema = jrows.schema()
        nodes = _down(jrows.queryExecution().executedPlan())
        reads = {each.node: each for each in READS}
        depth = max(at for at, node in enumerate(nodes) if _name(node) in reads)
        self._steps, self._node = nodes[:depth], nodes[depth]
        self._read = reads[_name(self._node)]
        fields = range(self._node.productArity())
        self._fields = [self._node.productElement(field) for field in fields]
        names = [self._node.productElementName(field) for field in fields]
        self._own = names.index(self._read.field)

    def over(self, records: DataFrame) -> Observed:
        # A plan belongs to the session of the thread that makes it.
        self._sessions.setActiveSession(self._spark._jsparkSession)  # noqa: SLF001 (as above)
        plan, observing = self._reading(records), None
        for step in reversed(self._steps):
            plan = step.withNewChildren(scala_list([plan]))
            if _name(step) == OBSERVING:
                observing = plan
        return Observed(_frame(self._spark, plan.execute(), self._schema), observing)

    def _reading(self, records: DataFrame) -> Any:  # noqa: ANN401 (py4j's view of a plan has no type)
        """The kept read, of other records: its columns are those that the steps know."""
        jrecords: Any = records._jdf  # noqa: SLF001 (as above)
        nodes = _down(jrecords.queryExecution().optimizedPlan())
        relation = next(node for node in nodes if _name(node) == self._read.relation)
        fields = self._fields.copy()
        fields[self._own] = getattr(relation, self._read.its_field)()
        return self._node.copy(*fields)


def _frame(spark: SparkSession, rows: Any, schema: Any) -> DataFrame:  # noqa: ANN401 (as above)
    session: Any = spark._jsparkSession  # noqa: SLF001 (as above)
    return DataFrame(session.internalCreateDataFrame(rows, schema, False), spark)


def _down(plan: Any) -> list[Any]:  # noqa: ANN401 (as above)
    """The nodes from the top of a plan to its bottom; each has one below it."""
    nodes = [plan]
    while not (children := nodes[-1].children()).isEmpty():
        nodes.append(children.head())
    return nodes


def _name(node: Any) -> str:  # noqa: ANN401 (as above)
    name: str = node.getClass().getSimpleName()
    return name
