"""Catalyst: the internals of Spark that duetime uses, in the release that it is pinned to.

*Java methods as columns*, compiled by Spark with all other columns. Spark's own function for this,
`java_method`, calls by reflection, and prevents whole-stage compilation: each step before and after
it makes rows of its own, and generates its code again in every task. The expressions here are those
of Spark's encoders (StaticInvoke, Invoke, NewInstance). Spark Connect, whose client has no JVM, has
none of them. No call is foldable or deterministic: each is made once for each row that reaches it.

*The plan cache*: one physical plan, used again over other records of the same shape. Spark
analyses, optimises and plans each DataFrame from the start. For a release job, which differs from
the last one only in its offsets, that is two thirds of the work (measured on 2 cores after some
hundred jobs of 20 messages: 450 ms with it, 165 ms without). So the physical plan of the first job
is kept. For each further one, only the read at the bottom is planned, and replaces the first one's;
the nodes above it are copied, as Spark itself does when it rewrites a plan
(SparkPlan.withNewChildren, and the nodes of READS).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from py4j.java_gateway import JavaClass, JavaMember
from pyspark import SparkContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.classic.column import Column as ClassicColumn

#: The classes of the JVM that build columns, by the names that PySpark has for them.
PYSPARK_CLASSES = ("org.apache.spark.sql.functions", "functions", "PythonUtils")

_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"


def current_time_ms() -> Column:
    """bigint: System.currentTimeMillis."""
    return _column(_java().static("java.lang.System", "currentTimeMillis", _java().long))


def nano_time() -> Column:
    """bigint: System.nanoTime, the monotonic clock that Python's time.monotonic shares."""
    return _column(_java().static("java.lang.System", "nanoTime", _java().long))


def system_property(name: Column) -> Column:
    """string: System.getProperty; null for an unknown name."""
    return _property("getProperty", name)


def number_property(name: str, default: Column) -> Column:
    """bigint: Long.getLong, a system property that is a number; `default` where there is none."""
    java = _java()
    given = java.literal(name, java.text), _expression(default)
    return _column(java.static("java.lang.Long", "getLong", java.long, given))


def set_system_property(name: Column, value: Column) -> Column:
    """string: System.setProperty; the previous value, null for none."""
    return _property("setProperty", name, value)


def clear_property(name: Column) -> Column:
    """string: System.clearProperty; the previous value, null for none."""
    return _property("clearProperty", name)


def property_names() -> Column:
    """array<string>: the names of all system properties; no name may have a comma."""
    java = _java()
    found = java.static("java.lang.System", "getProperties", java.object("java.util.Properties"))
    names = java.invoke(found, "stringPropertyNames", java.object("java.util.Set"))
    return _printed(names)


def beans(pattern: Column, attributes: Sequence[str]) -> Column:
    """array<string>: "<ObjectName> <AttributeList>" of each MBean that matches a pattern.

    Both are as Java prints them. A bean without one of the attributes lacks it in its list.
    """
    java = _java()
    name_type, management = "javax.management.ObjectName", "java.lang.management.ManagementFactory"
    server_type = java.object("javax.management.MBeanServer")
    server = java.static(management, "getPlatformMBeanServer", server_type)

    def name(text: Column) -> Any:  # noqa: ANN401 (py4j has no types)
        return java.static(name_type, "getInstance", java.object(name_type), [java.to_text(text)])

    every = java.null("javax.management.QueryExp")
    matching = [name(pattern), every]
    found = java.invoke(
        server, "queryNames", java.object("java.util.Set"), matching, takes_null=True
    )
    wanted = java.texts(attributes)

    def described(each: Column) -> Column:
        kind = java.object("javax.management.AttributeList")
        values = java.invoke(server, "getAttributes", kind, [name(each), wanted])
        return F.concat_ws(" ", each, _string(java.printed(values)))

    return F.transform(_printed(found), described)


def task_attempt() -> Column:
    """int: how often the row's task was started before; 0 outside of a task."""
    java, context = _java(), "org.apache.spark.TaskContext"
    task = java.static(context, "get", java.object(context), nullable=True)
    counts = ("attemptNumber", "stageAttemptNumber")
    of_task, of_stage = (_column(java.invoke(task, each, java.int)) for each in counts)
    return F.coalesce(of_task + of_stage, F.lit(0))


def executor_id() -> Column:
    """string: the id of the executor that the row is in; "driver" in the driver."""
    java, environment = _java(), "org.apache.spark.SparkEnv"
    found = java.static(environment, "get", java.object(environment))
    return _string(java.invoke(found, "executorId", java.text))


