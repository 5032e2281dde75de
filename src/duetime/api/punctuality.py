"""How late a message would be that was sent now: two of the API's own at each look.

One goes through the lanes and one through the store, by the way that everybody's take, to a topic
of duetime's where the broker stamps them. They are sent only while somebody looks, and a pipeline
delivers.
"""

import logging
import uuid
from collections import deque
from statistics import quantiles

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from duetime.api.models import Lateness
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import words
from duetime.message import DUE_ID, MessageId
from duetime.pipeline.own import OwnMessages
from duetime.stores.records import headers_of

log = logging.getLogger(__name__)

#: How long before they are due, in ms: well within the lanes; and beyond the horizon by as much.
AHEAD_MS = 500

#: What is told is of the last minute, and what has not come for so long is given up; in ms.
KEPT_MS = 60_000

#: How long Kafka may take to acknowledge them, in seconds.
ACKNOWLEDGE_S = 1.0

#: Which of the two waits in the store.
STORE = 1

#: At most so many are taken at a time: others' arrive there, too.
TAKEN = 1_000


class Punctuality:
    """Sends, and reads what has arrived. Blocks for some ms; one thread at a time."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._own = OwnMessages(settings)
        self._delays_ms = AHEAD_MS, settings.horizon_ms + AHEAD_MS
        self._run = uuid.uuid4().hex[:12]
        self._consumer: Consumer | None = None
        #: When each is due that has not come, by its id.
        self._waiting: dict[str, int] = {}
        #: When each was due that has, and how late it came.
        self._late_ms: deque[tuple[int, int]] = deque()
        #: How many Kafka has, and how many of them have left the store.
        self.sent = self.released = 0

    def look(self) -> Lateness | None:
        """What has come in the last minute; None where it cannot be read."""
        try:
            # From now on, before the first is sent.
            self._consumer = self._consumer or self._own.consumer()
            for record in self._consumer.consume(TAKEN, timeout=0):
                if not record.error():
                    self._arrived(record)
            # While Kafka takes none, none is sent: it would be late by its own fault.
            if not self._own.producer.flush(0):
                self._send()
                self._own.producer.flush(ACKNOWLEDGE_S)
        except (KafkaException, BufferError) as error:
            log.warning("own messages cannot be sent or read error=%s", words(error))
            return None
        return self._seen(self._clock.now_ms())

    def close(self) -> None:
        """Close the connections."""
        if self._consumer:
            self._consumer.close()

    def _send(self) -> None:
        now_ms = self._clock.now_ms()
        for number, delay_ms in enumerate(self._delays_ms):
            unique = f"look-{self._run}.{number}.{now_ms}"
            identity = MessageId(due_ms=now_ms + delay_ms, unique=unique)
            self._waiting[str(identity)] = identity.due_ms
            self._own.send(identity.due_ms, b"look", unique=unique, on_delivery=self._taken)

    def _taken(self, error: KafkaError | None, _: Message) -> None:
        self.sent += error is None

    def _arrived(self, record: Message) -> None:
        name = (dict(headers_of(record)).get(DUE_ID) or b"").decode()
        if (due_ms := self._waiting.pop(name, None)) is not None:
            self._late_ms.append((due_ms, record.timestamp()[1] - due_ms))
            self.released += f"-{self._run}.{STORE}." in name

    def _seen(self, now_ms: int) -> Lateness:
        while self._late_ms and self._late_ms[0][0] < now_ms - KEPT_MS:
            self._late_ms.popleft()
        self._waiting = {
            name: due_ms for name, due_ms in self._waiting.items() if due_ms > now_ms - KEPT_MS
        }
        late_ms = sorted(late for _, late in self._late_ms)
        parts = quantiles(late_ms, n=100, method="inclusive") if len(late_ms) > 1 else late_ms * 99
        return Lateness(
            samples=len(late_ms),
            p50_ms=round(parts[49]) if parts else None,
            p99_ms=round(parts[98]) if parts else None,
            max_ms=late_ms[-1] if late_ms else None,
            overdue_ms=max(0, now_ms - min(self._waiting.values(), default=now_ms)),
        )
