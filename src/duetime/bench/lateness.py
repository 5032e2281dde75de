"""Benchmarks of a whole, warm pipeline, which runs in this process as in that of `duetime up`.

lateness          a steady load to one or several destinations
lateness --stuck  the same, while another destination takes nothing
outage            the same, while one of several brokers is killed or cut off from all networks
flood             the same, while very many messages are due in one second
pending           the same, without and with millions of pending messages in the wheel
lookup            find, cancel and reschedule single messages in a slot with millions of others
"""

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import typer
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.bench.delivery import (
    DISCOVERY_S,
    GRACE_S,
    deliver,
    deliver_before,
    fill_backlog,
    measured,
    pending_load,
    running_pipeline,
)
from duetime.bench.loadgen import LoadPlan, parse_range, run_load, start_load
from duetime.bench.testbed import (
    BROKER,
    DEFECTS,
    OTHER,
    Appends,
    Brokers,
    Figures,
    Outage,
    destination,
    open_brokers,
    open_testbed,
    percentiles,
    progress,
    rss_mb,
    scratch,
    summed_up,
    timeline_of,
)
from duetime.client.cancellation import cancel_and_confirm
from duetime.client.dead_letters import DeadLetterFilter, DeadLetters
from duetime.client.rescheduling import reschedule
from duetime.core.clock import SystemClock
from duetime.core.errors import DuetimeError, KafkaError
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.core.topics import DAY_MS, TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.kafka.range_reader import RangeReader
from duetime.local.broker import LocalBroker, Node, new_cluster
from duetime.pipeline.release.slot_indexer import MIN_RECORDS
from duetime.pipeline.service import Pipeline
from duetime.spark.session import jvm_pid
from duetime.stores.factory import open_reader
from duetime.stores.slot_index import IndexReader


def lateness(  # noqa: PLR0913 (the options of a command)
    kafka: str | None,
    *,
    rate: float,
    seconds: float,
    delay: str,
    value_bytes: int,
    runs: int,
    warm_up: float,
    timeline: bool,
    outbox: bool,
    destinations: int,
    missing: int,
    stuck: str | None,
    transactions: bool,
    store: str,
) -> Figures:
    """Send a steady load through a warm pipeline `runs` times.

    The same load goes first for `warm_up` seconds and is not measured: the JVM goes on compiling
    for some minutes after the pipeline is ready.
    """
    if stuck and (kafka or outbox or missing or runs > 1 or destinations > 1 or store != "kafka"):
        raise typer.BadParameter("--stuck goes with --rate, --seconds, --delay and --value-bytes")
    if transactions and (outbox or stuck):
        raise typer.BadParameter("--transactions goes with destinations of this cluster")
    if missing >= destinations:
        raise typer.BadParameter("--missing must be less than --destinations")
    load = {"delay_ms": parse_range(delay), "value_bytes": value_bytes}
    plan = LoadPlan.steady(rate, seconds, cluster=OTHER if outbox else None, **load)
    if stuck:
        return lateness_beside_stuck(stuck, plan, warm_up)
    options: dict[str, Any] = {"store": store, "transactional_delivery": transactions}
    with (
        open_testbed(kafka, has_other_cluster=outbox, **options) as settings,
        running_pipeline(settings),
    ):
        topics = (destinations, missing)
        deliver_before(settings, plan, warm_up, *topics)
        found = [measured(settings, plan, f"run-{number}", *topics) for number in range(runs)]
    figures = summed_up([each for each, _ in found])
    return figures | {"timeline": timeline_of(found[-1][1])} if timeline else figures


# flood

#: How long before its due time the flood is written, in seconds: it is two levels up then, and is
#: cascaded before it is released. And how long the steady load lasts before the flood, to warm the
#: JVM, and after it.
FLOOD_AHEAD_S, FLOOD_BEFORE_S, FLOOD_AFTER_S = 90, 60, 60


