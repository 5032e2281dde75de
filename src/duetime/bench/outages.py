"""Lateness while a destination takes nothing, or while a broker is away.

stuck    another destination has no leader, refuses what it gets, or is missing
outage   one of the brokers is killed, or cut off from all networks, and comes back
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.bench.delivery import DISCOVERY_S, GRACE_S, deliver_before, measured, running_pipeline
from duetime.bench.loadgen import LoadPlan, parse_range, start_load
from duetime.bench.testbed import (
    BROKER,
    Appends,
    Brokers,
    Figures,
    Outage,
    destination,
    open_brokers,
    open_testbed,
    percentiles,
    progress,
    scratch,
)
from duetime.client.dead_letters import DeadLetterFilter, DeadLetters
from duetime.core.clock import SystemClock
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.kafka.connection import librdkafka_properties
from duetime.local.broker import LocalBroker
from duetime.local.cluster import Node, new_cluster

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
