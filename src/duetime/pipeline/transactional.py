"""The transactional sink: what is due is delivered in Kafka's transactions (KIP-98, KIP-447).

Off by default (`transactional_delivery`). Spark's sink has no transactions, so what is due goes to
`duetime.sending`, and from there on by one producer with a transactional id. A transaction has the
messages of a batch and the offset behind them: either all of it counts, or nothing does. Whoever
begins to forward fences off whoever did before: brokers refuse a request of an earlier one,
also one that a kernel has kept for minutes while the network was away.

Such a request may still bring a message to `duetime.sending` a second time. What is forwarded again
within KEPT_S is left out, by its id.

A record that is refused ends the transaction. It is repeated, and what is for the same topic goes
to `duetime.isolated` for a while, where each record is sent by itself. So does a batch that has
failed twice for another reason, and what is no message of duetime's.
"""

import logging
import threading
import time
from collections import OrderedDict
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
from duetime.message import UNDELIVERED_HEADERS
from duetime.producing import enqueue
from duetime.stores.offsets import answer
from duetime.stores.records import Entry, entry, headers_of
from duetime.topics import OVERHEAD_BYTES, TopicNames

log = logging.getLogger(__name__)

#: How long a message's id is remembered, in seconds: for longer than Linux sends what a connection
#: has taken that was closed since (some 100 s), and a producer tries.
KEPT_S = 120.0

#: The most messages of a transaction, and how long one waits for the first of them, in seconds.
BATCH, WAIT_S = 2_000, 0.2

#: How long a record may take, in seconds: others wait for it, and it is sent by itself then. A
#: broker that is gone is replaced after 9 s.
DELIVERY_S = 10.0

#: How long a coordinator may take, in seconds. It ends by itself a transaction that was left open
#: for as long.
TIMEOUT_S = 20.0

#: For how long records for a topic that has refused one are sent by themselves, in seconds.
ALONE_S = 300.0

#: How often a batch is tried in a transaction, where no topic is known to be the cause.
TRIES = 2

#: What the client says of a record that no broker has taken or refused.
TIMED_OUT = BrokerError._MSG_TIMED_OUT  # noqa: SLF001 (its public name)

