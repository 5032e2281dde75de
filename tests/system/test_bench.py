"""Benchmarks as commands, on a real broker."""

import json
import os
import subprocess
import sys

import pytest
from confluent_kafka.admin import AdminClient

pytestmark = pytest.mark.slow

#: The figures of the lateness benchmark.
KEYS = {
    *("sent", "delivered", "lost", "duplicated", "early"),
    *("p50_ms", "p99_ms", "p999_ms", "max_ms", "rate_reached"),
}

#: The figures of the queue benchmark.
QUEUE_KEYS = {
    *("messages", "messages_per_s", "raw_messages_per_s", "ratio"),
    *("lost", "redelivered", "wrongly_redelivered"),
    *("redelivery_lateness_p50_ms", "redelivery_lateness_p99_ms"),
}

#: How late messages may be beside a destination that takes nothing, in ms.
STUCK_P99_MS, STUCK_MAX_MS = 100, 1_500


def bench(broker, *arguments):
    return run("bench", *arguments, "--kafka", broker.bootstrap)


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "duetime", *arguments, "--json"],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        # Lateness is not checked here.
        env=os.environ | {"DUETIME_WARM_UP_SECONDS": "0"},
    )
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


def test_lateness_counts_each_message_and_removes_its_topics(broker):
    result = bench(
        broker,
        "lateness",
        "--rate",
        "200",
        "--seconds",
        "2",
        "--delay",
        "0.5s..6s",
        "--timeline",
        "--warm-up",
        "0",
    )
    assert result.keys() >= KEYS
    assert (result["sent"], result["delivered"]) == (400, 400)
    assert (result["lost"], result["duplicated"], result["early"]) == (0, 0, 0)
    assert sum(second["messages"] for second in result["timeline"]) == 400
    left = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=30).topics
    assert [topic for topic in left if topic.startswith("bench-")] == []


@pytest.mark.hostile
def test_a_kill_under_load_neither_loses_nor_duplicates(broker):
    result = bench(broker, "crash", "--kills", "1", "--rate", "300", "--life", "15s..25s")
    assert (result["kills"], result["delivered"]) == (1, result["sent"])
    assert (result["lost"], result["duplicated"], result["early"]) == (0, 0, 0)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("leaderless", "no_leader"),
        ("missing", "unknown_topic"),
        ("refusing", "refused_by_broker"),
    ],
)
def test_a_destination_that_takes_nothing_delays_no_other(mode, reason):
    """On brokers of its own. The stuck messages are due at once, in lanes and in the wheel."""
    load = ["--rate", "1000", "--seconds", "30", "--delay", "0s..10s", "--warm-up", "60"]
    found = run("bench", "lateness", "--stuck", mode, *load)
    assert (found["sent"], found["delivered"]) == (30_000, 30_000)
    assert (found["lost"], found["duplicated"], found["early"]) == (0, 0, 0)
    assert found["p99_ms"] <= STUCK_P99_MS
    assert found["max_ms"] <= STUCK_MAX_MS
    assert found["stuck_dead"] == found[f"stuck_{reason}"] > 0
    # A broker that refuses timestamps takes one of its own millisecond.
    assert found["stuck_dead"] + found["stuck_delivered"] == found["stuck_sent"]


@pytest.mark.hostile
def test_a_message_due_in_years_walks_the_real_wheel(broker):
    result = bench(broker, "wheel", "--years", "5")
    assert (result["hops"], result["correct"]) == (5, True)


def test_a_delayed_topic_is_read_in_order_and_each_record_once(broker):
    load = ["--rate", "300", "--seconds", "2", "--delay", "0.5s..2s"]
    result = bench(broker, "delayed", *load, "--way", "consumer", "--warm-up", "0.1")
    found = result["consumer"]
    assert (found["sent"], found["delivered"]) == (600, 600)
    assert [found[name] for name in ("lost", "duplicated", "early", "out_of_order")] == [0] * 4
    assert found["index_bytes_per_message"] >= 16


@pytest.mark.hostile
def test_a_queue_redelivers_exactly_the_dropped_messages(broker):
    load = ["--messages", "500", "--rate", "200", "--drop", "0.1", "--timeout", "5s"]
    result = bench(broker, "queue", *load)
    assert result.keys() == QUEUE_KEYS
    assert (result["lost"], result["wrongly_redelivered"]) == (0, 0)
    assert (result["messages"], result["redelivered"]) == (500, 50)
    assert 0 <= result["redelivery_lateness_p50_ms"] <= result["redelivery_lateness_p99_ms"]
