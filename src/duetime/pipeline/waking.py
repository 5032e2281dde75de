"""Wakes the tracker when its next message is overdue, so that it may sleep until then.

A streaming query that waits for the clock would make a batch each second, whether anything happens
or not: half a core for queues that nobody uses. So Spark is told to make batches of records only,
and one is written, to a topic of our own that the query reads, when a deadline is reached.
"""

import logging
import threading
from collections.abc import Mapping

from confluent_kafka import KafkaException, Producer

from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.stores.places import Place
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: What was not answered by a batch is asked for again after this, in ms: the query may be down.
AGAIN_MS = 5_000

#: The tracker is woken this often whatever is known, in ms: a deadline that could not be noted
#: before a crash is found then.
SELDOM_MS = 30_000


class Waking:
    """Knows the next deadline of each partition, and wakes the query then. Thread-safe."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._topic = TopicNames(settings).wake
        self._producer = Producer(librdkafka_properties(settings) | {"linger.ms": 0})
        self._next_ms: dict[Place, int] = {}
        self._woken_ms = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="waking", daemon=True)

    def start(self) -> None:
        """Begin, with a first wake: what is overdue already is not waited for."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def expect(self, next_ms: Mapping[Place, int | None]) -> None:
        """Wake when something is overdue in these partitions, in epoch ms; None for never."""
        with self._changed:
            for place, at_ms in next_ms.items():
                if at_ms is None:
                    self._next_ms.pop(place, None)
                else:
                    self._next_ms[place] = at_ms
            self._changed.notify()

    def _keep(self) -> None:
        while self._wait():
            try:
                self._wake()
            except (KafkaException, BufferError) as error:
                log.warning("could not wake the tracker; trying again error=%s", error)

    def _wait(self) -> bool:
        """Wait until it is time; false if that is to end."""
        with self._changed:
            while not self._closing and (left_ms := self._left_ms()) > 0:
                self._changed.wait(left_ms / 1_000)
            self._woken_ms = self._clock.now_ms()
            return not self._closing

    def _left_ms(self) -> int:
        """How long until it is time."""
        now_ms = self._clock.now_ms()
        # A clock that was set back has not come to the last wake yet.
        self._woken_ms = min(self._woken_ms, now_ms)
        seldom_ms = self._woken_ms + SELDOM_MS
        next_ms = min(self._next_ms.values(), default=seldom_ms)
        # One that was reached before the last wake is heard of soon, or else asked for again.
        again_ms = self._woken_ms + AGAIN_MS if next_ms <= self._woken_ms else next_ms
        return min(again_ms, seldom_ms) - now_ms

    def _wake(self) -> None:
        # Any record does.
        self._producer.produce(self._topic)
        self._producer.poll(0)
