"""`duetime bench NAME`: the benchmarks as commands, and their results as JSON or a table.

A command is a row: the function that measures, its help, and the defaults of its options. Functions
are imported when they run, because they import Spark.
"""

import inspect
import json
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from duetime.bench.testbed import Figures, Outage, open_testbed, summed_up

app = typer.Typer(
    no_args_is_help=True,
    help="Measure lateness and throughput on this machine, or on an existing cluster.",
)

StuckMode = Literal["leaderless", "refusing", "missing", "dying"] | None
Way = Literal["visible", "consumer", "spark", "all"]
STORE = "Where messages wait: kafka, redis for a temporary server, or redis://host:port/db."
KAFKA = "Use this cluster; else a temporary broker is started."


def _option(kind: Any, text: str, *names: str, **others: Any) -> Any:  # noqa: ANN401 (typer's own)
    return Annotated[kind, typer.Option(*names, help=text, **others)]


#: The options of all benchmarks, by the names of parameters.
OPTIONS = {
    "backlog": _option(int, "Pending messages in the wheel meanwhile.", min=0),
    "brokers": _option(int, "Number of temporary brokers; three keep each record thrice.", min=1),
    "cut": _option(str, "Cut the leader off from the broker for this long, such as 20s."),
    "delay": _option(str, "Shortest and longest delay, such as 5s..30s."),
    "destinations": _option(int, "Topics to deliver to.", min=1),
    "drop": _option(float, "Share of messages that the worker drops.", min=0, max=1),
    "kills": _option(int, "Number of kills.", min=1),
    "life": _option(str, "Shortest and longest time between kills, such as 5s..60s."),
    "messages": _option(int, "Number of messages.", min=1),
    "missing": _option(int, "Number of destinations that do not exist.", min=0),
    "outage": _option(Outage | None, "How a temporary broker goes away."),
    "outbox": _option(bool, "Deliver to another, temporary cluster by its outbox.", "--outbox"),
    "pause": _option(str, "Stop the leader for this long, such as 60s; 0s kills it."),
    "rate": _option(float, "Messages a second.", min=0.1),
    "rows": _option(int, "Number of rows.", min=1),
    "runs": _option(int, "Repeat, and show medians and their spread.", min=1),
    "seconds": _option(float, "Duration of each load.", min=0.1),
    "store": _option(str, STORE, metavar="STORE"),
    "stuck": _option(StuckMode, "Why another destination takes nothing, on temporary brokers."),
    "timeline": _option(bool, "Show each second of due time as well."),
    "timeout": _option(str, "Time after which a message is redelivered, such as 5s."),
    "times": _option(int, "Number of repetitions.", min=1),
    "transactions": _option(bool, "Deliver in Kafka's transactions.", "--transactions"),
    "value_bytes": _option(int, "Size of each message's value.", min=100),
    "warm_up": _option(float, "Seconds of the same load before, not measured.", min=0),
    "way": _option(Way, "How the topic is read; all is one after the other."),
    "workers": _option(str, "Numbers of workers, such as 1,2,4."),
    "years": _option(float, "Years until the message is due.", min=0.01),
    "kafka": _option(str | None, KAFKA, metavar="HOST:PORT"),
    "as_json": _option(bool, "Print one JSON line on stdout instead of a table.", "--json"),
}