#: Answers that are about a topic or a record, and not about the transaction.
REFUSALS = frozenset(
    {
        TIMED_OUT,
        BrokerError._UNKNOWN_TOPIC,  # noqa: SLF001 (their public names)
        BrokerError._UNKNOWN_PARTITION,  # noqa: SLF001
        BrokerError.UNKNOWN_TOPIC_OR_PART,
        BrokerError.TOPIC_EXCEPTION,
        BrokerError.TOPIC_AUTHORIZATION_FAILED,
        BrokerError.MSG_SIZE_TOO_LARGE,
        BrokerError.RECORD_LIST_TOO_LARGE,
        BrokerError.INVALID_MSG,
        BrokerError.INVALID_RECORD,
        BrokerError.INVALID_TIMESTAMP,
        BrokerError.POLICY_VIOLATION,
        BrokerError.NOT_ENOUGH_REPLICAS,
        BrokerError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)

#: How long after a failure it is begun again, in seconds.
REST_S = 1.0

#: How often it is looked whether we lead, or what may be freed, in seconds.
LOOK_S, FREE_S = 0.1, 60.0

#: How long the batch that is under way may take when it is to end, in seconds.
LEAVE_S = DELIVERY_S + TIMEOUT_S


#: A record that is to be sent, and what it says; None of one that is none of duetime's.
Sent = tuple[Message, Entry | None]


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
        #: Where the last batch failed, and how often.
        self._failed_at, self._failures = -1, 0
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
        said, begun_s = "", time.monotonic()
        while not self._stopping.is_set():
            if not self._holds_lease():
                # To begin would fence off whoever leads by now.
                self._stopping.wait(LOOK_S)
                continue
            try:
                with Forwarder(self._settings, self._clock, self._isolate) as forwarder:
                    is_on = self._settings.transactional_delivery
                    if is_on or forwarder.is_behind():
                        self._forward(forwarder, until_sent=not is_on)
                    if not is_on:
                        self._free_up_to(forwarder.position)
                        if time.monotonic() - begun_s > KEPT_S:
                            return
                if not is_on:
                    # Who led before may have sent something that is still on its way.
                    self._stopping.wait(FREE_S)
            except Exception as error:  # noqa: BLE001 (whatever it was, it is begun again)
                if words(error) != said:
                    said = words(error)
                    log.warning("transactions begin again error=%s", said)
                self._stopping.wait(REST_S)

    def _forward(self, forwarder: "Forwarder", *, until_sent: bool) -> None:
        forwarder.begin()
        at = forwarder.position
        self._failures = self._failures + 1 if at == self._failed_at else 0
        self._failed_at = at
        free_s = time.monotonic() + FREE_S
        by_themselves = self._failures >= TRIES
        while forwarder.forward(by_themselves=by_themselves) or not (
            until_sent or self._stopping.is_set()
        ):
            by_themselves = by_themselves and forwarder.position == at
            self._failed_at = forwarder.position
            if time.monotonic() > free_s:
                free_s = time.monotonic() + FREE_S
                self._free_up_to(forwarder.position)

    def _free_up_to(self, end: int) -> None:
        try:
            self._free(end)
        except Exception as error:  # noqa: BLE001 (whatever it was, it is tried again)
            log.warning("could not free what is sent error=%s", words(error))


class Forwarder:
    """Forwards batches until one fails. Not thread-safe."""

    def __init__(
        self, settings: Settings, clock: Clock, isolate: Callable[[str], None] = lambda _: None
    ) -> None:
        names = TopicNames(settings)
        self._sending, self._isolated = names.sending, names.isolated
        self._clock, self._isolate = clock, isolate
        shared = librdkafka_properties(settings)
        self._producer: Producer | None = None
        self._properties = shared | {
            "transactional.id": names.sending,
            "enable.idempotence": True,
            "acks": "all",
            "socket.timeout.ms": int(TIMEOUT_S * 500),
            "transaction.timeout.ms": int(TIMEOUT_S * 1_000),
            "delivery.timeout.ms": int(DELIVERY_S * 1_000),
            "linger.ms": 0,
            # As Java's: a topic may take each record, and not a larger batch.
            "batch.size": 16 * 1024,
            # While the last transaction is being ended, brokers ask to try again.
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 100,
            # As Kafka's Java producer places a key.
            "partitioner": "murmur2_random",
            "message.max.bytes": settings.max_message_bytes + 4 * OVERHEAD_BYTES,
            "allow.auto.create.topics": False,
        }
        self._consumer = Consumer(
            shared
            | {
                "group.id": names.sending,
                "enable.auto.commit": False,
                # Where the log was cut: it is looked anew then.
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
            }
        )
        #: When each message was forwarded, by its id, by the monotonic clock; the oldest first.
        self._forwarded = OrderedDict[bytes, float]()
        #: Until when records for a topic are sent by themselves, by the monotonic clock.
        self._alone_s: dict[str, float] = {}
        #: Up to where everything is forwarded, and where the topic ended when it was looked.
        self.position = self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._producer:
            self._producer.purge()
        self._consumer.close()

    def is_behind(self) -> bool:
        """Whether there is anything to forward. Raises KafkaException."""
        self._locate()
        return self.position < self._end

    def _locate(self) -> None:
        place = TopicPartition(self._sending, 0)
        start, self._end = self._consumer.get_watermark_offsets(place, timeout=TIMEOUT_S)
        (committed,) = answer(lambda: self._consumer.committed([place], timeout=TIMEOUT_S))
        if committed.error:
            raise KafkaException(committed.error)
        self.position = start if committed.offset > self._end else max(start, committed.offset)

    def begin(self) -> None:
        """Fence off whoever forwards still, and go on where the last transaction ended.

        Raises KafkaException, KafkaError.
        """
        self._producer = Producer(self._properties)
        self._producer.init_transactions(TIMEOUT_S)
        self._locate()
        since_ms = max(0, self._clock.now_ms() - int(KEPT_S * 1_000))
        kept = [TopicPartition(self._sending, 0, since_ms)]
        (first,) = self._consumer.offsets_for_times(kept, timeout=TIMEOUT_S)
        if first.error:
            raise KafkaException(first.error)
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
                if known := entry(each):
                    self._forwarded[str(known.id).encode()] = begun_s
                seen = (each.offset() or 0) + 1
            if records:
                until_s = time.monotonic() + TIMEOUT_S
            elif time.monotonic() > until_s:
                raise KafkaError(f"topic {self._sending} could not be read: is the broker up?")

    def forward(self, *, by_themselves: bool = False) -> bool:
        """Forward the next batch; whether there was one. Raises KafkaException, KafkaError.

        All of it goes to where records are sent `by_themselves`, if so.
        """
        first = self._consumer.poll(WAIT_S)
        if first is None:
            return False
        records = [first, *self._consumer.consume(BATCH - 1, 0)]
        for each in records:
            self._check(each)
        new, end = self._new(records), (records[-1].offset() or 0) + 1
        while refused := self._transaction(new, end, by_themselves=by_themselves):
            if self._isolated in refused:
                raise KafkaError(f"topic {self._isolated} takes no records: see its brokers")
            for topic in refused:
                self._alone_s[topic] = time.monotonic() + ALONE_S
                self._isolate(topic)
        self.position = end
        return True

    def _new(self, records: Sequence[Message]) -> list[Sent]:
        """Those that were not forwarded within KEPT_S; they are noted."""
        now_s = time.monotonic()
        while self._forwarded and now_s - next(iter(self._forwarded.values())) > KEPT_S:
            self._forwarded.popitem(last=False)
        new = []
        for each in records:
            known = entry(each)
            name = str(known.id).encode() if known else b""
            if known and name in self._forwarded:
                continue
            if known:
                self._forwarded[name] = now_s
            new.append((each, known))
        return new

    def _transaction(self, records: Sequence[Sent], end: int, *, by_themselves: bool) -> set[str]:
        """Send these and the offset behind them.

        Returns the topics that have refused one: nothing is sent then.
        """
        if self._producer is None:
            raise KafkaError("nothing is forwarded before `begin`")
        places = [self._place(each, by_themselves=by_themselves) for each in records]
        self._producer.begin_transaction()
        if refused := self._sent(self._producer, records, places):
            self._producer.abort_transaction(TIMEOUT_S)
            return refused
        self._producer.send_offsets_to_transaction(
            [TopicPartition(self._sending, 0, end)],
            self._consumer.consumer_group_metadata(),
            TIMEOUT_S,
        )
        self._producer.commit_transaction(TIMEOUT_S)
        metrics.DELIVERED.labels("").inc(sum(each != self._isolated for each in places))
        return set()

    def _place(self, sent: Sent, *, by_themselves: bool) -> str:
        _, known = sent
        if known is None or known.topic is None or by_themselves:
            return self._isolated
        is_alone = time.monotonic() < self._alone_s.get(known.topic, 0.0)
        return self._isolated if is_alone else known.topic

    def _sent(self, producer: Producer, records: Sequence[Sent], places: Sequence[str]) -> set[str]:
        """Hand them over, and wait for each; the topics that have refused one.

        Raises KafkaError where no topic is the cause.
        """
        refused, taken, others = dict[str, BrokerError](), set[str](), list[BrokerError]()

        def note(topic: str, error: BrokerError | None, _record: Message | None) -> None:
            if error is None:
                taken.add(topic)
            elif error.code() in REFUSALS:
                refused.setdefault(topic, error)
            else:
                # With one record that is refused, others are given up.
                others.append(error)

        for (each, known), to in zip(records, places, strict=True):
            headers, partition = headers_of(each), -1
            if known and to != self._isolated:
                headers = headers[UNDELIVERED_HEADERS:]
                partition = -1 if known.partition is None else known.partition
            try:
                enqueue(
                    producer,
                    to,
                    value=each.value(),
                    key=each.key(),
                    headers=headers,
                    partition=partition,
                    on_delivery=partial(note, to),
                )
            except KafkaException as failed:
                # Once a record has failed, the producer takes no more.
                note(to, failed.args[0], None)
                break
        until_s = time.monotonic() + DELIVERY_S + TIMEOUT_S
        while len(producer) and not refused and time.monotonic() < until_s:
            producer.poll(LOOK_S)
        for topic, error in refused.items():
            log.warning("transaction is repeated topic=%s error=%s", topic, error.str())
        is_outage = {each.code() for each in refused.values()} == {TIMED_OUT} and not taken
        if is_outage or (others and not refused):
            why = others[0] if others else next(iter(refused.values()))
            raise KafkaError(f"a transaction has failed ({why.str()})")
        return set(refused)

    def _check(self, record: Message) -> None:
        if error := record.error():
            raise KafkaException(error)