def murmur2(key: Column) -> Column:
    """int: the hash by which Kafka's Java producer partitions a key; null for no key."""
    java, utils = _java(), "org.apache.kafka.common.utils.Utils"
    return _column(java.static(utils, "murmur2", java.int, [_expression(key)], nullable=True))


def slept(ms: Column) -> Column:
    """boolean: true, after sleeping for `ms`. Killing the task interrupts it."""
    # Thread.sleep returns nothing, which compiled code cannot assign. Waiting for a latch that
    # never opens takes as long, and returns false.
    java = _java()
    latch_type = java.object("java.util.concurrent.CountDownLatch")
    latch = java.new(latch_type, [_expression(F.lit(1))])
    arguments = [_expression(ms.cast("bigint")), java.milliseconds]
    return ~_column(java.invoke(latch, "await", java.boolean, arguments))


class CachedClass(JavaClass):  # type: ignore[misc]
    """A class of the JVM whose static methods are looked up once each."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        found = super().__getattr__(name)
        if isinstance(found, JavaMember):
            setattr(self, name, found)
        return found


def java_class(jvm: Any, name: str) -> Any:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """Return a class by its full name, or by a name that the JVM's view has imported.

    py4j has no cache of names: it would ask the JVM for the class and its method at each call. As
    attributes of the package, it would also search all of Spark's jars for a class of each part of
    the name: for what runs every second, that took a tenth of the JVM's time.
    """
    found = getattr(jvm, name)
    if type(found) is JavaClass:
        found = CachedClass(found._fqn, found._gateway_client)  # noqa: SLF001 (py4j's only way)
        setattr(jvm, name, found)
    return found


def cache_functions(jvm: Any) -> None:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """Let PySpark look up its classes once, and not for each column that it builds.

    The columns of intake took 10,900 calls, of which 3,900 were such look-ups: 2 s on a machine at
    rest, and 8 s at a start, where each call waits for a core.
    """
    for name in PYSPARK_CLASSES:
        java_class(jvm, name)


def java_array(*given: Any, of: str = "Object") -> Any:  # noqa: ANN401 (py4j has no types)
    """Return an array of a class of java.lang; a method called by reflection takes Object[]."""
    gateway: Any = SparkContext._gateway  # noqa: SLF001 (PySpark's only way to it)
    java = SparkContext._jvm  # noqa: SLF001 (PySpark's only way to it)
    values = gateway.new_array(java_class(java, f"java.lang.{of}"), len(given))
    # As an item of py4j's array, each would take two calls.
    array = java_class(java, "java.lang.reflect.Array")
    for position, each in enumerate(given):
        if each is not None:
            array.set(values, position, each)
    return values


def _property(method: str, *arguments: Column) -> Column:
    java = _java()
    texts = [java.to_text(each) for each in arguments]
    return _string(java.static("java.lang.System", method, java.text, texts, nullable=True))


def _string(text: Any) -> Column:  # noqa: ANN401 (py4j has no types)
    """string: of a java.lang.String."""
    java, utf8 = _java(), "org.apache.spark.unsafe.types.UTF8String"
    return _column(java.static(utf8, "fromString", java.string, [text], nullable=True))


def _printed(names: Any) -> Column:  # noqa: ANN401 (py4j has no types)
    """array<string>: the members of a set of names, which Java prints as "[a, b]"."""
    text = _string(_java().printed(names))
    inside = F.substring(text, F.lit(2), F.length(text) - 2)
    return F.when(inside != "", F.split(inside, ", ")).otherwise(F.array().cast("array<string>"))


def _column(expression: Any) -> Column:  # noqa: ANN401 (py4j has no types)
    return ClassicColumn(_java().utils.column(expression))


def _expression(column: Column) -> Any:  # noqa: ANN401 (py4j has no types)
    return _java().utils.expression(column._jc)  # noqa: SLF001 (PySpark's only way to it)


def _java() -> "_Java":
    return _java_of(SparkContext._jvm)  # noqa: SLF001 (PySpark's only way to it)


@lru_cache(maxsize=1)
def _java_of(jvm: Any) -> "_Java":  # noqa: ANN401 (py4j has no types)
    return _Java(jvm)


class _Java:
    """Catalyst's classes in one JVM, and the calls that are built of them."""

    def __init__(self, jvm: Any) -> None:  # noqa: ANN401 (py4j has no types)
        self._jvm = jvm
        self._nil = getattr(self._class("scala.collection.immutable.Nil$"), "MODULE$")
        self._none = getattr(self._class("scala.None$"), "MODULE$")
        self._static = self._class(f"{_EXPRESSIONS}.objects.StaticInvoke")
        self._invoke = self._class(f"{_EXPRESSIONS}.objects.Invoke")
        self._new = self._class(f"{_EXPRESSIONS}.objects.NewInstance")
        self.utils = self._class("org.apache.spark.sql.classic.ExpressionUtils")
        self.sessions = self._class("org.apache.spark.sql.classic.SparkSession")
        types = self._class("org.apache.spark.sql.types.DataTypes")
        self.long, self.boolean, self.string = types.LongType, types.BooleanType, types.StringType
        self.int = types.IntegerType
        self._object = self._class("org.apache.spark.sql.types.ObjectType")
        self.text = self.object("java.lang.String")
        unit = "java.util.concurrent.TimeUnit"
        self.literal = self._class(f"{_EXPRESSIONS}.Literal")
        self.milliseconds = self.literal(self._class(unit).MILLISECONDS, self.object(unit))

    def object(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return the type of a Java object that is not a Spark value."""
        return self._object(self._loaded(name))

    def static(
        self,
        owner: str,
        method: str,
        returns: Any,  # noqa: ANN401 (py4j has no types)
        arguments: Sequence[Any] = (),
        *,
        nullable: bool = False,
    ) -> Any:  # noqa: ANN401 (py4j has no types)
        """Call a static method; null, without a call, if an argument is null."""
        given, cls = self.seq(arguments), self._loaded(owner)
        return self._static(
            cls, returns, method, given, self._nil, True, nullable, False, self._none
        )

    def invoke(
        self,
        target: Any,  # noqa: ANN401 (py4j has no types)
        method: str,
        returns: Any,  # noqa: ANN401 (py4j has no types)
        arguments: Sequence[Any] = (),
        *,
        takes_null: bool = False,
    ) -> Any:  # noqa: ANN401 (py4j has no types)
        """Call a method; null if the object or, unless it `takes_null`, an argument is null."""
        given, skips = self.seq(arguments), not takes_null
        return self._invoke(target, method, returns, given, self._nil, skips, True, False)

    def to_text(self, column: Column) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return a string column as java.lang.String."""
        return self.invoke(_expression(column), "toString", self.text)

    def printed(self, value: Any) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return `Objects.toString`: the methods of an interface do not list toString."""
        return self.static("java.util.Objects", "toString", self.text, [value])

    def null(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return null, as an object of a class."""
        return self.literal(None, self.object(name))

    def texts(self, values: Sequence[str]) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return a constant String[]."""
        strings = java_array(*values, of="String")
        return self.literal(strings, self._object(strings.getClass()))

    def new(self, kind: Any, arguments: Sequence[Any]) -> Any:  # noqa: ANN401 (py4j has no types)
        """Create an object for each row."""
        given = self.seq(arguments)
        return self._new(kind.cls(), given, self._nil, False, kind, self._none)

    def seq(self, items: Sequence[Any]) -> Any:  # noqa: ANN401 (py4j has no types)
        """Return the items as a Scala Seq, with one call for each."""
        found = self._nil
        for each in reversed(items):
            found = getattr(found, "$colon$colon")(each)
        return found

    def _loaded(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        # By the loader that knows the connector's jars, too.
        loader = self._class("java.lang.Thread").currentThread().getContextClassLoader()
        return self._class("java.lang.Class").forName(name, True, loader)

    def _class(self, name: str) -> Any:  # noqa: ANN401 (py4j has no types)
        return java_class(self._jvm, name)


class ReadNode(NamedTuple):
    """A plan node that reads records, and the one field that differs from read to read."""

    node: str
    field: str
    #: The node of the optimised plan that it is planned from, and the field there.
    relation: str
    relation_field: str


#: Reads of Kafka; of a store of rows, by a Python function; and of a micro-batch, or of
#: `as_single_read`.
READS = [
    ReadNode("BatchScanExec", "scan", "DataSourceV2ScanRelation", "scan"),
    ReadNode("MapInArrowExec", "func", "MapInArrow", "functionExpr"),
    ReadNode("RDDScanExec", "rdd", "LogicalRDD", "rdd"),
]

#: The nodes of `DataFrame.observe` and `DataFrame.coalesce`.
OBSERVING, COALESCING = "CollectMetricsExec", "CoalesceExec"


@dataclass(frozen=True, slots=True)
class Observed:
    """Rows that are not computed yet, and the number that their steps observe."""

    rows: DataFrame
    #: The node that observes; None if the steps have none.
    node: Any

    def count(self) -> int:
        """Return the first number that the steps observe. Call it once the rows are computed."""
        found: int = self.node.collectedMetrics().getLong(0)
        return found


class PlanCache:
    """The rows of some steps over a read of records, planned at the first call. Thread-safe.

    The steps must not depend on the records: they are called once.
    """

    def __init__(self, spark: SparkSession, steps: Callable[[DataFrame], DataFrame]) -> None:
        self._spark = spark
        self._steps = steps
        self._lock = threading.Lock()
        self._plan: _Plan | None = None

    def __call__(self, records: DataFrame) -> DataFrame:
        """Return the rows for these records, which are a single read (READS)."""
        return self.observed(records).rows

    def observed(self, records: DataFrame, *, is_one_task: bool = True) -> Observed:
        """Return the rows, for steps that `observe` a number.

        Steps that `coalesce` to one task are done for each partition of the read unless
        `is_one_task`: rows that they compare must then be in one partition.
        """
        with self._lock:
            if self._plan is None:
                self._plan = _Plan(self._spark, self._steps(records))
        return self._plan.over(records, is_one_task=is_one_task)


def as_single_read(spark: SparkSession, records: DataFrame) -> DataFrame:
    """Return records of several reads as a single read, which is planned here."""
    jrecords: Any = records._jdf  # noqa: SLF001 (PySpark's only way to it)
    return frame(spark, jrecords.queryExecution().toRdd(), jrecords.schema())


class _Plan:
    """The physical plan of rows: the read at its bottom, and the steps above it."""

    def __init__(self, spark: SparkSession, rows: DataFrame) -> None:
        self._spark = spark
        self._sessions = _java().sessions
        jrows: Any = rows._jdf  # noqa: SLF001 (PySpark's only way to it)
        self._schema = jrows.schema()
        nodes = _nodes(jrows.queryExecution().executedPlan())
        reads = {each.node: each for each in READS}
        depth = max(at for at, node in enumerate(nodes) if _name(node) in reads)
        self._steps, self._node = nodes[:depth], nodes[depth]
        self._read = reads[_name(self._node)]
        fields = range(self._node.productArity())
        self._fields = [self._node.productElement(field) for field in fields]
        names = [self._node.productElementName(field) for field in fields]
        self._varying = names.index(self._read.field)

    def over(self, records: DataFrame, *, is_one_task: bool) -> Observed:
        # A plan belongs to the session of the thread that makes it.
        self._sessions.setActiveSession(self._spark._jsparkSession)  # noqa: SLF001 (PySpark's only way to it)
        plan, observing = self._read_of(records), None
        for step in reversed(self._steps):
            if _name(step) == COALESCING and not is_one_task:
                continue
            plan = step.withNewChildren(_java().seq([plan]))
            if _name(step) == OBSERVING:
                observing = plan
        return Observed(frame(self._spark, plan.execute(), self._schema), observing)

    def _read_of(self, records: DataFrame) -> Any:  # noqa: ANN401 (py4j's view of a plan has no type)
        """Return the kept read over other records, with the columns that the steps refer to."""
        jrecords: Any = records._jdf  # noqa: SLF001 (PySpark's only way to it)
        nodes = _nodes(jrecords.queryExecution().optimizedPlan())
        relation = next(node for node in nodes if _name(node) == self._read.relation)
        fields = self._fields.copy()
        fields[self._varying] = getattr(relation, self._read.relation_field)()
        return self._node.copy(*fields)


def seq(items: Sequence[Any]) -> Any:  # noqa: ANN401 (py4j has no types)
    """Return the items as a Scala Seq."""
    return _java().seq(items)


def frame(spark: SparkSession, rows: Any, schema: Any) -> DataFrame:  # noqa: ANN401 (py4j has no types)
    """Return the frame of a Scala RDD of InternalRow."""
    session: Any = spark._jsparkSession  # noqa: SLF001 (PySpark's only way to it)
    return DataFrame(session.internalCreateDataFrame(rows, schema, False), spark)


def _nodes(plan: Any) -> list[Any]:  # noqa: ANN401 (py4j has no types)
    """Return the nodes from the top of a plan to its bottom; each has one below it."""
    nodes = [plan]
    while not (children := nodes[-1].children()).isEmpty():
        nodes.append(children.head())
    return nodes


def _name(node: Any) -> str:  # noqa: ANN401 (py4j has no types)
    name: str = node.getClass().getSimpleName()
    return name
