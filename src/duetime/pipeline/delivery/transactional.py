"""The transactional sink: due messages are delivered in Kafka transactions (KIP-98, KIP-447).

Off by default (`transactional_delivery`). Spark's sink has no transactions, so due messages go to
`duetime.sending`, and from there a single producer with a transactional id forwards them. A
transaction holds the messages of a batch and the offset behind them: all of it counts, or nothing.
A new forwarder fences off earlier ones: brokers refuse their requests, even those that a kernel has
held back while the network was away.

A late request of a release job's producer may still append a message to `duetime.sending` a second
time. Of the messages with one id that come within REMEMBER_S, only the first is forwarded.

A record that is refused ends the transaction. The batch is repeated, and records for the same topic
go to `duetime.isolated` for a while, where each is sent by itself. So do a batch that has failed
twice for another reason, and records that duetime did not write.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Self

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka import KafkaError as BrokerError

from duetime.client.producer import PERMANENT_ERRORS
from duetime.core import headers as H
from duetime.core import metrics
from duetime.core.clock import Clock
from duetime.core.errors import KafkaError, error_text
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.leadership import check_lease
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.kafka.producer import delivery_properties, enqueue
from duetime.kafka.range_reader import Entry, RangeReader, entry, fetched, headers_of
from duetime.pipeline.delivery.isolation import NOT_WRITTEN

log = logging.getLogger(__name__)

#: How long a message's id is remembered, in seconds: longer than Linux sends the data of a closed
#: connection (some 100 s), and longer than a producer retries.
REMEMBER_S = 120.0

#: The most messages of a transaction.
MAX_BATCH_RECORDS = 2_000

#: How long a transaction waits for its first message, in seconds.
FETCH_TIMEOUT_S = 0.2

#: The delivery timeout of a record, in seconds: others wait for it, and then it is isolated. A
#: broker that is gone is replaced after 9 s.
DELIVERY_S = 10.0

#: The timeout of a request to the coordinator, in seconds, and of a transaction that is left open.
TRANSACTION_TIMEOUT_S = 20.0

#: How long records for a topic that has refused one are isolated, in seconds.
ISOLATED_S = 300.0

#: The most attempts to send a batch in a transaction, if no topic is known to be the cause.
MAX_ATTEMPTS = 2

#: The client's error for a record that no broker has accepted or refused.
TIMED_OUT = BrokerError._MSG_TIMED_OUT  # noqa: SLF001 (its public name)

#: Answers that are about a topic or a record, and not about the transaction.
REFUSALS = PERMANENT_ERRORS.union(
    NOT_WRITTEN,
    {
        TIMED_OUT,
        BrokerError.UNKNOWN_TOPIC_OR_PART,
        BrokerError.TOPIC_EXCEPTION,
        BrokerError.TOPIC_AUTHORIZATION_FAILED,
        BrokerError.INVALID_MSG,
        BrokerError.POLICY_VIOLATION,
        BrokerError.NOT_ENOUGH_REPLICAS,
        BrokerError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    },
)

#: The pause after a failure, in seconds.
RETRY_INTERVAL_S = 1.0

#: The interval of checks whether this process leads, and of the producer's polls, in seconds.
POLL_INTERVAL_S = 0.1

#: The interval in which forwarded records are freed, in seconds.
FREE_INTERVAL_S = 60.0

#: How long `close` waits for the batch that is being sent, in seconds.
CLOSE_S = DELIVERY_S + TRANSACTION_TIMEOUT_S

#: A record to send, and its decoded headers; None if duetime did not write it.
Parsed = tuple[Message, Entry | None]


class CoordinatorSilent(KafkaError):
    """The coordinator of the group has not answered."""


class TransactionalDelivery:
    """Forwards messages in a thread of its own while this process leads. Start it once."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        holds_lease: Callable[[], bool],
        isolate: Callable[[str], None],
        free: Callable[[int], None],
    ) -> None:
        """`isolate` takes a topic that refused a record, `free` the offset behind sent records."""
        self._settings, self._clock = settings, clock
        self._holds_lease, self._isolate, self._free = holds_lease, isolate, free
        #: Where the last batch failed, and how often.
        self._failed_at, self._failures = -1, 0
        self._last_error = ""
        self._started_s = 0.0
        self._thread = PeriodicThread("transactions", POLL_INTERVAL_S, self._run)

    def start(self) -> None:
        """Continue where the last transaction ended; if switched off, only send the backlog."""
        self._started_s = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """End, once the current batch is sent. Safe to repeat."""
        self._thread.stop(CLOSE_S)

    def _run(self) -> None:
        # To begin without the lease would fence off the present leader.
        if not self._holds_lease():
            return
        stopping, is_on = self._thread.stopping, self._settings.transactional_delivery
        try:
            with Forwarder(
                self._settings, self._clock, self._isolate, self._holds_lease
            ) as forwarder:
                if is_on or forwarder.is_behind():
                    self._forward(forwarder, until_sent=not is_on)
                if not is_on:
                    self._free_up_to(forwarder.position)
            if not is_on:
                if time.monotonic() - self._started_s > REMEMBER_S:
                    stopping.set()
                # Requests of the previous leader may still arrive.
                stopping.wait(FREE_INTERVAL_S)
        except Exception as error:  # noqa: BLE001 (any error is retried)
            if isinstance(error, CoordinatorSilent):
                # It is no fault of the batch.
                self._failed_at = -1
            if error_text(error) != self._last_error:
                self._last_error = error_text(error)
                log.warning("transactions failed, beginning again error=%s", self._last_error)
            stopping.wait(RETRY_INTERVAL_S)

    def _forward(self, forwarder: "Forwarder", *, until_sent: bool) -> None:
        forwarder.begin()
        at = forwarder.position
        self._failures = self._failures + 1 if at == self._failed_at else 0
        self._failed_at = at
        free_at_s = time.monotonic() + FREE_INTERVAL_S
        is_isolated, is_done = self._failures >= MAX_ATTEMPTS, False
        while not is_done:
            is_empty = not forwarder.forward(is_isolated=is_isolated)
            # A slow broker returns nothing too, before the end.
            is_done = is_empty and (
                (until_sent and not forwarder.is_behind()) or self._thread.stopping.is_set()
            )
            is_isolated = is_isolated and forwarder.position == at
            self._failed_at = forwarder.position
            if time.monotonic() > free_at_s:
                free_at_s = time.monotonic() + FREE_INTERVAL_S
                self._free_up_to(forwarder.position)

    def _free_up_to(self, end: int) -> None:
        try:
            self._free(end)
        except Exception as error:  # noqa: BLE001 (any error is retried)
            log.warning("could not free forwarded records error=%s", error_text(error))


