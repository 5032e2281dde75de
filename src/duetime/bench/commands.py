"""The command line of the benchmarks: reads what is wanted, runs it on a testbed, shows the result.

Each command imports its benchmark when it runs: those import Spark, and `duetime --help` need not.
"""

from dataclasses import asdict
from typing import Annotated

import typer

from duetime.bench.display import show
from duetime.bench.load import LoadPlan
from duetime.bench.options import (
    AsJson,
    Kafka,
    Messages,
    Mode,
    Runs,
    Store,
    ValueBytes,
    parse_range,
)
from duetime.bench.report import COUNTS
from duetime.bench.result import summed_up
from duetime.bench.testbed import OTHER, own_store, own_testbed, testbed, testbed_of_two
from duetime.clock import parse_duration

app = typer.Typer(
    no_args_is_help=True,
    help="Measure lateness and throughput on this machine, or on an existing cluster.",
)


@app.command()
def lateness(  # noqa: PLR0913 (a command's options)
    *,
    rate: Annotated[float, typer.Option(min=0.1, help="Messages a second.")] = 10_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send.")] = 60,
    delay: Annotated[str, typer.Option(help="Least and most delay, such as 5s..30s.")] = "5s..30s",
    value_bytes: ValueBytes = 200,
    runs: Runs = 1,
    warm_up: Annotated[
        float, typer.Option(min=0, help="Seconds of the same load before, not measured.")
    ] = 60,
    timeline: Annotated[bool, typer.Option(help="Show each second of due time as well.")] = False,
    outbox: Annotated[
        bool, typer.Option("--outbox", help="To another cluster, a temporary one, by its outbox.")
    ] = False,
    destinations: Annotated[int, typer.Option(min=1, help="Topics to deliver to.")] = 1,
    missing: Annotated[int, typer.Option(min=0, help="How many of them do not exist.")] = 0,
    stuck: Annotated[
        Mode | None,
        typer.Option(help="Beside a destination that takes nothing; on brokers of its own."),
    ] = None,
    transactions: Annotated[
        bool, typer.Option("--transactions", help="Delivered in Kafka's transactions.")
    ] = False,
    store: Store = "kafka",
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How late messages come that go the whole way, through a warm pipeline."""
    from duetime.bench import lateness as bench  # noqa: PLC0415 (imports Spark)

    if stuck and (kafka or outbox or missing or runs > 1 or destinations > 1 or store != "kafka"):
        raise typer.BadParameter("--stuck goes with --rate, --seconds, --delay and --value-bytes")
    if transactions and (outbox or stuck):
        raise typer.BadParameter("--transactions goes with destinations of this cluster")
    if missing >= destinations:
        raise typer.BadParameter("--missing must be less than --destinations")
    plan = LoadPlan(
        messages=max(1, round(rate * seconds)),
        rate=rate,
        delay_ms=parse_range(delay),
        destinations=(),
        value_bytes=value_bytes,
        cluster=OTHER if outbox else None,
    )
    if stuck:
        show("lateness", _beside_stuck(stuck, plan, warm_up), as_json=as_json)
        return
    targets, beds = bench.Targets(destinations, missing), testbed_of_two if outbox else testbed
    with (
        own_store(store) as place,
        beds(kafka, store=place, transactional_delivery=transactions) as settings,
    ):
        done = bench.lateness(settings, plan, runs, warm_up, targets)
    # Counts are added up, and all other figures are medians.
    result = summed_up([each.figures() for each in done], summed=COUNTS)
    if timeline:
        result["timeline"] = [asdict(second) for second in done[-1].seconds]
    show("lateness", result, as_json=as_json)


def _beside_stuck(mode: Mode, plan: LoadPlan, warm_up_s: float) -> dict[str, int | None]:
    from duetime.bench.stuck import stuck, stuck_testbed  # noqa: PLC0415 (imports Spark)

    with stuck_testbed() as bed:
        return stuck(bed, mode, plan, warm_up_s).figures()


@app.command()
def catchup(  # noqa: PLR0913 (a command's options)
    *,
    messages: Messages = 1_000_000,
    value_bytes: ValueBytes = 200,
    runs: Runs = 1,
    store: Store = "kafka",
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How fast overdue messages are released, against a plain copy by Spark."""
    from duetime.bench.catchup import catchup as run  # noqa: PLC0415 (imports Spark)

    with own_store(store) as place, testbed(kafka, store=place) as settings:
        paces = run(settings, messages, value_bytes, runs)
    show("catchup", summed_up([each.figures() for each in paces]), as_json=as_json)


@app.command()
def intake(
    *,
    messages: Messages = 1_000_000,
    value_bytes: ValueBytes = 200,
    runs: Runs = 1,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How fast Airtel's JSON gets into the wheel, against a plain copy by Spark."""
    from duetime.bench.intake import run_intake  # noqa: PLC0415 (imports Spark)

    with testbed(kafka) as settings:
        paces = run_intake(settings, messages, value_bytes, runs)
    show("intake", summed_up([each.figures() for each in paces]), as_json=as_json)


@app.command()
def pending(
    *,
    messages: Messages = 5_000_000,
    seconds: Annotated[int, typer.Option(min=1, help="How long to send beside it.")] = 60,
    value_bytes: ValueBytes = 200,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """What millions of waiting messages cost the driver in memory, and in punctuality."""
    from duetime.bench.pending import pending as run  # noqa: PLC0415 (imports Spark)

    with testbed(kafka) as settings:
        cost = run(settings, messages, seconds, value_bytes)
    show("pending", cost.figures(), as_json=as_json)


@app.command()
def lookup(
    *,
    messages: Messages = 10_000_000,
    times: Annotated[int, typer.Option(min=1, help="How many messages in each way.")] = 200,
    value_bytes: ValueBytes = 200,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How fast a message is found, cancelled and rescheduled in a slot with millions of others."""
    from duetime.bench.lookup import lookup as run  # noqa: PLC0415 (imports Spark)

    with testbed(kafka) as settings:
        figures = run(settings, messages, times, value_bytes)
    show("lookup", figures, as_json=as_json)


@app.command()
def flood(
    *,
    messages: Messages = 1_000_000,
    rate: Annotated[float, typer.Option(min=0.1, help="Others, a second.")] = 1_000,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How punctual a steady rate is while very many messages are due in one second."""
    from duetime.bench.flood import flood as run  # noqa: PLC0415 (imports Spark)

    with testbed(kafka) as settings:
        done = run(settings, messages, rate)
    show("flood", done.figures(), as_json=as_json)


@app.command()
def crash(  # noqa: PLR0913 (a command's options)
    *,
    kills: Annotated[int, typer.Option(min=1, help="How often the pipeline is killed.")] = 20,
    rate: Annotated[float, typer.Option(min=0.1, help="Messages a second.")] = 2_000,
    life: Annotated[str, typer.Option(help="How long it lives, such as 5s..60s.")] = "5s..60s",
    broker: Annotated[
        bool, typer.Option("--broker", help="Kill the temporary broker, not the pipeline.")
    ] = False,
    backlog: Annotated[int, typer.Option(min=0, help="Messages that wait beside it.")] = 0,
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """Whether each message comes once, however often the pipeline or the broker is killed."""
    from duetime.bench import crash as runs  # noqa: PLC0415 (its parts import Spark)
    from duetime.bench.backlog import fill_backlog  # noqa: PLC0415 (as above)

    if broker and kafka:
        raise typer.BadParameter("--broker kills a temporary one, and --kafka names yours")
    life_ms = parse_range(life)
    if broker:
        with own_testbed() as (settings, own):
            fill_backlog(settings, backlog)
            crashes = runs.crash_broker(settings, own, kills, rate, life_ms)
    else:
        with testbed(kafka) as settings:
            fill_backlog(settings, backlog)
            crashes = runs.crash(settings, kills, rate, life_ms)
    show("crash", crashes.figures(), as_json=as_json)


@app.command()
def failover(
    *,
    times: Annotated[int, typer.Option(min=1, help="How often the leader goes.")] = 5,
    rate: Annotated[float, typer.Option(min=0.1, help="Messages a second.")] = 500,
    pause: Annotated[
        str, typer.Option(help="Stop it for so long, such as 60s, instead of killing it.")
    ] = "0s",
    kafka: Kafka = None,
    as_json: AsJson = False,
) -> None:
    """How soon a standby delivers when the pipeline that leads is killed or hangs."""
    from duetime.bench.failover import failover as run  # noqa: PLC0415 (its parts import Spark)

    with testbed(kafka) as settings:
        failovers = run(settings, times, rate, parse_duration(pause) / 1_000)
    show("failover", failovers.figures(), as_json=as_json)