def flood(settings: Settings, messages: int, rate: float) -> Figures:
    """Have this many messages due in one second, while a steady load has a topic of its own."""
    # It goes through lanes and slots.
    steady = LoadPlan.steady(rate, FLOOD_AHEAD_S + FLOOD_AFTER_S, delay_ms=(500, 15_000))
    with running_pipeline(settings) as pipeline:
        deliver_before(settings, steady, FLOOD_BEFORE_S)
        second_ms = math.ceil(time.time() + FLOOD_AHEAD_S) * 1_000
        plan = pending_load(settings, "flood", messages, due_ms=(second_ms, second_ms + 999))
        flooded = Appends(settings, plan.destinations)
        with start_load(settings, plan) as load:
            others, sent, _ = deliver(settings, steady, "others")
            load()
        flooded.wait_for(messages, GRACE_S)
        driver_mb = _driver_mb(pipeline)
    of_flood, of_others = flooded.report(messages), others.report(sent)
    return {
        "sent": messages + sent,
        **{name: of_flood[name] + of_others[name] for name in DEFECTS},
        **{f"others_{name}": of_others[name] for name in ("p50_ms", "p99_ms", "max_ms")},
        "flood_max_ms": of_flood["max_ms"],
        "driver_rss_mb": driver_mb,
    }


def _driver_mb(pipeline: Pipeline) -> int:
    return rss_mb(os.getpid(), jvm_pid(pipeline.spark))


def pending(settings: Settings, messages: int, seconds: float, value_bytes: int) -> Figures:
    """Deliver a steady load without and with this many pending messages.

    All is read at the end, so that reading does not grow the process that is measured.
    """
    steady = LoadPlan.steady(1_000, seconds, delay_ms=(5_000, 30_000))
    with running_pipeline(settings) as pipeline:
        # A JVM goes on growing for some minutes after it is ready.
        deliver(settings, steady, "before")
        arrived_without, sent, _ = deliver(settings, steady, "without")
        mb_before = _driver_mb(pipeline)
        fill_backlog(settings, messages, value_bytes)
        arrived_with, _, _ = deliver(settings, steady, "with")
        mb_after = _driver_mb(pipeline)
    without, with_backlog = arrived_without.report(sent), arrived_with.report(sent)
    return {
        "driver_rss_mb_before": mb_before,
        "driver_rss_mb_after": mb_after,
        "p99_ms": with_backlog["p99_ms"],
        "p99_ms_without": without["p99_ms"],
        **{name: without[name] + with_backlog[name] for name in DEFECTS},
    }


# lookup

#: How long the pipeline may take to index the slot, in seconds.
INDEX_TIMEOUT_S = 1_800.0


def lookup(settings: Settings, messages: int, times: int, value_bytes: int) -> Figures:
    """Fill one slot, wait until it is indexed, and look up `times` messages in each way.

    Each answer is compared with what is known of the message. Raises KafkaError if the slot is not
    indexed.
    """
    # In a slot of some days, on level 3.
    due_ms = SystemClock().now_ms() + 10 * DAY_MS
    plan = pending_load(settings, "lookup", messages, value_bytes, due_ms=(due_ms, due_ms))
    with running_pipeline(settings):
        run_load(settings, plan)
        started_s = time.monotonic()
        blocks = _wait_until_indexed(settings, due_ms)
        indexed_s = round(time.monotonic() - started_s, 1)
        progress(f"indexed in {indexed_s} s, looking up {times} messages in each way ...")
        # The same in each run.
        drawn = random.Random(17).sample(range(messages), min(messages, 3 * times))  # noqa: S311 (no secret)
        ids = [MessageId(due_ms=due_ms, unique=f"lookup-{number}") for number in drawn]
        unknown = [MessageId(due_ms=due_ms, unique=f"none-{number}") for number in range(times)]
        asked = _ask_all(settings, ids, unknown)
    return {"messages": messages, "indexed_s": indexed_s, "blocks": blocks, **asked}


def _wait_until_indexed(settings: Settings, due_ms: int) -> int:
    """Wait until all records but the tail are indexed; return the number of index blocks."""
    slot, names = settings.wheel.place(due_ms, SystemClock().now_ms()), TopicNames(settings)
    place = names.wheel(slot.level), settings.wheel.partitions_of(slot)[0]
    with (
        closing(Offsets(settings)) as offsets,
        RangeReader(settings, group=names.index_group) as reader,
    ):
        deadline_s = time.monotonic() + INDEX_TIMEOUT_S
        while time.monotonic() < deadline_s:
            blocks = IndexReader(reader).directory(place).blocks
            if offsets.ends([place])[place] - (blocks[-1].end if blocks else 0) < MIN_RECORDS:
                return len(blocks)
            time.sleep(1.0)
    raise KafkaError(f"the slot is not indexed after {INDEX_TIMEOUT_S:.0f} s: see the log")