class Forwarder:
    """Forwards batches until one fails. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        isolate: Callable[[str], None] = lambda _: None,
        holds_lease: Callable[[], bool] = lambda: True,
    ) -> None:
        """`isolate` takes a topic that refused a record; see `TransactionalDelivery`."""
        names = TopicNames(settings)
        self._sending, self._isolated = names.sending, names.isolated()
        self._clock, self._isolate, self._holds_lease = clock, isolate, holds_lease
        self._settings = settings
        self._producer: Producer | None = None
        self._offsets = Offsets(settings, names.sending)
        self._consumer = Consumer(
            librdkafka_properties(settings)
            | {
                "group.id": names.sending,
                "enable.auto.commit": False,
                # Raise if the log was truncated: the position is determined again then.
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
            }
        )
        self._group = self._consumer.consumer_group_metadata()
        #: By message id, when it was forwarded (monotonic clock, seconds); the oldest first.
        self._forwarded = OrderedDict[str, float]()
        #: By topic, until when its records are isolated (monotonic clock, seconds).
        self._isolated_until_s: dict[str, float] = {}
        #: The offset behind the last forwarded record.
        self.position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._producer:
            self._producer.purge()
        self._consumer.close()
        self._offsets.close()

    def is_behind(self) -> bool:
        """Return whether messages wait to be forwarded. Raises KafkaError."""
        return self._locate() > self.position

    def _locate(self) -> int:
        """Set the position by the last transaction's offset; return where the topic ends."""
        place = self._sending, 0
        start, end = self._offsets.starts([place])[place], self._offsets.ends([place])[place]
        committed = self._offsets.committed([place]).get(place, start)
        # Beyond the end it belongs to a log that was truncated or created again.
        self.position = start if committed > end else max(start, committed)
        return end

    def begin(self) -> None:
        """Fence off earlier forwarders, and continue where the last transaction ended.

        Raises KafkaException, KafkaError.
        """
        self._producer = self._new_producer()
        self._locate()
        self._remember()
        self._consumer.assign([TopicPartition(self._sending, 0, self.position)])

    def _new_producer(self) -> Producer:
        """Return a producer; the open transaction of any other one is aborted."""
        producer = Producer(producer_properties(self._settings))
        producer.init_transactions(TRANSACTION_TIMEOUT_S)
        return producer

    def _replace_producer(self) -> None:
        """Abort the transaction, and continue with another producer.

        When a record is refused, librdkafka drops requests that have sequence numbers but are not
        sent yet, and the producer's next transaction would be out of order. Raises KafkaError,
        LeaderPaused.
        """
        # The present leader's producer would be fenced off.
        check_lease(self._holds_lease)
        if self._producer:
            self._producer.purge()
        self._producer, before = self._new_producer(), self.position
        self._locate()
        # A later forwarder went on, which this one has now fenced off.
        if self.position != before:
            raise KafkaError(f"another process has forwarded messages of {self._sending}")

    def _remember(self) -> None:
        """Read the ids of the messages that were forwarded within REMEMBER_S."""
        place, now_s = (self._sending, 0), time.monotonic()
        since_ms = self._clock.now_ms() - int(REMEMBER_S * 1_000)
        first = self._offsets.first_since({place: since_ms})[place]
        if first is None or first >= self.position:
            return
        with RangeReader(self._settings) as reader:
            for each in reader.entries([OffsetRange(*place, first, self.position)]):
                self._forwarded[str(each.id)] = now_s

    def forward(self, *, is_isolated: bool = False) -> bool:
        """Forward the next batch; return whether there was one.

        With `is_isolated`, all of it goes to the isolated topic. Raises KafkaException, KafkaError,
        LeaderPaused.
        """
        records = fetched(self._consumer, MAX_BATCH_RECORDS, FETCH_TIMEOUT_S)
        if not records:
            return False
        for each in records:
            if error := each.error():
                raise KafkaException(error)
        new, end = self._new(records), (records[-1].offset() or 0) + 1
        while refused := self._transaction(new, end, is_isolated=is_isolated):
            if self._isolated in refused:
                raise KafkaError(f"topic {self._isolated} takes no records: see its brokers")
            for topic in refused:
                self._isolated_until_s[topic] = time.monotonic() + ISOLATED_S
                self._isolate(topic)
            self._replace_producer()
        self.position = end
        return True

    def _new(self, records: Sequence[Message]) -> list[Parsed]:
        """Return the records that were not forwarded within REMEMBER_S, and remember their ids."""
        now_s = time.monotonic()
        while self._forwarded and now_s - next(iter(self._forwarded.values())) > REMEMBER_S:
            self._forwarded.popitem(last=False)
        new = []
        for each in records:
            if known := entry(each):
                if str(known.id) in self._forwarded:
                    continue
                self._forwarded[str(known.id)] = now_s
            new.append((each, known))
        return new

    def _transaction(self, records: Sequence[Parsed], end: int, *, is_isolated: bool) -> set[str]:
        """Send the records and the offset behind them, or nothing.

        Returns the topics that have refused a record.
        """
        if self._producer is None:
            raise KafkaError("forward was called before begin")
        topics = [self._topic(entry, is_isolated=is_isolated) for _, entry in records]
        self._producer.begin_transaction()
        if refused := self._send(self._producer, records, topics):
            return refused
        self._send_offset(self._producer, end)
        self._producer.commit_transaction(TRANSACTION_TIMEOUT_S)
        metrics.DELIVERED.labels("").inc(sum(each != self._isolated for each in topics))
        return set()

    def _send_offset(self, producer: Producer, end: int) -> None:
        """Make the offset part of the transaction. Raises KafkaException, CoordinatorSilent.

        librdkafka waits for ever for a group's coordinator whose broker was restarted, whatever its
        timeout (confluentinc/librdkafka issues 5456 and 5511). So its thread is left to itself.
        """
        sent = Future[None]()

        def send() -> None:
            position, group = TopicPartition(self._sending, 0, end), self._group
            try:
                producer.send_offsets_to_transaction([position], group, DELIVERY_S)
            except Exception as error:  # noqa: BLE001 (it is raised where it is waited for)
                sent.set_exception(error)
            else:
                sent.set_result(None)

        Thread(target=send, name="transaction-offset", daemon=True).start()
        try:
            sent.result(DELIVERY_S)
        except TimeoutError as error:
            text = f"the coordinator of group {self._sending} has not answered in time"
            raise CoordinatorSilent(text) from error

    def _topic(self, entry: Entry | None, *, is_isolated: bool) -> str:
        if entry is None or entry.topic is None or is_isolated:
            return self._isolated
        is_waiting = time.monotonic() < self._isolated_until_s.get(entry.topic, 0.0)
        return self._isolated if is_waiting else entry.topic

    def _send(
        self, producer: Producer, records: Sequence[Parsed], topics: Sequence[str]
    ) -> set[str]:
        """Send the records and wait for each; return the topics that have refused one.

        Raises KafkaError if no topic is the cause.
        """
        refused, accepted, others = dict[str, BrokerError](), set[str](), list[BrokerError]()

        def report(topic: str, error: BrokerError | None, _record: Message | None) -> None:
            if error is None:
                accepted.add(topic)
            elif error.code() in REFUSALS:
                refused.setdefault(topic, error)
            else:
                # A record that is refused fails others with it.
                others.append(error)

        for (each, known), to in zip(records, topics, strict=True):
            headers, partition = headers_of(each), -1
            if known and to != self._isolated:
                headers = headers[H.UNDELIVERED_COUNT :]
                partition = -1 if known.partition is None else known.partition
            try:
                enqueue(
                    producer,
                    to,
                    value=each.value(),
                    key=each.key(),
                    headers=headers,
                    partition=partition,
                    on_delivery=partial(report, to),
                )
            except KafkaException as failed:
                # Once a record has failed, the producer accepts no more.
                report(to, failed.args[0], None)
                break
        until_s = time.monotonic() + DELIVERY_S + TRANSACTION_TIMEOUT_S
        while len(producer) and not refused and time.monotonic() < until_s:
            producer.poll(POLL_INTERVAL_S)
        for topic, error in refused.items():
            log.warning("repeating transaction without topic=%s error=%s", topic, error.str())
        is_outage = {each.code() for each in refused.values()} == {TIMED_OUT} and not accepted
        if is_outage or (others and not refused):
            why = others[0] if others else next(iter(refused.values()))
            raise KafkaError(f"a transaction has failed ({why.str()})")
        return set(refused)


def producer_properties(settings: Settings) -> dict[str, str | int | float | bool]:
    """Return librdkafka properties of the transactional producer."""
    return delivery_properties(settings) | {
        "transactional.id": TopicNames(settings).sending,
        "socket.timeout.ms": int(TRANSACTION_TIMEOUT_S * 500),
        "transaction.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1_000),
        "delivery.timeout.ms": int(DELIVERY_S * 1_000),
        # A topic may accept each record, but not a larger batch. Smaller batches are slower: a
        # broker gets one request at a time.
        "batch.size": 64 * 1024,
        # While the last transaction ends, brokers answer that the request is to be retried.
        "retry.backoff.ms": 5,
        "retry.backoff.max.ms": 100,
    }
