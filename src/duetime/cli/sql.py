"""sql: any question about what waits, answered by Spark."""

import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duetime.cli.connect import connected
from duetime.cli.display import console, printable, table
from duetime.cli.options import BadInput, Config, Json, Kafka, limit
from duetime.clock import format_instant, instant_ms
from duetime.config import Settings
from duetime.errors import DuetimeError, words

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import DataType

#: What the messages that wait are called in a query.
VIEW = "pending"

#: What is added to Spark's own words, which know nothing of docs/sql.md.
HAS = (
    f"the view {VIEW} has the columns id, due, topic, partition, cluster, key, headers, size, "
    "value, and the query is Spark SQL (docs/sql.md)"
)

#: The class of a Spark error, which its words begin with.
ERROR_CLASS = re.compile(r"^\[[A-Z0-9_.]+\] ")


def sql(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="Spark SQL; what waits is the view `pending`.")
    ],
    *,
    limit: Annotated[int, limit("The most rows that are shown.")] = 1_000,
    as_json: Json = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Ask anything about what waits, with SQL: select topic, count(*) from pending group by topic.

    Columns: id, due, topic, partition, cluster, key, headers, size, value. With --json all rows are
    given, a line each.
    """
    settings = connected(kafka, config)
    with _spark(settings) as spark, _told():
        rows = _answer(spark, settings, query)
        if as_json:
            _check_names(rows.schema)
            for row in rows.toLocalIterator():
                typer.echo(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False))
        else:
            for each in rows.schema:
                _check_names(each.dataType)
            _show(rows.columns, rows.limit(limit + 1).collect(), limit)


@contextmanager
def _spark(settings: Settings) -> "Iterator[SparkSession]":
    from duetime.spark import session  # noqa: PLC0415 (Spark takes a second to import)

    spark = session(settings)
    # What fails is told in a sentence.
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _told() -> Iterator[None]:
    """Spark's own words about a query, or about a job that failed, without plan and trace."""
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415 (as above)
    from pyspark.errors import PySparkException, PythonException  # noqa: PLC0415 (as above)
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 (as above)

    # It writes each error to stderr as JSON, with its trace.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except PythonException as error:
        # What reads another store than Kafka; its last line is the error, before it is the trace.
        raise _failed(str(error).strip().splitlines()[-1]) from error
    except PySparkException as error:
        raise _refused(error) from error
    except Py4JJavaError as error:
        raise _of_java(error.java_exception) from error


def _of_java(thrown: "JavaObject") -> Exception:
    """What is wrong with the query, if any of the causes says so, or else what has failed."""
    from pyspark.errors.exceptions import captured  # noqa: PLC0415 (as above)

    causes = list(_causes(thrown))
    for each in map(captured.convert_exception, causes):
        if not isinstance(each, captured.UnknownException):
            return _refused(each)
    return _failed(words(Exception(causes[-1].toString())))


def _causes(thrown: "JavaObject | None") -> "Iterator[JavaObject]":
    while thrown is not None:
        yield thrown
        thrown = thrown.getCause()


def _refused(error: Exception) -> BadInput:
    from pyspark.errors import AnalysisException  # noqa: PLC0415 (as above)

    said = str(error).strip().partition(" SQLSTATE")[0].splitlines()[0]
    told = f"the query cannot be answered: {ERROR_CLASS.sub('', said)}"
    # What fails later is a matter of what is in the rows.
    return BadInput(f"{told}: {HAS}" if isinstance(error, AnalysisException) else told)


def _failed(said: str) -> DuetimeError:
    return DuetimeError(
        f"the query failed on the way ({said}): see that Kafka is up, and the store if it is "
        "another (duetime doctor), then ask again"
    )


def _check_names(kind: "DataType") -> None:
    """Raises BadInput where two fields have one name: JSON has only one of them."""
    from pyspark.sql.types import ArrayType, MapType, StructType  # noqa: PLC0415 (as above)

    if isinstance(kind, ArrayType):
        _check_names(kind.elementType)
    elif isinstance(kind, MapType):
        _check_names(kind.valueType)
    elif isinstance(kind, StructType):
        for name in kind.names:
            if kind.names.count(name) > 1:
                raise BadInput(f"two columns are called {name}: name one of them with `as`")
        for each in kind:
            _check_names(each.dataType)


def _answer(spark: "SparkSession", settings: Settings, query: str) -> "DataFrame":
    from duetime.spark import pending  # noqa: PLC0415 (as above)

    pending(spark, settings).createOrReplaceTempView(VIEW)
    return spark.sql(query)


def _show(columns: list[str], rows: "list[Row]", limit: int) -> None:
    if not rows:
        typer.echo("no rows")
        return
    out, shown = console(), table(*columns)
    for row in islice(rows, limit):
        shown.add_row(*(_cell(each) for each in row))
    out.print(shown)
    if len(rows) > limit:
        out.print(f"... the first {limit:,}: --limit shows more, --json all")


def _cell(value: object) -> str:
    plain = _plain(value)
    if plain is None:
        return ""
    if isinstance(plain, str):
        return printable(plain.encode(errors="backslashreplace"))
    return json.dumps(plain, ensure_ascii=False)


def _plain(value: object) -> Any:  # noqa: ANN401 (whatever JSON has)
    """What JSON has for it: bytes are text, an instant is ISO 8601 in UTC, NaN is its name."""
    from pyspark.sql import Row  # noqa: PLC0415 (as above)

    if isinstance(value, (bytes, bytearray)):
        return printable(bytes(value))
    if isinstance(value, datetime):
        # Spark gives an instant in this machine's zone, without saying so.
        return format_instant(instant_ms(value.astimezone()))
    if isinstance(value, Row):
        return {name: _plain(each) for name, each in value.asDict().items()}
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return _scalar(value)


def _scalar(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
