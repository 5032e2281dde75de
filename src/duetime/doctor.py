"""Is everything here that duetime needs? One sentence a check, which says what to do."""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Message, Producer
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka.admin import ClusterMetadata

from duetime.admin import find_topics, topic_problems
from duetime.advice import advice
from duetime.clock import Clock, Offset, SystemClock, format_duration
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError, DuetimeError, KafkaError, SetupError
from duetime.local.jars import CONFS, jars_dir
from duetime.local.java import find_java, java_version
from duetime.message import DUE_AT_MS
from duetime.reach import Contact, Unanswered
from duetime.stores.offsets import Offsets, Unreadable
from duetime.stores.open_transactions import open_transactions, remedy
from duetime.stores.opening import check_store
from duetime.topics import TopicNames

#: How long the broker may take to answer, in seconds.
TIMEOUT_S = 5.0

#: How often the clocks are compared: the first look opens connections, and the quickest says most.
LOOKS = 6

#: For how long a transaction may be open, in ms.
LONG_MS = 10_000

#: How far this machine's clock and the broker's may differ, in ms.
MOST_APART_MS = 500


#: How often Linux sends again what a closed connection has left; 0 is 8 times.
ORPHAN_RETRIES = Path("/proc/sys/net/ipv4/tcp_orphan_retries")


