"""Calls of Java's own methods for each row, as columns that Spark compiles with all others.

Spark's function for that, `java_method`, calls by reflection, and keeps a plan from being compiled
as a whole: each step before and after it makes rows of its own, and generates its code anew in
every task. What is used here instead are the expressions that Spark's encoders are made of
(StaticInvoke, Invoke, NewInstance), in the release that duetime is pinned to. Not for Spark
Connect, whose client has no JVM.

No call is foldable or deterministic: each is made once for each row that it is reached with.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pyspark import SparkContext
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.classic.column import Column as ClassicColumn

_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"


def java_class(jvm: Any, name: str) -> Any:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """A class by its full name.

    By the steps of its package, py4j would look for a class of each step's name in all of Spark's
    jars: for what is done every second, that took a tenth of the JVM's time.
    """
    return getattr(jvm, name)


def scala_list(items: Sequence[Any]) -> Any:  # noqa: ANN401 (as above)
    """The items as a Seq of Scala's, in the driver's JVM."""
    return _java().seq(items)


def current_time_ms() -> Column:
    """bigint: System.currentTimeMillis."""
    return _column(_java().static("java.lang.System", "currentTimeMillis", _java().long))


def nano_time() -> Column:
    """bigint: System.nanoTime, the monotonic clock that Python's time.monotonic shares."""
    return _column(_java().static("java.lang.System", "nanoTime", _java().long))


def system_property(name: Column) -> Column:
    """string: System.getProperty; null where there is none of this name."""
    return _property("getProperty", name)


def set_system_property(name: Column, value: Column) -> Column:
    """string: System.setProperty; what it was before, null where it was not set."""
    return _property("setProperty", name, value)


def murmur2(key: Column) -> Column:
    """int: the hash that Kafka's Java producer places a key by; null for no key."""
    java = _java()
    utils = "org.apache.kafka.common.utils.Utils"
    return _column(java.static(utils, "murmur2", java.int, [_expression(key)], nullable=True))


def slept(ms: Column) -> Column:
    """boolean, true: after so many ms. A task that is killed is woken."""
    # Thread.sleep gives nothing back, which compiled code cannot assign; a latch that nobody
    # counts down says after the same time that it was not.
    java = _java()
    latch_type = java.object("java.util.concurrent.CountDownLatch")
    latch = java.new(latch_type, [_expression(F.lit(1))])
    arguments = [_expression(ms.cast("bigint")), java.milliseconds]
    return ~_column(java.invoke(latch, "await", java.boolean, arguments))


def _property(method: str, *arguments: Column) -> Column:
    java = _java()
    texts = [java.invoke(_expression(each), "toString", java.text) for each in arguments]
    found = java.static("java.lang.System", method, java.text, texts, nullable=True)
    utf8 = "org.apache.spark.unsafe.types.UTF8String"
    return _column(java.static(utf8, "fromString", java.string, [found], nullable=True))


def _column(expression: Any) -> Column:  # noqa: ANN401 (as above)
    return ClassicColumn(_java().utils.column(expression))


def _expression(column: Column) -> Any:  # noqa: ANN401 (as above)
    return _java().utils.expression(column._jc)  # noqa: SLF001 (PySpark's only way to it)


def _java() -> "_Java":
    return _java_of(SparkContext._jvm)  # noqa: SLF001 (as above)


@lru_cache(maxsize=1)
def _java_of(jvm: Any) -> "_Java":  # noqa: ANN401 (as above)
    return _Java(jvm)


class _Java:
    """What calls are built of, in one JVM."""

    def __init__(self, jvm: Any) -> None:  # noqa: ANN401 (as above)
        self._jvm = jvm
        self._nil = self._class("scala.collection.immutable.Nil$").__getattr__("MODULE$")
        self._none = self._class("scala.None$").__getattr__("MODULE$")
        self._classes = self._class("java.lang.Class")
        self._static = self._class(f"{_EXPRESSIONS}.objects.StaticInvoke")
        self._invoke = self._class(f"{_EXPRESSIONS}.objects.Invoke")
        self._new = self._class(f"{_EXPRESSIONS}.objects.NewInstance")
        self.utils = self._class("org.apache.spark.sql.classic.ExpressionUtils")
        types = self._class("org.apache.spark.sql.types.DataTypes")
        self.long, self.boolean, self.string = types.LongType, types.BooleanType, types.StringType
        self.int = types.IntegerType
        self._object = self._class("org.apache.spark.sql.types.ObjectType")
        self.text = self.object("java.lang.String")
        unit = "java.util.concurrent.TimeUnit"
        literal = self._class(f"{_EXPRESSIONS}.Literal")
        self.milliseconds = literal(self._class(unit).MILLISECONDS, self.object(unit))

    def cls(self, name: str) -> Any:  # noqa: ANN401 (as above)
        # By the loader that knows the connector's jars, too.
        threads = self._class("java.lang.Thread")
        loader = threads.currentThread().getContextClassLoader()
        return self._classes.forName(name, True, loader)

    def object(self, name: str) -> Any:  # noqa: ANN401 (as above)
        """The type of a Java object that is no value of Spark's."""
        return self._object(self.cls(name))

    def static(
        self,
        owner: str,
        method: str,
        returns: Any,  # noqa: ANN401 (as above)
        arguments: Sequence[Any] = (),
        *,
        nullable: bool = False,
    ) -> Any:  # noqa: ANN401 (as above)
        """A call of a class's own method; null, without a call, where an argument is null."""
        given = self.seq(arguments)
        owned = self.cls(owner)
        return self._static(
            owned, returns, method, given, self._nil, True, nullable, False, self._none
        )

    def invoke(self, target: Any, method: str, returns: Any, arguments: Sequence[Any] = ()) -> Any:  # noqa: ANN401 (as above)
        """A call of an object's method; null where the object or an argument is null."""
        given = self.seq(arguments)
        return self._invoke(target, method, returns, given, self._nil, True, True, False)

    def new(self, kind: Any, arguments: Sequence[Any]) -> Any:  # noqa: ANN401 (as above)
        """A new object for each row."""
        given = self.seq(arguments)
        return self._new(kind.cls(), given, self._nil, False, kind, self._none)

    def seq(self, items: Sequence[Any]) -> Any:  # noqa: ANN401 (as above)
        """The items as a Seq of Scala's: one call for each."""
        found = self._nil
        for each in reversed(items):
            found = getattr(found, "$colon$colon")(each)
        return found

    def _class(self, name: str) -> Any:  # noqa: ANN401 (as above)
        return java_class(self._jvm, name)
