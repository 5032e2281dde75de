"""topics, doctor, status: create topics, check this machine and its cluster, show who delivers."""

import json
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Message, Producer
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka.admin import ClusterMetadata
from typer import Option

from duetime.cli.terminal import (
    Config,
    Json,
    Kafka,
    Store,
    connected,
    console,
    facts,
    settings_from,
    when,
)
from duetime.client.status import RUNS
from duetime.client.status import status as read_status
from duetime.core import headers as H
from duetime.core.clock import Clock, Offset, SystemClock, format_duration, format_instant
from duetime.core.errors import ConfigError, DuetimeError, KafkaError, SetupError
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames, required_topics
from duetime.kafka.admin import (
    ClusterTopics,
    advice,
    create_topics,
    find_topics,
    grow_topics,
    topic_problems,
    tune_topics,
)
from duetime.kafka.connection import ClusterProbe, librdkafka_properties
from duetime.kafka.offsets import Offsets, Unreadable
from duetime.kafka.range_reader import open_transactions, remedy
from duetime.local.jars import find_java, jars_dir, java_version, missing_jars
from duetime.stores.factory import check_store

if TYPE_CHECKING:
    from duetime.client.http_models import PipelineStatus

#: Timeout of a request to the broker, in seconds.
TIMEOUT_S = 5.0

#: Number of comparisons of the clocks: the first opens connections, and the fastest is the best.
CLOCK_SAMPLES = 6

#: Longest time that a transaction may be open, in ms.
MAX_TRANSACTION_MS = 10_000

#: Largest difference between this machine's clock and the broker's, in ms.
MAX_CLOCK_DIFFERENCE_MS = 500

#: How often Linux repeats what a closed connection has left to send; 0 is 8 times.
ORPHAN_RETRIES = Path("/proc/sys/net/ipv4/tcp_orphan_retries")


class Verdict(Enum):
    """Severity of a check's result, with its mark and the colour of that."""

    OK = "✓", "green"
    #: It works, and should be improved.
    ADVICE = "!", "yellow"
    WRONG = "✗", "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    verdict: Verdict
    #: One sentence, with what to do if something is wrong.
    detail: str

    @property
    def ok(self) -> bool:
        """Return whether duetime works with it."""
        return self.verdict is not Verdict.WRONG