#: By function: the help, and the defaults of the options.
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lateness.lateness": (
        "Measure the lateness of messages that go the whole way through a warm pipeline.",
        {"rate": 10_000, "seconds": 60, "delay": "5s..30s", "value_bytes": 200, "runs": 1}
        | {"warm_up": 60, "timeline": False, "outbox": False, "destinations": 1, "missing": 0}
        | {"stuck": None, "transactions": False, "store": "kafka"},
    ),
    "throughput.catchup": (
        "Measure how fast overdue messages are released, against a plain copy by Spark.",
        {"messages": 1_000_000, "value_bytes": 200, "runs": 1, "store": "kafka"},
    ),
    "throughput.intake": (
        "Measure how fast Airtel's JSON is taken into the wheel, against a plain copy by Spark.",
        {"messages": 1_000_000, "value_bytes": 200, "runs": 1},
    ),
    "lateness.pending": (
        "Measure what millions of pending messages cost in driver memory and in lateness.",
        {"messages": 5_000_000, "seconds": 60, "value_bytes": 200},
    ),
    "lateness.lookup": (
        "Measure finding, cancelling and rescheduling a message in a slot with millions of others.",
        {"messages": 10_000_000, "times": 200, "value_bytes": 200},
    ),
    "lateness.flood": (
        "Measure the lateness of a steady load while very many messages are due in one second.",
        {"messages": 1_000_000, "rate": 1_000},
    ),
    "lateness.outage": (
        "Measure lateness while one of several brokers is away, and after that.",
        {"outage": "killed", "brokers": 3, "rate": 100, "seconds": 60, "delay": "0s..10s"}
        | {"warm_up": 60},
    ),
    "chaos.crash": (
        "Count lost and duplicated messages after kills of the pipeline, or outages of brokers.",
        {"kills": 20, "rate": 2_000, "life": "5s..60s", "brokers": 1, "outage": None}
        | {"backlog": 0},
    ),
    "chaos.failover": (
        "Measure how soon a standby delivers when the leader is killed, hangs or is cut off.",
        {"times": 5, "rate": 500, "pause": "0s", "cut": "0s"},
    ),
    "scale.scale": (
        "Measure CPU time, lateness and pace on Spark clusters of more and more workers.",
        {"workers": "1,2,4", "rate": 2_000, "seconds": 60, "messages": 200_000},
    ),
    "clients.delayed": (
        "Measure lateness and order of a delayed topic's records, in each way to read them.",
        {"rate": 2_000, "seconds": 60, "delay": "0.1s..60s", "way": "all", "warm_up": 10}
        | {"value_bytes": 200},
    ),
    "clients.queue": (
        "Measure the pace of a queue's worker, and how soon what it drops is redelivered.",
        {"messages": 200_000, "drop": 0.01, "timeout": "5s", "rate": 5_000}
        | {"value_bytes": 200, "runs": 1},
    ),
    "clients.api": (
        "Measure the messages a second that the HTTP API takes, single and in batches of 100.",
        {"seconds": 20, "value_bytes": 200, "runs": 1},
    ),
    "throughput.wheel": (
        "Move a message that is due in years through every level, in simulated time.",
        {"years": 5},
    ),
    "throughput.bulk": (
        "Measure how fast a DataFrame is scheduled, against a plain write of it by Spark.",
        {"rows": 10_000_000, "value_bytes": 100},
    ),
}


def _add(function: str, text: str, defaults: dict[str, Any]) -> None:
    """Add the command of `module.function`, with `--kafka` and `--json`.

    The function returns the figures of one run or a list of several. If its first parameter is
    `kafka`, it opens its testbed itself; else it gets the settings of one.
    """
    module, _, name = function.partition(".")

    def command(*, kafka: str | None, as_json: bool, **options: Any) -> None:  # noqa: ANN401 (its options)
        run = getattr(import_module(f"duetime.bench.{module}"), name)
        if "kafka" in inspect.signature(run).parameters:
            result = run(kafka, **options)
        else:
            store = {"store": options.pop("store")} if "store" in options else {}
            with open_testbed(kafka, **store) as settings:
                result = run(settings, **options)
        figures = summed_up(result) if isinstance(result, list) else result
        show(name, figures, as_json=as_json)

    parameters = [
        inspect.Parameter(
            each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=OPTIONS[each]
        )
        for each, default in (defaults | {"kafka": None, "as_json": False}).items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, help=text)(command)


for each, (text, defaults) in COMMANDS.items():
    _add(each, text, defaults)


def show(name: str, result: Figures, *, as_json: bool) -> None:
    """Write the result to stdout."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table("figure", "value", title=f"bench {name}")
    for figure, value in result.items():
        table.add_row(figure, _text(value))
    Console().print(table)


def _text(value: Any) -> str:  # noqa: ANN401 (anything that JSON can hold)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        separator = "\n" if isinstance(value[0], dict) else " to "
        return separator.join(map(_text, value))
    return f"{value:,}" if isinstance(value, int | float) else str(value)
