"""The command line of the benchmarks of what is around the pipeline: see `commands`."""

from dataclasses import asdict
from typing import Annotated

import typer

from duetime.bench.commands import app
from duetime.bench.display import show
from duetime.bench.load import LoadPlan
from duetime.bench.options import AsJson, Kafka, Messages, Runs, ValueBytes, parse_range
from duetime.bench.result import summed_up
from duetime.bench.testbed import testbed
from duetime.clock import parse_duration


@app.command()
def delayed(  # noqa: PLR0913 (a command's options)
    *,
    rate: Annotated[float, typer.Option(min=0.1, help="Messages a second.")] = 2_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send.")] = 60,
    delay: Annotated[str, typer.Option(help="Least and most delay, such as 1s..9s.")] = "0.1s..60s",
    way: Annotated[
        str, typer.Option(help="visible, consumer or spark; all is one after the other.")
    ] = "all",
    warm_up: Annotated[
        float, typer.Option(min=0, help="Seconds of the same rate before, not measured.")
    ] = 10,
    value_bytes: ValueBytes = 200,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How punctual, and in what order, a delayed topic's records are read, in each way."""
    from duetime.bench import delayed as bench  # noqa: PLC0415 (imports Spark)

    if way not in ("all", *bench.Way):
        raise typer.BadParameter(f"--way {way} is none of visible, consumer, spark, all")
    ways = list(bench.Way) if way == "all" else [bench.Way(way)]
    plan = LoadPlan(
        messages=max(1, round(rate * seconds)),
        rate=rate,
        delay_ms=parse_range(delay),
        destinations=(),
        value_bytes=value_bytes,
    )
    with testbed(kafka) as settings:
        found = {str(each): bench.delayed(settings, plan, each, warm_up) for each in ways}
    totals = {name: sum(each[name] or 0 for each in found.values()) for name in bench.COUNTS}
    show("delayed", totals | found, as_json=as_json)


@app.command()
def queue(  # noqa: PLR0913 (a command's options)
    *,
    messages: Messages = 200_000,
    drop: Annotated[float, typer.Option(min=0, max=1, help="Share that is dropped.")] = 0.01,
    timeout: Annotated[str, typer.Option(help="After which it comes again, such as 5s.")] = "5s",
    rate: Annotated[float, typer.Option(min=1, help="Messages a second, where some drop.")] = 5_000,
    value_bytes: ValueBytes = 200,
    runs: Runs = 1,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How fast a queue's worker is, and how soon what it drops comes again."""
    from duetime.bench.queue import Plan, run_queue  # noqa: PLC0415 (its parts import Spark)

    plan = Plan(
        messages=messages,
        rate=rate,
        drop_every=round(1 / drop) if drop else 0,
        timeout_ms=parse_duration(timeout),
        value_bytes=value_bytes,
    )
    with testbed(kafka) as settings:
        done = run_queue(settings, plan, runs)
    counts = ("messages", "lost", "redelivered", "wrongly_redelivered")
    show("queue", summed_up([each.figures() for each in done], summed=counts), as_json=as_json)


@app.command()
def api(
    *,
    seconds: Annotated[float, typer.Option(min=1, help="How long each of three loads lasts.")] = 20,
    value_bytes: ValueBytes = 200,
    runs: Runs = 1,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How many messages a second the HTTP API takes, single and in batches of 100."""
    from duetime.bench.api import api as run  # noqa: PLC0415 (its parts import Spark)

    with testbed(kafka) as settings:
        served = [run(settings, seconds, value_bytes).figures() for _ in range(runs)]
    show("api", summed_up(served, summed=("failed",)), as_json=as_json)


@app.command()
def wheel(
    *,
    years: Annotated[float, typer.Option(min=0.01, help="How far away the message is due.")] = 5,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """Whether a message that is due in years walks every level, in simulated time."""
    from duetime.bench.wheel import wheel as run  # noqa: PLC0415 (imports Spark)

    with testbed(kafka) as settings:
        walks = run(settings, years)
    show("wheel", asdict(walks), as_json=as_json)


@app.command()
def bulk(
    *,
    rows: Annotated[int, typer.Option(min=1, help="How many rows.")] = 10_000_000,
    value_bytes: ValueBytes = 100,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How fast a DataFrame is scheduled, against a plain write of it by Spark."""
    from duetime.bench.bulk import bulk as run  # noqa: PLC0415 (imports Spark)

    with testbed(kafka) as settings:
        scheduled = run(settings, rows, value_bytes)
    show("bulk", scheduled.figures(), as_json=as_json)
