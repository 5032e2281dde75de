"""The transactional sink: what is due is delivered in Kafka's transactions (KIP-98, KIP-447).

Off by default (`transactional_delivery`). Spark's sink has no transactions, so what is due goes to
`duetime.sending`, and from there on by one producer with a transactional id. A transaction has the
messages of a batch and the offset behind them: either all of it counts, or nothing does. Whoever
begins to forward fences off whoever did before: brokers refuse a request of an earlier one,
also one that a kernel has kept for minutes while the network was away.

Such a request may still bring a message to `duetime.sending` a second time. What is forwarded again
within KEPT_S is left out, by its id.

A record that is refused ends the transaction. It is done again, and what is for the same
topic goes to `duetime.isolated` instead, where each record is sent by itself.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime import metrics
from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError, words
from duetime.message import DUE_ID, DUE_PARTITION, DUE_TOPIC, UNDELIVERED_HEADERS
from duetime.producing import enqueue
from duetime.stores.records import headers_of
from duetime.topics import OVERHEAD_BYTES, TopicNames

log = logging.getLogger(__name__)

#: How long a message's id is remembered, in seconds: for longer than Linux sends what a connection
#: has taken that was closed since (some 100 s), and a producer tries.
KEPT_S = 120.0

#: The most messages of a transaction, and how long one waits for the first of them, in seconds.
BATCH, WAIT_S = 2_000, 0.2

#: How long a record may take, in seconds: others wait for it, and it is sent by itself then.
DELIVERY_S = 5.0

#: How long a coordinator may take, in seconds. It ends by itself a transaction that was left open
#: for as long.
TIMEOUT_S = 10.0

#: What the client says of a record that no broker has taken or refused.
TIMED_OUT = BrokerError._MSG_TIMED_OUT  # noqa: SLF001 (its public name)

#: How long after a failure it is begun again, in seconds.
REST_S = 1.0

#: How often it is looked whether we lead, or what may be freed, in seconds.
LOOK_S, FREE_S = 0.1, 60.0

#: How long the batch that is under way may take when it is to end, in seconds.
LEAVE_S = DELIVERY_S + TIMEOUT_S


class TransactionalDelivery:
    """Forwards what is there in a thread of its own, while this process leads. Start it once."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        holds_lease: Callable[[], bool],
        isolate: Callable[[str], None],
        free: Callable[[int], None],
    ) -> None:
        """`isolate` hears of topics that have refused a record, `free` up to where all is sent."""
        self._settings, self._clock = settings, clock
        self._holds_lease, self._isolate, self._free = holds_lease, isolate, free
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="transactions", daemon=True)

    def start(self) -> None:
        """Begin, where the last one ended. Where it is switched off, what was left is sent."""
        self._thread.start()

    def close(self) -> None:
        """End, once what is there is sent. Safe to repeat."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            if not self._holds_lease():
                # To begin would fence off whoever leads by now.
                self._stopping.wait(LOOK_S)
                continue
            try:
                with Forwarder(self._settings, self._clock, self._isolate) as forwarder:
                    if not self._settings.transactional_delivery and not forwarder.is_behind():
                        return
                    self._forward(forwarder)
            except Exception as error:  # noqa: BLE001 (whatever it was, it is begun again)
                log.warning("transactions begin again error=%s", words(error))
                self._stopping.wait(REST_S)

    def _forward(self, forwarder: "Forwarder") -> None:
        forwarder.begin()
        free_s = time.monotonic() + FREE_S
        while forwarder.forward() or not self._stopping.is_set():
            if time.monotonic() > free_s:
                free_s = time.monotonic() + FREE_S
                self._free(forwarder.position)


class Forwarder:
    """Forwards batches until one fails. Not thread-safe."""

    def __init__(
        self, settings: Settings, clock: Clock, isolate: Callable[[str], None] = lambda _: None
    ) -> None:
        names = TopicNames(settings)
        self._sending, self._isolated = names.sending, names.isolated
        self._clock, self._isolate = clock, isolate
        shared = librdkafka_properties(settings)
        self._producer = Producer(
            shared
            | {
                "transactional.id": names.sending,
                "transaction.timeout.ms": int(TIMEOUT_S * 1_000),
                "delivery.timeout.ms": int(DELIVERY_S * 1_000),
                "linger.ms": 0,
                # While the last transaction is being ended, brokers ask to try again.
                "retry.backoff.ms": 5,
                "retry.backoff.max.ms": 100,
                # As Kafka's Java producer places a key.
                "partitioner": "murmur2_random",
                "message.max.bytes": settings.max_message_bytes + 4 * OVERHEAD_BYTES,
                "allow.auto.create.topics": False,
            }
        )
        self._consumer = Consumer(
            shared
            | {
                "group.id": names.sending,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
            }
        )
        #: When each message was forwarded, by its id, by the monotonic clock; the oldest first.
        self._forwarded: dict[bytes, float] = {}
        #: Up to where everything is forwarded, and where the topic ended when it was looked.
        self.position = self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.purge()
        self._consumer.close()

    def is_behind(self) -> bool:
        """Whether there is anything to forward. Raises KafkaException."""
        self._locate()
        return self.position < self._end

    def _locate(self) -> None:
        place = TopicPartition(self._sending, 0)
        start, self._end = self._consumer.get_watermark_offsets(place, timeout=TIMEOUT_S)
        (committed,) = self._consumer.committed([place], timeout=TIMEOUT_S)
        self.position = min(max(start, committed.offset), self._end)

    def begin(self) -> None:
        """Fence off whoever forwards still, and go on where the last transaction ended.

        Raises KafkaException, KafkaError.
        """
        self._producer.init_transactions(TIMEOUT_S)
        self._locate()
        since_ms = max(0, self._clock.now_ms() - int(KEPT_S * 1_000))
        kept = [TopicPartition(self._sending, 0, since_ms)]
        (first,) = self._consumer.offsets_for_times(kept, timeout=TIMEOUT_S)
        first_kept = first.offset if first.offset >= 0 else self._end
        self._consumer.assign([TopicPartition(self._sending, 0, min(first_kept, self.position))])
        self._remember(self.position)

    def _remember(self, end: int) -> None:
        """Read again what was forwarded within KEPT_S, up to this offset."""
        begun_s, (at,) = time.monotonic(), self._consumer.assignment()
        seen = at.offset
        until_s = begun_s + TIMEOUT_S
        while seen < end:
            records = self._consumer.consume(min(BATCH, end - seen), 1.0)
            for each in records:
                self._check(each)
                self._forwarded[_id(each)] = begun_s
                seen = (each.offset() or 0) + 1
            if records:
                until_s = time.monotonic() + TIMEOUT_S
            elif time.monotonic() > until_s:
                raise KafkaError(f"topic {self._sending} could not be read: is the broker up?")

    def forward(self) -> bool:
        """Forward the next batch; whether there was one. Raises KafkaException, KafkaError."""
        first = self._consumer.poll(WAIT_S)
        if first is None:
            return False
        records = [first, *self._consumer.consume(BATCH - 1, 0)]
        for each in records:
            self._check(each)
        new = self._new(records)
        alone = set[str]()
        while refused := self._transaction(new, alone, (records[-1].offset() or 0) + 1):
            if self._isolated in refused:
                raise KafkaError(f"topic {self._isolated} takes no records: see its brokers")
            alone |= refused
            for topic in refused:
                self._isolate(topic)
        self.position = (records[-1].offset() or 0) + 1
        metrics.DELIVERED.labels("").inc(sum(_topic(each) not in alone for each in new))
        return True

    def _new(self, records: Sequence[Message]) -> list[Message]:
        """Those that were not forwarded within KEPT_S; they are noted."""
        now_s = time.monotonic()
        while self._forwarded:
            oldest = next(iter(self._forwarded))
            if now_s - self._forwarded[oldest] <= KEPT_S:
                break
            del self._forwarded[oldest]
        new = []
        for each in records:
            name = _id(each)
            if name not in self._forwarded:
                self._forwarded[name] = now_s
                new.append(each)
        return new

    def _transaction(self, records: Sequence[Message], alone: set[str], end: int) -> set[str]:
        """Send these and the offset behind them; those for topics `alone`, to be isolated.

        Returns the topics that have refused one: nothing is sent then.
        """
        self._producer.begin_transaction()
        if refused := self._sent(records, alone):
            self._producer.abort_transaction(TIMEOUT_S)
            return refused
        self._producer.send_offsets_to_transaction(
            [TopicPartition(self._sending, 0, end)],
            self._consumer.consumer_group_metadata(),
            TIMEOUT_S,
        )
        self._producer.commit_transaction(TIMEOUT_S)
        return set()

    def _sent(self, records: Sequence[Message], alone: set[str]) -> set[str]:
        """Hand them over, and wait for each; the topics that have refused one.

        Raises KafkaError where nothing was taken in time: then it is the cluster that fails.
        """
        refused, taken = dict[str, BrokerError](), set[str]()

        def note(topic: str, error: BrokerError | None, _record: Message | None) -> None:
            if error is None:
                taken.add(topic)
            else:
                refused.setdefault(topic, error)

        for each in records:
            topic = _topic(each)
            to = self._isolated if topic in alone else topic
            headers, partition = headers_of(each), -1
            if to == topic:
                partition = int(dict(headers)[DUE_PARTITION] or -1)
                headers = headers[UNDELIVERED_HEADERS:]
            try:
                enqueue(
                    self._producer,
                    to,
                    value=each.value(),
                    key=each.key(),
                    headers=headers,
                    partition=partition,
                    on_delivery=partial(note, to),
                )
            except KafkaException as failed:
                # Once a record has failed, the producer takes no more.
                if not refused:
                    note(to, failed.args[0], None)
                break
        while len(self._producer) and not refused:
            self._producer.poll(LOOK_S)
        for topic, error in refused.items():
            log.warning("transaction is done again topic=%s error=%s", topic, error.str())
        if any(each.code() == TIMED_OUT for each in refused.values()) and not taken:
            raise KafkaError("no record was acknowledged in time: are the brokers up?")
        return set(refused)

    def _check(self, record: Message) -> None:
        if error := record.error():
            raise KafkaException(error)


def _id(record: Message) -> bytes:
    return dict(headers_of(record)).get(DUE_ID) or b""


def _topic(record: Message) -> str:
    return (dict(headers_of(record)).get(DUE_TOPIC) or b"").decode()
