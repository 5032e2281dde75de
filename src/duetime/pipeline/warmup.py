"""Warming up: messages of our own, through every path, until they are punctual.

A JVM that has just started is a hundred times slower than a warm one: the first windows of real
messages would be seconds late. So turns are drilled until planning one is compiled code, and then
the pipeline says that it is ready only when messages of its own, sent to a topic of its own, arrive
on time.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import Message

from duetime.clock import Clock
from duetime.config import Settings
from duetime.message import DUE_AT_MS, DUE_ID, DUE_PARTITION, DUE_STATE, DUE_TOPIC, MessageId
from duetime.pipeline.own import ARRIVALS, DRILLED, OwnMessages
from duetime.stores import OffsetRange

log = logging.getLogger(__name__)

#: The part of the time for turns that are drilled: planning one takes a fifth after a few dozen.
DRILL_SHARE = 1 / 4

#: How many are drilled at once, as windows overlap too.
DRILLS = 2

#: Messages of a drilled turn.
DRILL = 20

#: Messages a second of the stream, half of them through the lanes, half through the wheel.
RATE = 3_000

#: How often some of the stream are sent, in seconds.
TICK_S = 0.1

#: A second is punctual when 99 of 100 messages that were due in it are at most this late, in ms.
PUNCTUAL_MS = 50

#: So many seconds in a row have to be.
PUNCTUAL_S = 3


class WarmUp:
    """Warms one pipeline up, once."""

    def __init__(self, settings: Settings, clock: Clock, stopping: threading.Event) -> None:
        self._settings = settings
        self._own = OwnMessages(settings)
        self._clock = clock
        self._stopping = stopping
        self._began_s = time.monotonic()

    def drill(
        self,
        turn: Callable[[Sequence[OffsetRange]], None],
        until: threading.Event | None = None,
    ) -> None:
        """Take the same small turn again and again, or return when it is to stop.

        With `until`, which says that something else is to be done now, for as long as there is.
        """
        ends = [self._stopping] if until is None else [self._stopping, until]
        ranges = [self._drilled_range()]
        until_s = self._until_s(DRILL_SHARE if until is None else 1)

        def again(_: int) -> int:
            turns = 0
            while time.monotonic() < until_s and not any(each.is_set() for each in ends):
                turn(ranges)
                turns += 1
            return turns

        with ThreadPoolExecutor(DRILLS) as pool:
            log.info("warming up turns=%d", sum(pool.map(again, range(DRILLS))))

    def until_punctual(self) -> None:
        """Send a steady stream until what arrives is punctual, or it is to stop."""
        consumer = self._own.consumer()
        arrived = Punctuality(self._clock.now_ms())
        until_s = self._until_s(1)
        try:
            while not self._stopping.wait(TICK_S):
                self._send_some()
                for message in consumer.consume(RATE, timeout=0):
                    arrived.count(message)
                if arrived.is_reached(self._clock.now_ms()):
                    return
                if time.monotonic() > until_s:
                    log.warning(
                        "not punctual after the warm-up: the machine is busy, or Kafka slow"
                    )
                    return
        finally:
            consumer.close()

    def _until_s(self, share: float) -> float:
        return self._began_s + share * self._settings.warm_up_seconds

    def _send_some(self) -> None:
        now_ms = self._clock.now_ms()
        for number in range(int(RATE * TICK_S)):
            due_ms = now_ms + _delay_ms(number, self._settings)
            self._own.send(due_ms, b"warm-up " * 16, key=str(number % 100))

    def _drilled_range(self) -> OffsetRange:
        """Records as they wait in the wheel, due long ago, for turns to read."""
        offsets: list[int] = []
        for number in range(DRILL):
            identity = MessageId(due_ms=number, unique="warm-up")
            self._own.producer.produce(
                self._own.topic,
                value=b"warm-up " * 16,
                partition=DRILLED,
                headers=[
                    (DUE_TOPIC, self._own.topic),
                    (DUE_PARTITION, str(ARRIVALS)),
                    (DUE_STATE, None),
                    (DUE_AT_MS, str(identity.due_ms)),
                    (DUE_ID, str(identity)),
                ],
                on_delivery=lambda _, message: offsets.append(message.offset() or 0),
            )
        self._own.producer.flush()
        return OffsetRange(self._own.topic, DRILLED, min(offsets), max(offsets) + 1)


class Punctuality:
    """How late messages arrive, by the second in which they were due."""

    def __init__(self, since_ms: int) -> None:
        self._since_ms = since_ms
        self._late_ms: dict[int, list[int]] = defaultdict(list)

    def count(self, message: Message) -> None:
        """Note an arrival; what an interrupted warm-up left behind was due earlier."""
        due_ms = int(dict(message.headers() or ()).get(DUE_AT_MS) or 0)
        if not message.error() and due_ms >= self._since_ms:
            self._late_ms[due_ms // 1_000].append(message.timestamp()[1] - due_ms)

    def is_reached(self, now_ms: int) -> bool:
        """Whether the last PUNCTUAL_S seconds that are over were punctual and had all messages."""
        over = now_ms // 1_000 - 1
        return all(self._is_punctual(over - ago) for ago in range(PUNCTUAL_S))

    def _is_punctual(self, second: int) -> bool:
        late_ms = sorted(self._late_ms.get(second, ()))
        # On a busy machine the stream may not keep its rate.
        return len(late_ms) > RATE // 2 and late_ms[len(late_ms) * 99 // 100] <= PUNCTUAL_MS


def _delay_ms(number: int, settings: Settings) -> int:
    # The lanes' delays, and those that just miss them.
    share = number * 1_000 // int(RATE * TICK_S)
    return share + (500 if number % 2 else settings.horizon_ms + 500)