class Verdict(Enum):
    """How bad it is."""

    OK = "ok"
    #: It works, and something should be done about it.
    ADVICE = "advice"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one look has found."""

    name: str
    verdict: Verdict
    #: One sentence; where there is something to do, it says what.
    detail: str

    @property
    def ok(self) -> bool:
        """Whether duetime works with it."""
        return self.verdict is not Verdict.WRONG


def checkup(settings: Settings, clock: Clock | None = None) -> list[Check]:
    """Every check that can be made, in the order in which their findings explain each other.

    Writes some records to duetime's warm-up topic, and to no other.
    """
    checks = [_check("Java", _java), _check("jars", _jars)]
    checks.append(_check("broker", lambda: _broker(settings)))
    if checks[-1].ok:
        checks.append(_check("topics", lambda: _topics(settings)))
        checks += _advice(settings)
        now_ms = (clock or SystemClock()).now_ms
        checks.append(_check("transactions", lambda: _transactions(settings, now_ms())))
        if settings.store_kind != "kafka":
            checks.append(_check("store", lambda: check_store(settings)))
        checks.append(_check("clock", lambda: _clock(settings, clock or SystemClock())))
        if ORPHAN_RETRIES.exists():
            checks.append(_check("network", _network))
    return checks


def clock_offset(settings: Settings, clock: Clock) -> Offset:
    """Compare the clocks by records that the broker stamps. Raises DuetimeError."""
    properties = librdkafka_properties(settings) | {
        "linger.ms": 0,
        "delivery.timeout.ms": int(TIMEOUT_S * 1_000),
    }
    producer = Producer(properties)
    topic = TopicNames(settings).warmup
    return min((_look(producer, topic, clock) for _ in range(LOOKS)), key=lambda it: it.error_ms)


def verdict(offset: Offset) -> str:
    """What the offset means, in a sentence. Raises DuetimeError where it is wrong."""
    about = f"{abs(offset.ahead_ms)} ms, give or take {offset.error_ms} ms"
    if offset.error_ms > MOST_APART_MS:
        raise DuetimeError(
            f"the clocks cannot be compared, as the broker takes {2 * offset.error_ms} ms to "
            "answer: try again when it is less busy"
        )
    if abs(offset.ahead_ms) - offset.error_ms <= MOST_APART_MS:
        return f"this machine's clock and the broker's differ by {about}"
    way, effect = ("behind", "late") if offset.ahead_ms > 0 else ("ahead of", "early")
    raise DuetimeError(
        f"this machine's clock is {way} the broker's by {about}, so messages would be delivered as "
        f"much too {effect}: set both by NTP"
    )


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name=name, verdict=Verdict.OK, detail=look())
    except DuetimeError as error:
        return Check(name=name, verdict=Verdict.WRONG, detail=error.detail)


def _advice(settings: Settings) -> list[Check]:
    # What cannot be asked is told by the check of the topics already.
    with suppress(DuetimeError):
        found = advice(settings, find_topics(settings))
        return [Check(name=each, verdict=Verdict.ADVICE, detail=found[each]) for each in found]
    return []


def _java() -> str:
    java = find_java()
    return f"{java} is Java {java_version(java)}"


def _jars() -> str:
    directory = jars_dir()
    missing = [conf for conf in CONFS if not any((directory / conf).glob("*.jar"))]
    if missing:
        raise SetupError(
            f"jars are missing in {directory} ({', '.join(missing)}): fetch them with `make setup` "
            "or `python -m duetime.local.jars`"
        )
    return f"the jars are in {directory}"


def _broker(settings: Settings) -> str:
    brokers = len(_cluster(settings).brokers)
    return f"{settings.bootstrap} answers, of a cluster of {brokers}"


def _cluster(settings: Settings) -> ClusterMetadata:
    try:
        return Contact(settings).cluster((TIMEOUT_S,), hopeless=())
    except Unanswered as error:
        raise error.in_words(
            settings,
            "see that it is up, that this is its address, and that the security settings are its "
            "own",
        ) from error


def _topics(settings: Settings) -> str:
    problems = topic_problems(settings)
    if problems:
        others = f" (and {len(problems) - 1} more: `duetime topics` tells)" if problems[1:] else ""
        raise ConfigError(problems[0] + others)
    return "all are there, and as they must be"


def _transactions(settings: Settings, now_ms: int) -> str:
    names = TopicNames(settings)
    with closing(Offsets(settings, f"{settings.namespace}.doctor")) as offsets:
        try:
            found = open_transactions(settings, offsets, names.intake)
        except Unreadable as error:
            raise KafkaError(f"an intake topic cannot be looked at: {error}") from error
    longest_ms, oldest = max(
        ((now_ms - each.since_ms, each) for each in found),
        key=lambda pair: pair[0],
        default=(0, None),
    )
    if oldest and longest_ms > LONG_MS:
        raise DuetimeError(
            f"a transaction is open in topic {oldest.topic}, partition {oldest.partition}, for "
            f"{format_duration(longest_ms)}: {remedy(oldest.topic, names.transactional)}"
        )
    return f"none is open in an intake topic for longer than {format_duration(LONG_MS)}"


def _clock(settings: Settings, clock: Clock) -> str:
    topic = TopicNames(settings).warmup
    # Writing would create it, not as it must be.
    if topic not in _cluster(settings).topics:
        raise ConfigError(f"clocks are compared by topic {topic}: create it with `duetime topics`")
    return verdict(clock_offset(settings, clock))


def _network() -> str:
    """Advice, and no fault: what it is about takes a network that was cut."""
    tries = int(ORPHAN_RETRIES.read_text()) or 8
    if tries == 1:
        return "a request that was cut off is given up after one try (tcp_orphan_retries)"
    return (
        f"a request that was cut off is sent up to {tries} times, for a minute or two, and its "
        "messages may come twice then: set net.ipv4.tcp_orphan_retries=1 where pipelines run"
    )


def _look(producer: Producer, topic: str, clock: Clock) -> Offset:
    reports: list[tuple[int, BrokerError | None, Message]] = []
    sent_ms = clock.now_ms()
    producer.produce(
        topic,
        partition=0,
        # As the warm-up's own, which are read where this is written.
        headers=[(DUE_AT_MS, str(sent_ms))],
        on_delivery=lambda error, record: reports.append((clock.now_ms(), error, record)),
    )
    while not reports:
        producer.poll(TIMEOUT_S)
    received_ms, error, record = reports[0]
    if error is not None:
        raise KafkaError(
            f"topic {topic} cannot be written to ({error.str()}): may this user do so?"
        )
    return _offset(sent_ms, received_ms, topic, record)


def _offset(sent_ms: int, received_ms: int, topic: str, record: Message) -> Offset:
    kind, appended_ms = record.timestamp()
    if kind != TIMESTAMP_LOG_APPEND_TIME:
        raise ConfigError(f"topic {topic}: message.timestamp.type is CreateTime: set LogAppendTime")
    return Offset.seen(sent_ms=sent_ms, stamped_ms=appended_ms, received_ms=received_ms)
