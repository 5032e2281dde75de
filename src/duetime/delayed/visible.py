"""Making delayed topics visible: what is sent to `orders.delayed` appears on `orders` at its time.

Same partition, key, value and headers, in the order of (deliverAfter, offset): one reader a topic
takes what is due from the index and gives it to one producer, which keeps the order. It is not on
the way of the lanes and windows, which are many tasks, each as late as it is: of 40,000 messages
that were due at 2,000/s they had 1,200 out of order, by up to 92 ms.

Each once: with its position the reader commits where its destination ended. What was appended there
since then is read back at a start, and not sent again: no transactions, and plain readers see each
record once.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from confluent_kafka import TopicPartition

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.delayed.consumer import DelayedConsumer
from duetime.delayed.forwarding import Forwarding
from duetime.errors import Paused, words
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How long a producer tries to deliver a record, in ms: less than it takes others to lead.
DELIVERY_TIMEOUT_MS = 5_000

#: After something has failed, what was handed to the producer may still arrive for this long.
REST_S = DELIVERY_TIMEOUT_MS / 1_000 + 1.0

#: Who stood still for so long, in seconds, may have been replaced: it looks again before it sends.
PAUSE_S = 4.0

#: How often is looked whether we may send, while we may not, in seconds.
LEASE_LOOK_S = 0.1

#: How often the position is committed, in seconds: what is under way has to arrive first, which
#: holds up what is due then by some ms; and what was sent since is read back at a start.
COMMIT_S = 5.0

#: How long one wait for a record is, in seconds, and how many are taken at a time.
WAIT_S = 0.2
AT_ONCE = 500


class Visible:
    """Makes one delayed topic visible, in a thread of its own, until it is closed."""

    def __init__(self, settings: Settings, topic: str, may_send: Callable[[], bool]) -> None:
        """`may_send` says whether the process holds the leader's lease at this instant."""
        self._settings = settings
        self._topic = topic
        self._may_send = may_send
        self._closing = threading.Event()
        #: When it was last known that no other has taken over, by the monotonic clock.
        self._looked_s = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"visible {topic}", daemon=True)

    def start(self) -> None:
        """Begin, where the last one ended."""
        self._thread.start()

    def close(self) -> None:
        """Let what is under way arrive, and stop. Safe to repeat."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        while not self._closing.is_set():
            if not self._may_send():
                # To join would take the partitions from whoever leads by now.
                self._closing.wait(LEASE_LOOK_S)
                continue
            try:
                self._forward()
            except Exception as error:  # noqa: BLE001 (whatever it was, it is tried again)
                log.warning(
                    "delayed topic is read again topic=%s error=%s", self._topic, words(error)
                )
                self._closing.wait(REST_S)

    def _forward(self) -> None:
        """Forward until something fails: then what has arrived is found by reading it back."""
        with (
            Forwarding(self._settings, self._topic, DELIVERY_TIMEOUT_MS) as forwarding,
            # Closed first: what it hands over is committed.
            DelayedConsumer(self._properties()) as consumer,
        ):
            consumer.subscribe(
                [self._topic],
                on_assign=lambda _, places: self._begin(forwarding, consumer, places),
                on_revoke=lambda _, __: forwarding.hand_over(consumer),
                on_lost=lambda _, __: forwarding.abandon(),
            )
            try:
                self._follow(forwarding, consumer)
            except Exception as error:
                # What was taken and not sent is behind the consumer's position.
                forwarding.give_up(words(error))
                if isinstance(error, Paused):
                    # Before the consumer leaves its group, which takes a while.
                    forwarding.abandon()
                raise

    def _begin(
        self, forwarding: Forwarding, consumer: DelayedConsumer, places: list[TopicPartition]
    ) -> None:
        forwarding.begin(consumer, places)
        # It has committed, and so the partitions are ours, however long reading them took.
        self._looked_s = time.monotonic()

    def _follow(self, forwarding: Forwarding, consumer: DelayedConsumer) -> None:
        self._looked_s = committed_s = time.monotonic()
        while not self._closing.is_set():
            messages = consumer.consume(AT_ONCE, WAIT_S)
            self._look()
            for message in messages:
                self._look()
                forwarding.forward(message)
            forwarding.check()
            if self._looked_s - committed_s >= COMMIT_S:
                committed_s = self._looked_s
                forwarding.commit(consumer)

    def _look(self) -> None:
        """Raise Paused where others may send: last before each record is handed over."""
        if not self._may_send():
            raise Paused("the lead is lost: whoever leads next sends what is not sent yet")
        now_s = time.monotonic()
        if now_s - self._looked_s > PAUSE_S:
            raise Paused("stood still for so long that others may have taken over")
        self._looked_s = now_s

    def _properties(self) -> Mapping[str, object]:
        own: dict[str, str | int | float | bool] = {
            "group.id": TopicNames(self._settings).visible_group(self._topic),
            # One member: a new leader's takes the place of the last one's at once.
            "group.instance.id": "leader",
            "enable.auto.commit": False,
            "delayed.delivery.max.ms": self._settings.delayed_topics[self._topic].max_ms,
        }
        return librdkafka_properties(self._settings) | own
