"""Kafka's client in the event loop: it takes records without waiting, and reports what arrived.

It never gives up, and sends each record once (idempotence). A client that fails for good is
replaced: what it held may have arrived, and no report will come.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from confluent_kafka import KafkaException

from duetime.client.producer import Producer
from duetime.core import headers as H
from duetime.core.errors import ClientFailed, KafkaError, RecordRefused
from duetime.core.messages import MessageId
from duetime.core.records import IntakeRecord
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import Offsets
from duetime.kafka.range_reader import RangeReader, headers_of

log = logging.getLogger(__name__)

#: How often reports are polled while some are outstanding, in seconds.
POLL_INTERVAL_S = 0.001

#: After this number of polls without a report, a second's worth, the idle interval is used.
IDLE_POLLS = 1_000
IDLE_POLL_INTERVAL_S = 0.05

#: The delay after an unexpected error, in seconds.
ERROR_DELAY_S = 1.0

#: A record that was given up may have arrived all the same, and only further tries tell.
NEVER_GIVE_UP: dict[str, Any] = {"delivery.timeout.ms": 0, "reconnect.backoff.max.ms": 1_000}

#: The most by which the clocks of this machine and of the brokers may differ, in ms.
CLOCK_MARGIN_MS = 60_000

#: The errors of the records that Kafka refuses for good, by id.
Refusals = Mapping[str, RecordRefused]


class ProducerBatch:
    """Records that were given to Kafka's client together. For the event loop.

    `arrived` ends once all are reported, with the refusals. It raises KafkaError if others failed
    (they are to be sent again), and ClientFailed if no report will come.
    """

    def __init__(self, records: Sequence[IntakeRecord]) -> None:
        self.records = records
        #: The last ones, which did not fit into the client, and were not given to it.
        self.rest: Sequence[IntakeRecord] = ()
        self.arrived: asyncio.Future[Refusals] = asyncio.get_running_loop().create_future()
        self._outstanding = len(records)
        self._refused: dict[str, RecordRefused] = {}
        self._failed: dict[str, KafkaError] = {}

    @property
    def is_lost(self) -> bool:
        """True if the client failed for good: some may have arrived, and no report will come."""
        return self.arrived.done() and isinstance(self.arrived.exception(), ClientFailed)

    def arrived_records(self) -> list[IntakeRecord]:
        """Return the records that are known to have arrived, once all are reported."""
        if self._outstanding:
            return []
        missing = self._refused.keys() | self._failed.keys()
        return [each for each in self.records if str(each.id) not in missing]

    def report(self, error: KafkaError | None, id: str) -> None:  # noqa: A002 (the field's name)
        """Note that a record arrived, or failed with this error."""
        if isinstance(error, RecordRefused):
            self._refused[id] = error
        elif error:
            self._failed[id] = error
        self._end_reports(1)

    def leave_rest(self, count: int) -> None:
        """Note that the last `count` records did not fit into the client."""
        handed_over = len(self.records) - count
        self.records, self.rest = self.records[:handed_over], self.records[handed_over:]
        self._end_reports(count)

    def _end_reports(self, count: int) -> None:
        self._outstanding -= count
        if self._outstanding:
            return
        if self._failed:
            self.fail(next(iter(self._failed.values())))
        elif not self.arrived.done():
            self.arrived.set_result(self._refused)

    def fail(self, error: KafkaError) -> None:
        """End with this error, which is ClientFailed where no more reports will come."""
        if not self.arrived.done():
            self.arrived.set_exception(error)
            # Where no request waits any longer, asyncio would log the error as never retrieved.
            self.arrived.exception()


class AsyncProducer:
    """Sends records to Kafka."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer = Producer(settings, **NEVER_GIVE_UP)
        self._outstanding: set[ProducerBatch] = set()
        self._handed_over = asyncio.Event()
        #: The number of polls since the last report.
        self._idle_polls = 0

    async def send(self, records: Sequence[IntakeRecord]) -> Refusals:
        """Send all, as there is room, and return the refusals. Raises KafkaError."""
        refused = dict[str, RecordRefused]()
        while records:
            batch = self.hand_over(records)
            refused |= await batch.arrived
            if len(batch.rest) == len(records):
                await asyncio.sleep(IDLE_POLL_INTERVAL_S)
            records = batch.rest
        return refused

    def hand_over(self, records: Sequence[IntakeRecord]) -> ProducerBatch:
        """Give records to the client, up to its room, and return their batch.

        It never waits for room: every request would wait with it while Kafka is down.
        """
        batch = ProducerBatch(records)
        self._outstanding.add(batch)
        batch.arrived.add_done_callback(lambda _: self._outstanding.discard(batch))
        self._idle_polls = 0
        for index, record in enumerate(records):
            try:
                if not self._producer.offer(record, batch.report):
                    batch.leave_rest(len(records) - index)
                    break
            except ClientFailed as error:
                self._replace(error)
                break
            except KafkaError as error:
                # The others are on their way, and are still waited for.
                batch.report(error, str(record.id))
        self._handed_over.set()
        return batch

    async def poll_reports(self) -> None:
        """Poll for ever. A thread would wait for Python's lock at each report."""
        while True:
            await self._handed_over.wait()
            try:
                while self._outstanding:
                    self._idle_polls = 0 if self._producer.poll() else self._idle_polls + 1
                    await asyncio.sleep(poll_interval_s(self._idle_polls))
                self._handed_over.clear()
            except ClientFailed as error:
                self._replace(error)
            except Exception as error:  # noqa: BLE001 (its end would leave all requests waiting)
                # The text of an unknown error may contain a payload.
                log.warning("reports cannot be polled error=%s", type(error).__name__)
                await asyncio.sleep(ERROR_DELAY_S)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all records are reported, for `timeout_s` at most."""
        with suppress(TimeoutError, KafkaException):
            async with asyncio.timeout(timeout_s):
                while self._producer.flush(0.0):  # noqa: ASYNC110 (it has no event to wait for)
                    await asyncio.sleep(POLL_INTERVAL_S)

    def _replace(self, error: ClientFailed) -> None:
        log.error("Kafka's client failed for good, and is replaced error=%s", error)
        self._producer = Producer(self._settings, **NEVER_GIVE_UP)
        for batch in list(self._outstanding):
            batch.fail(error)


def poll_interval_s(idle_polls: int) -> float:
    """Return the delay before the next poll, after `idle_polls` without a report."""
    return POLL_INTERVAL_S if idle_polls < IDLE_POLLS else IDLE_POLL_INTERVAL_S


def find_arrived(settings: Settings, taken_ms: Mapping[str, int]) -> set[str]:
    """Return the ids that the intake topic has; each is given with when it was taken.

    Raises KafkaError.
    """
    if not taken_ms:
        return set()
    since_ms = min(taken_ms.values()) - CLOCK_MARGIN_MS
    with closing(Offsets(settings)) as offsets:
        ranges = offsets.ranges_since(TopicNames(settings).native, since_ms)
    ids = dict[tuple[bytes | None, bytes | None], str]()
    for each in taken_ms:
        identity = MessageId.parse(each)
        ids[b"%d" % identity.due_ms, identity.unique.encode()] = each
    # Its records are in no transaction, and count before the end of another sender's.
    with RangeReader(settings, committed_only=False) as reader:
        headers = map(dict, map(headers_of, reader.records(ranges)))
        found = {ids.get((each.get(H.DUE_AT_MS), each.get(H.DUE_ID))) for each in headers}
    return {each for each in found if each}