def topics(
    *,
    check: Annotated[bool, Option("--check", help="Only check, and change nothing.")] = False,
    kafka: Kafka = None,
    store: Store = None,
    config: Config = None,
) -> None:
    """Create, adjust and check duetime's topics.

    Creates missing topics, adds the partitions that the wheel's lack, and adjusts segments.

    Exit code 1 if the settings of a topic could lose messages.
    """
    settings = connected(kafka, config, store=store)
    if not check:
        for name in create_topics(settings):
            typer.echo(f"created {name}")
        try:
            for each in chain(grow_topics(settings), tune_topics(settings)):
                typer.echo(f"changed {each}")
        except KafkaError as error:
            # A user who may not do so still has a pipeline that works.
            typer.echo(f"! {error.detail}", err=True)
    problems = topic_problems(settings)
    for problem in problems:
        typer.echo(f"✗ {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    typer.echo(f"✓ all {len(required_topics(settings))} topics are as they must be")


def doctor(*, kafka: Kafka = None, store: Store = None, config: Config = None) -> None:
    """Check Java, jars, Kafka, clocks and topics.

    Exit code 1 if something is wrong. Advice (!) does not change the exit code.
    """
    checks = checkup(settings_from(kafka, config, store=store))
    out = console()
    for each in checks:
        mark, style = each.verdict.value
        out.print(mark, end=" ", style=style)
        out.print(f"{each.name}: {each.detail}")
    if not all(each.ok for each in checks):
        raise typer.Exit(1)


def status(
    *, as_json: Json = False, kafka: Kafka = None, store: Store = None, config: Config = None
) -> None:
    """Show which pipeline delivers.

    Also shows the pipelines on standby, and what is overdue.

    Exit code 1 if none delivers.
    """
    settings, clock = connected(kafka, config, store=store), SystemClock()
    found = read_status(settings, clock)
    typer.echo(
        json.dumps(found.model_dump()) if as_json else facts(_status_facts(found, clock.now_ms()))
    )
    if found.leader is None:
        raise KafkaError("no pipeline leads, so nothing is delivered: start duetime up, or run")


def _status_facts(found: "PipelineStatus", now_ms: int) -> list[tuple[str, str]]:
    since = f", since {when(found.since_ms, now_ms)}" if found.since_ms else ""
    late = f"{found.late:,}, the oldest for {format_duration(found.lag_ms or 0)}"
    released = "not known" if found.overdue_released is None else f"{found.overdue_released:,}"
    releases = [
        f"{when(each.at_ms, now_ms)}: {each.messages:,}, "
        f"due from {format_instant(each.from_ms)} to {format_instant(each.to_ms)}"
        for each in found.overdue_releases
    ]
    queries = f"all {len(found.queries)} run" if found.queries else "not known"
    problems = [f"{name} {state}" for name, state in found.queries.items() if state != RUNS]
    return [
        ("leader", f"{found.leader or 'none'}{since}"),
        ("standing by", "\n".join(found.standbys) or "none"),
        ("waiting", f"{found.waiting:,}"),
        ("late", late if found.late else "none"),
        ("overdue released", "\n".join([released, *releases])),
        ("queries", "\n".join(problems) or queries),
    ]


def checkup(settings: Settings, clock: Clock | None = None) -> list[Check]:
    """Run every check that is possible, each before those that it explains.

    Writes some records to duetime's warm-up topic, and to no other.
    """
    clock = clock or SystemClock()
    checks = [_check("Java", _java), _check("jars", _jars)]
    checks.append(_check("broker", lambda: _broker(settings)))
    if checks[-1].ok:
        find = cache(lambda: find_topics(settings))
        checks.append(_check("topics", lambda: _topics(settings, find())))
        # What cannot be read is reported by the check of the topics.
        with suppress(DuetimeError):
            found = advice(settings, find())
            checks += [
                Check(name=name, verdict=Verdict.ADVICE, detail=detail)
                for name, detail in found.items()
            ]
        checks.append(_check("transactions", lambda: _transactions(settings, clock.now_ms())))
        if settings.store_kind != "kafka":
            checks.append(_check("store", lambda: check_store(settings)))
        checks.append(_check("clock", lambda: _clock(settings, clock)))
        if ORPHAN_RETRIES.exists():
            checks.append(_check("network", _network))
    return checks


def _check(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name=name, verdict=Verdict.OK, detail=run())
    except DuetimeError as error:
        return Check(name=name, verdict=Verdict.WRONG, detail=error.detail)


def _java() -> str:
    java = find_java()
    return f"{java} is Java {java_version(java)}"


def _jars() -> str:
    directory = jars_dir()
    if missing := missing_jars(directory):
        raise SetupError(
            f"jars are missing in {directory} ({', '.join(missing)}): fetch them with `make setup` "
            "or `python -m duetime.local.jars`"
        )
    return f"the jars are in {directory}"


def _broker(settings: Settings) -> str:
    brokers = len(_cluster(settings).brokers)
    return f"{settings.bootstrap} answers, of a cluster of {brokers}"


def _cluster(settings: Settings) -> ClusterMetadata:
    advice = "check that it is up, its address, and the security settings"
    return ClusterProbe(settings).cluster((TIMEOUT_S,), advice)


def _topics(settings: Settings, found: ClusterTopics) -> str:
    problems = topic_problems(settings, found)
    if problems:
        others = f" (and {len(problems) - 1} more: see `duetime topics`)" if problems[1:] else ""
        raise ConfigError(problems[0] + others)
    return "all exist, and are as they must be"


def _transactions(settings: Settings, now_ms: int) -> str:
    names = TopicNames(settings)
    with closing(Offsets(settings, f"{settings.namespace}.doctor")) as offsets:
        try:
            found = open_transactions(settings, offsets, names.intake)
        except Unreadable as error:
            raise KafkaError(f"an intake topic cannot be read: {error}") from error
    oldest = min(found, key=lambda each: each.since_ms, default=None)
    if oldest and now_ms - oldest.since_ms > MAX_TRANSACTION_MS:
        raise DuetimeError(
            f"a transaction is open in topic {oldest.topic}, partition {oldest.partition}, for "
            f"{format_duration(now_ms - oldest.since_ms)}: "
            f"{remedy(oldest.topic, names.transactional)}"
        )
    return f"none is open in an intake topic for longer than {format_duration(MAX_TRANSACTION_MS)}"


def _clock(settings: Settings, clock: Clock) -> str:
    topic = TopicNames(settings).warmup
    # Writing to it would create it, with other settings than it must have.
    if topic not in _cluster(settings).topics:
        raise ConfigError(f"clocks are compared by topic {topic}: create it with `duetime topics`")
    return verdict(clock_offset(settings, clock))


def clock_offset(settings: Settings, clock: Clock) -> Offset:
    """Compare the clocks by records that the broker stamps. Raises DuetimeError."""
    properties = librdkafka_properties(settings) | {
        "linger.ms": 0,
        "delivery.timeout.ms": int(TIMEOUT_S * 1_000),
    }
    producer, topic = Producer(properties), TopicNames(settings).warmup
    samples = [_sample_clock(producer, topic, clock) for _ in range(CLOCK_SAMPLES)]
    return min(samples, key=lambda it: it.error_ms)


def _sample_clock(producer: Producer, topic: str, clock: Clock) -> Offset:
    reports: list[tuple[int, BrokerError | None, Message]] = []
    sent_ms = clock.now_ms()
    producer.produce(
        topic,
        partition=0,
        # Like a record of the warm-up, which reads this topic.
        headers=[(H.DUE_AT_MS, str(sent_ms))],
        on_delivery=lambda error, record: reports.append((clock.now_ms(), error, record)),
    )
    while not reports:
        producer.poll(TIMEOUT_S)
    received_ms, error, record = reports[0]
    if error is not None:
        raise KafkaError(
            f"topic {topic} cannot be written to ({error.str()}): check this user's permissions"
        )
    kind, appended_ms = record.timestamp()
    if kind != TIMESTAMP_LOG_APPEND_TIME:
        raise ConfigError(f"topic {topic}: message.timestamp.type is CreateTime: set LogAppendTime")
    return Offset.seen(sent_ms=sent_ms, stamped_ms=appended_ms, received_ms=received_ms)


def verdict(offset: Offset) -> str:
    """Return a sentence about the offset. Raises DuetimeError if it is too large, or uncertain."""
    about = f"{abs(offset.ahead_ms)} ms, give or take {offset.error_ms} ms"
    if offset.error_ms > MAX_CLOCK_DIFFERENCE_MS:
        raise DuetimeError(
            f"the clocks cannot be compared, as the broker takes {2 * offset.error_ms} ms to "
            "answer: try again when it is less busy"
        )
    if abs(offset.ahead_ms) - offset.error_ms <= MAX_CLOCK_DIFFERENCE_MS:
        return f"this machine's clock and the broker's differ by {about}"
    way, effect = ("behind", "late") if offset.ahead_ms > 0 else ("ahead of", "early")
    raise DuetimeError(
        f"this machine's clock is {way} the broker's by {about}, so messages would be delivered "
        f"too {effect} by as much: synchronise both by NTP"
    )


def _network() -> str:
    """Return advice, as it takes a network that was cut to cause duplicates."""
    tries = int(ORPHAN_RETRIES.read_text()) or 8
    if tries == 1:
        return "a request that was cut off is given up after one try (tcp_orphan_retries)"
    return (
        f"a request that was cut off is sent up to {tries} times, for a minute or two, and may "
        "duplicate its messages: set net.ipv4.tcp_orphan_retries=1 where pipelines run"
    )
