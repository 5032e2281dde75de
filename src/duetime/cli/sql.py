"""sql: any question about what waits, answered by Spark."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duetime.cli.connect import connected
from duetime.cli.display import console, printable, table
from duetime.cli.options import BadInput, Config, Json, Kafka
from duetime.clock import format_instant, instant_ms
from duetime.config import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

#: What the messages that wait are called in a query.
VIEW = "pending"

#: The class of a Spark error, which its words begin with.
ERROR_CLASS = re.compile(r"^\[[A-Z0-9_.]+\] ")


def sql(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="Spark SQL; what waits is the view `pending`.")
    ],
    *,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="The most rows that are shown.")
    ] = 1_000,
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
            for row in rows.toLocalIterator():
                typer.echo(json.dumps(_plain(row), ensure_ascii=False))
        else:
            _show(rows.columns, rows.limit(limit + 1).collect(), limit)


@contextmanager
def _spark(settings: Settings) -> "Iterator[SparkSession]":
    from duetime.spark import session  # noqa: PLC0415 (Spark takes a second to import)

    spark = session(settings)
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _told() -> Iterator[None]:
    """Spark's own words about a query, without its plan and without its trace."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 (as above)
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 (as above)

    # It writes each error to stderr as JSON, with its trace.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        yield
    except PySparkException as error:
        said = str(error).strip().partition(" SQLSTATE")[0].splitlines()[0]
        raise BadInput(f"the query cannot be answered: {ERROR_CLASS.sub('', said)}") from error


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
    """What JSON has for it: bytes are text, an instant is ISO 8601 in UTC."""
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
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
