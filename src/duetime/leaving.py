"""Leaving a consumer group without the rebalance that `Consumer.close` may wait for in vain."""

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer

#: How long giving back its partitions may take, in seconds; it is a matter of milliseconds.
GIVE_BACK_S = 10.0

#: How long one look is whether they are given back, in seconds, and the records that it passes.
LOOK_S, BATCH = 0.02, 10_000


def leave(consumer: Consumer, *, is_static: bool = False) -> None:
    """Give back its partitions and close it; its callbacks are called in here. Safe to repeat.

    `close` alone answers a rebalance that nobody has heard of yet while the client ends. Where the
    answer comes too late, it is waited for without end, and confluent-kafka holds the interpreter's
    lock there: nothing in the process goes on. So what there is to hear is heard before. A static
    member (KIP-345) keeps its partitions. Source: librdkafka's issues 4041, 4527 and 4884.
    """
    if _is_closed(consumer):
        return
    try:
        if not is_static:
            consumer.unsubscribe()
        _hear(consumer, is_static=is_static)
    finally:
        consumer.close()


def is_static_member(properties: Mapping[str, Any]) -> bool:
    """Whether these properties of librdkafka make a static member of the group."""
    return bool(properties.get("group.instance.id"))


def _is_closed(consumer: Consumer) -> bool:
    # It has no other way to say so; what a callback raises later is not mistaken for it.
    try:
        consumer.assignment()
    except RuntimeError:
        return True
    return False


def _hear(consumer: Consumer, *, is_static: bool) -> None:
    until_s = time.monotonic() + GIVE_BACK_S
    while time.monotonic() < until_s:
        # What is read on the way is committed by nobody.
        passed = consumer.consume(BATCH, LOOK_S)
        if len(passed) < BATCH and (is_static or not consumer.assignment()):
            return
