"""sql: pending messages, queried with Spark SQL."""

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
from typer import Argument

from duetime.cli.terminal import (
    BadInput,
    Config,
    Json,
    Kafka,
    connected,
    console,
    limit_option,
    printable,
    table,
)
from duetime.core.clock import format_instant, instant_ms
from duetime.core.errors import DuetimeError, error_text

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql.types import DataType

# ruff: noqa: PLC0415 (Spark takes a second to import, and only this command needs it)

#: Name of the view in a query.
VIEW = "pending"

#: Added to Spark's error messages, which do not know docs/sql.md.
HAS = (
    f"the view {VIEW} has the columns id, due, topic, partition, cluster, key, headers, size, "
    "value, and the query is Spark SQL (docs/sql.md)"
)

#: What Spark's error messages begin and end with: their class, and their SQL state.
ERROR_CODES = re.compile(r"^\[[A-Z0-9_.]+\] | SQLSTATE.*", re.DOTALL)


def sql(
    query: Annotated[str, Argument(metavar="QUERY", help="Spark SQL over the view `pending`.")],
    *,
    limit: Annotated[int, limit_option("Maximum number of rows to show.")] = 1_000,
    as_json: Json = False,
    kafka: Kafka = None,
    config: Config = None,
) -> None:
    """Query pending messages with SQL.

    Example: `select topic, count(*) from pending group by topic`.

    Columns: id, due, topic, partition, cluster, key, headers, size, value. With --json all rows are
    written, a line each.
    """
    settings = connected(kafka, config)
    from duetime.dataframes import pending, session

    spark = session(settings)
    # Errors are one sentence, without Spark's own log.
    spark.sparkContext.setLogLevel("OFF")
    try:
        with _translated_errors():
            pending(spark, settings).createOrReplaceTempView(VIEW)
            rows = spark.sql(query)
            if as_json:
                _check_names(rows.schema)
                for row in rows.toLocalIterator():
                    typer.echo(json.dumps(_json_value(row), ensure_ascii=False, allow_nan=False))
            else:
                for each in rows.schema:
                    _check_names(each.dataType)
                _show(rows.columns, rows.limit(limit + 1).collect(), limit)
    finally:
        spark.stop()


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raise BadInput for an error in the query, and DuetimeError for a job that failed."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException, PythonException
    from pyspark.errors.exceptions.captured import UnknownException, convert_exception
    from pyspark.logger import PySparkLogger

    # It writes each error to stderr as JSON, with its stack trace.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except PythonException as error:
        # From the reader of another store than Kafka: the last line is the error, after its trace.
        raise _job_failed(str(error).strip().splitlines()[-1]) from error
    except PySparkException as error:
        raise _bad_query(error) from error
    except Py4JJavaError as error:
        thrown, last = error.java_exception, None
        while thrown is not None:
            cause = convert_exception(thrown)
            if not isinstance(cause, UnknownException):
                raise _bad_query(cause) from error
            thrown, last = thrown.getCause(), thrown
        raise _job_failed(error_text(Exception(last and last.toString()))) from error


def _bad_query(error: Exception) -> BadInput:
    from pyspark.errors import AnalysisException

    text = ERROR_CODES.sub("", str(error).strip()).splitlines()[0]
    # An error at run time is about the content of rows, not about columns.
    hint = f": {HAS}" if isinstance(error, AnalysisException) else ""
    return BadInput(f"the query cannot be answered: {text}{hint}")


def _job_failed(text: str) -> DuetimeError:
    return DuetimeError(
        f"the query failed on the way ({text}): check that Kafka is up, and the store if it is "
        "another (duetime doctor), then ask again"
    )


def _check_names(kind: "DataType") -> None:
    """Raise BadInput if two fields have one name: JSON would have only one of them."""
    from pyspark.sql.types import ArrayType, MapType, StructType

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
    plain = _json_value(value)
    if isinstance(plain, str):
        return printable(plain.encode(errors="backslashreplace"))
    return "" if plain is None else json.dumps(plain, ensure_ascii=False)


def _json_value(value: object) -> Any:  # noqa: ANN401, PLR0911 (any JSON; a type each)
    """Return the value for JSON: bytes as text, instants as ISO 8601 in UTC, NaN by its name."""
    from pyspark.sql import Row

    match value:
        case bytes() | bytearray():
            return printable(bytes(value))
        case datetime():
            # Spark gives an instant in this machine's zone, without saying so.
            return format_instant(instant_ms(value.astimezone()))
        case Row():
            return {name: _json_value(each) for name, each in value.asDict().items()}
        case dict():
            return {str(_json_value(name)): _json_value(each) for name, each in value.items()}
        case list():
            return [_json_value(each) for each in value]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
