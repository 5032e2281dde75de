"""How late a message would be that was sent now: two of the API's own at each look.

One goes through the lanes and one through the store, by the way that everybody's take, to a topic
of duetime's where the broker stamps them. They are sent only while somebody looks, and a pipeline
delivers.
"""

import logging
from collections import deque
from statistics import quantiles

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from duetime.api.responses import Lateness
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import words
from duetime.pipeline.own import STORE, Probe, Probes

log = logging.getLogger(__name__)

#: What is told is of the last minute, and what has not come for so long is given up; in ms.
KEPT_MS = 60_000


class Punctuality:
    """Sends, and reads what has arrived. Blocks for some ms; one thread at a time."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._probes = Probes(settings, "look")
        self._consumer: Consumer | None = None
        #: Those that have not come.
        self._waiting: set[Probe] = set()
        #: When each was due that has, and how late it came.
        self._late_ms: deque[tuple[int, int]] = deque()
        #: How many Kafka has, and how many of them have left the store.
        self.sent = self.released = 0

    def look(self) -> Lateness | None:
        """What has come in the last minute; None where it cannot be read."""
        try:
            # From now on, before the first is sent.
            self._consumer = self._consumer or self._probes.consumer()
            for probe, late_ms in self._probes.arrived(self._consumer, timeout_s=0):
                self._arrived(probe, late_ms)
            self._waiting.update(self._probes.send(self._clock.now_ms(), self._taken))
        except (KafkaException, BufferError) as error:
            log.warning("own messages cannot be sent or read error=%s", words(error))
            self.close()
            return None
        return self._seen(self._clock.now_ms())

    def close(self) -> None:
        """Close the connection; another look opens it again."""
        if self._consumer:
            self._consumer.close()
        self._consumer = None

    def _taken(self, _path: str, error: KafkaError | None, _: Message) -> None:
        self.sent += error is None

    def _arrived(self, probe: Probe, late_ms: int) -> None:
        if probe in self._waiting:
            self._waiting.remove(probe)
            self._late_ms.append((probe.due_ms, late_ms))
            self.released += probe.path == STORE

    def _seen(self, now_ms: int) -> Lateness:
        while self._late_ms and self._late_ms[0][0] < now_ms - KEPT_MS:
            self._late_ms.popleft()
        self._waiting = {each for each in self._waiting if each.due_ms > now_ms - KEPT_MS}
        late_ms = sorted(late for _, late in self._late_ms)
        parts = quantiles(late_ms, n=100, method="inclusive") if len(late_ms) > 1 else late_ms * 99
        earliest_ms = min((each.due_ms for each in self._waiting), default=now_ms)
        return Lateness(
            samples=len(late_ms),
            p50_ms=round(parts[49]) if parts else None,
            p99_ms=round(parts[98]) if parts else None,
            max_ms=late_ms[-1] if late_ms else None,
            overdue_ms=max(0, now_ms - earliest_ms),
        )