def _ask_all(settings: Settings, ids: list[MessageId], unknown: list[MessageId]) -> Figures:
    """Return the number of wrong answers, and the latencies of each kind of question."""
    # Fewer are rescheduled: each takes a producer of its own.
    pending, cancelled, moved = ids[::3], ids[1::3], ids[2::12]
    clock, figures = SystemClock(), Figures(wrong=0)

    def move(identity: MessageId) -> bool:
        later = timedelta(days=30)
        return reschedule(str(identity), in_=later, settings=settings, clock=clock) == str(identity)

    with closing(open_reader(settings)) as reader:

        def is_cancelled(identity: MessageId) -> bool | None:
            """None if the message is not found."""
            found = reader.find(identity, clock.now_ms())
            return found.cancelled if found else None

        questions: list[tuple[str, Callable[[MessageId], object], object, list[MessageId]]] = [
            ("find", is_cancelled, False, pending),
            ("unknown", is_cancelled, None, unknown),
            ("cancel", partial(cancel_and_confirm, settings=settings), None, cancelled),
            ("cancelled", is_cancelled, True, cancelled),
            ("reschedule", move, False, moved),
            # The first of those rescheduled have been taken in by now.
            ("moved", is_cancelled, True, moved[: len(moved) // 2]),
        ]
        for name, ask, right, asked in questions:
            took_ms = []
            for each in asked:
                started_s = time.monotonic()
                try:
                    is_wrong = ask(each) is not right
                except DuetimeError as error:
                    progress(f"wrong answer: {error}")
                    is_wrong = True
                took_ms.append(round((time.monotonic() - started_s) * 1_000))
                figures["wrong"] += is_wrong
            figures |= percentiles(took_ms, ("p50", "p99", "max"), f"{name}_")
    return figures


# lateness --stuck

#: A few messages for the stuck destination, messages a second and delays in ms: a fifth are due at
#: once, the others in lanes and in the wheel. Delivery is given up within seconds.
STUCK_RATE, STUCK_DELAY_MS = 2, (-2_000, 8_000)
STUCK_RETRIES: dict[str, Any] = {"max_delivery_attempts": 3, "retry_backoff_ms": 500}

#: How long the last of them may take to become a dead letter, in seconds.
STUCK_GRACE_S = 60.0

#: Topic settings under which a broker refuses each timestamp outside its own millisecond.
REFUSING = {"message.timestamp.type": "CreateTime", "message.timestamp.before.max.ms": "0"}

#: The second node: it leads only the destination that loses its leader.
SECOND = 2

#: When it dies under load, in seconds from the start of the load.
DEATH_S = 10.0


def lateness_beside_stuck(mode: str, plan: LoadPlan, warm_up_s: float) -> Figures:
    """Send the plan to one topic, and a few messages to a destination that takes nothing.

    `mode` is why: `leaderless`, `refusing` or `missing`; or its broker is `dying` under the load,
    and comes back after it. Raises SetupError.
    """
    with _two_brokers() as (settings, second), running_pipeline(settings):
        deliver_before(settings, plan, warm_up_s)
        topic = _stuck_destination(settings, second, mode)
        # A topic that is missing or leaderless takes none.
        arrived = Appends(settings, [topic] if mode in {"refusing", "dying"} else [])
        time.sleep(DISCOVERY_S)
        if mode == "dying":
            threading.Timer(DISCOVERY_S + DEATH_S, second.kill).start()
        options = {"delay_ms": STUCK_DELAY_MS, "destinations": (topic,), "label": "stuck"}
        stuck = LoadPlan.steady(STUCK_RATE, plan.messages / plan.rate, **options)
        with start_load(settings, stuck) as load:
            figures, _ = measured(settings, plan, "others")
            load()
        if mode == "dying":
            second.start()
        progress("waiting until all messages for the stuck destination are dead letters ...")

        def reasons() -> Counter[str]:
            found = DeadLetters(settings).select(DeadLetterFilter(topic=topic))
            return Counter(each.reason.replace("-", "_") for each in found)

        wait_until(lambda: reasons().total() + arrived.count() >= stuck.messages, STUCK_GRACE_S)
        dead = reasons()
        # Records are delivered that arrive within their own millisecond.
        counts = {"sent": stuck.messages, "dead": dead.total(), "delivered": arrived.count()}
        return figures | {f"stuck_{name}": count for name, count in (counts | dead).items()}


@contextmanager
def _two_brokers() -> Iterator[tuple[Settings, LocalBroker]]:
    """A temporary cluster: a node with all topics, and a second one that is not started."""
    with scratch() as directory:
        nodes = Node(properties=BROKER), Node(is_controller=False)
        first, second = new_cluster(directory, nodes)
        with first, open_testbed(None, brokers=Brokers([first]), **STUCK_RETRIES) as settings:
            try:
                yield settings, second
            finally:
                second.kill()


def _stuck_destination(settings: Settings, second: LocalBroker, mode: str) -> str:
    topic, admin = destination(settings, "stuck"), AdminClient(librdkafka_properties(settings))

    def is_leaderless() -> bool:
        partition = admin.list_topics(topic, timeout=GRACE_S).topics[topic].partitions.get(0)
        return partition is not None and partition.leader < 0

    if mode == "refusing":
        admin.create_topics([NewTopic(topic, 1, config=REFUSING)])[topic].result()
    elif mode != "missing":
        second.start()
        admin.create_topics([NewTopic(topic, 1, replica_assignment=[[SECOND]])])[topic].result()
    if mode == "leaderless":
        second.kill()
        progress("waiting until the destination has no leader ...")
        wait_until(is_leaderless, math.inf)
    return topic


# outage

#: When the outage begins, and how long the broker is away, in seconds from the start of the load.
#: And the destinations: each broker leads some.
BEGIN_S, AWAY_S, TOPICS = 10.0, 30.0, 6

#: The interval at which leaders are asked for, in seconds.
POLL_S = 0.2


def outage(  # noqa: PLR0913 (the options of a command)
    kafka: str | None,
    *,
    outage: Outage,
    brokers: int,
    rate: float,
    seconds: float,
    delay: str,
    warm_up: float,
) -> Figures:
    """Send a steady load to several topics, and take one of the brokers away meanwhile.

    The lateness is of messages that were due outside of the broker's *failover*: from its end until
    the cluster has named other leaders. That of the others has the prefix. Raises SetupError.
    """
    if kafka:
        raise typer.BadParameter("an outage needs temporary brokers: leave out --kafka")
    plan = LoadPlan.steady(rate, seconds, delay_ms=parse_range(delay))
    with (
        open_brokers(brokers, outage) as cluster,
        open_testbed(None, brokers=cluster) as settings,
        running_pipeline(settings),
    ):
        deliver_before(settings, plan, warm_up, TOPICS)
        failover_ms = list[int]()
        away = threading.Thread(target=_take_away, args=(cluster, settings, failover_ms))
        away.start()
        figures, arrivals = measured(settings, plan, "run", TOPICS)
        away.join()
    begun_ms, ended_ms = failover_ms
    during, others = list[int](), list[int]()
    for each in arrivals:
        (during if begun_ms <= each.due_ms < ended_ms else others).append(each.late_ms)
    return {
        **figures,
        **percentiles(others),
        "failover_s": round((ended_ms - begun_ms) / 1_000, 1),
        **percentiles(during, ("p50", "max"), "failover_"),
    }


def _take_away(cluster: Brokers, settings: Settings, failover_ms: list[int]) -> None:
    """Take the first broker away for a while; append when its failover began and ended."""
    clock, admin = SystemClock(), AdminClient(librdkafka_properties(settings))
    time.sleep(DISCOVERY_S + BEGIN_S)
    failover_ms.append(clock.now_ms())
    cluster.begin_outage(0)

    def leaders() -> set[int]:
        with suppress(KafkaException):
            topics = admin.list_topics(timeout=1).topics.values()
            return {part.leader for topic in topics for part in topic.partitions.values()}
        return set()

    wait_until(lambda: (found := leaders()) and not found & {1, -1}, AWAY_S, POLL_S)
    failover_ms.append(clock.now_ms())
    time.sleep(max(0.0, AWAY_S - (failover_ms[1] - failover_ms[0]) / 1_000))
    cluster.end_outage(0)
