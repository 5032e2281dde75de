"""The way of records to Kafka, directly or through the spool. Runs in the event loop.

```
the spool is empty      -> Kafka's client -> acknowledged within 1 s: Kafka has it
                                          -> else: spooled as taken; the client goes on trying
                                          -> no room in the client: spooled
the spool has records   -> spool          -> drained in order, once what is before it has arrived
```
Kafka's client never gives up, and sends each record once. So this process learns whether a record
has arrived, or ends before that. Then the next process reads back what arrived, from the intake
topic. A client that fails for good is replaced, and what it held is read back as after a crash.

What Kafka refuses is sent once more alone, because records that are sent together are refused
together. What is refused alone is the sender's mistake (422), or is set aside in the spool.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from duetime.api.errors import SpoolFull
from duetime.api.producer import AsyncProducer, ProducerBatch, Refusals, find_arrived
from duetime.api.spool import MAX_TAKEN_BYTES, AsyncSpool, Spool, Spooled
from duetime.core.clock import Clock
from duetime.core.errors import DuetimeError, KafkaError, RecordRefused
from duetime.core.messages import MessageId
from duetime.core.metrics import API_MESSAGES, API_REFUSED, API_SPOOLED
from duetime.core.records import IntakeRecord, cancel_record
from duetime.core.settings import Settings

log = logging.getLogger(__name__)

#: How long Kafka may take to acknowledge before records are spooled, in seconds.
ACKNOWLEDGE_TIMEOUT_S = 1.0

#: How long records may take to arrive at the end of the process, in seconds. They are spooled.
FLUSH_TIMEOUT_S = 0.5

#: The delay after a failure to drain the spool, in seconds.
DRAIN_RETRY_S = 1.0

#: The most records of the spool that are sent at a time.
MAX_DRAINED_RECORDS = 1_000

#: New records wait for the spool to be empty while it has fewer than these. Under constant load
#: it would never be empty otherwise.
NEARLY_EMPTY_RECORDS = 100


class Submission:
    """The fate of the records of one request.

    The request may fail, or time out, although some of them are accepted then or later.
    """

    def __init__(self) -> None:
        #: Whether Kafka has an accepted record, or else the spool; the first of both counts.
        self.accepted = dict[MessageId, bool]()
        #: What may still accept some of the records.
        self.outstanding = set[asyncio.Future[Any]]()

    def follow(
        self,
        end: "asyncio.Future[Any]",
        accepted: Callable[[], Sequence[IntakeRecord]],
        *,
        in_kafka: bool,
    ) -> None:
        """Note the records that are accepted at this end."""

        def ended(_: "asyncio.Future[Any]") -> None:
            self.outstanding.discard(end)
            for each in accepted():
                self.accepted.setdefault(each.id, in_kafka)

        self.outstanding.add(end)
        end.add_done_callback(ended)


class Dispatcher:
    """Sends records. Enter it in a running event loop; it closes the spool at its end."""

    def __init__(self, settings: Settings, spool: Spool, clock: Clock) -> None:
        self._settings, self._file, self._clock = settings, spool, clock
        self._producer = AsyncProducer(settings)
        self._spool = AsyncSpool(settings, spool)
        #: Whether the last records did not fit into the spool.
        self.is_full = False
        #: Whether the records in the spool cannot be sent for another reason than Kafka.
        self.is_stuck = False
        #: Whether new records have to queue behind others in the spool.
        self._spooling = (depth := spool.depth()) > 0
        API_SPOOLED.set(depth)
        #: Whether records in the spool may have arrived without a report to come.
        self._must_read_back = self._spooling
        #: The number of puts into the spool that have not ended.
        self._putting = 0
        #: The numbers of the records that were given to Kafka's client before they were spooled.
        self._arriving: dict[asyncio.Future[Refusals], Sequence[int]] = {}
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        #: Whether few records are left in the spool, and Kafka takes them.
        self._nearly_empty = False

    async def __aenter__(self) -> Self:
        if self._spooling:
            self._filled.set()
        self._tasks = [
            asyncio.create_task(self._drain_for_ever()),
            asyncio.create_task(self._spool.claim_regularly(lambda: self._spooling)),
            asyncio.create_task(self._producer.poll_reports()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close everything; records that have not arrived stay in the spool."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._producer.flush(FLUSH_TIMEOUT_S)
        self._spool.close()

    async def send(
        self, records: Sequence[IntakeRecord], submission: Submission | None = None
    ) -> bool:
        """Send records, and return whether Kafka has them; otherwise the spool has.

        Raises KafkaError, RecordRefused, SpoolFull, SpoolFailed: some may be accepted all the same,
        and the submission notes which.
        """
        refused = await self._send_once(records, submission)
        if not refused:
            return refused is not None
        errors, in_kafka = list[RecordRefused](), True
        for record in [each for each in records if str(each.id) in refused]:
            refused_alone = await self._send_once([record], submission)
            in_kafka = in_kafka and refused_alone is not None
            errors += (refused_alone or {}).values()
        if errors:
            raise errors[0]
        return in_kafka

    async def find(self, id: MessageId) -> IntakeRecord | None:  # noqa: A002 (the field's name)
        """Return the message if it is in the spool. Raises SpoolFailed."""
        return await self._spool.run(self._file.find, id) if self._is_searchable else None

    async def withdraw(self, id: MessageId) -> bool:  # noqa: A002 (the field's name)
        """Remove a message from the spool; return False if it is not there, or taken already.

        An earlier try, of which this process knows nothing, may have left the message in Kafka. If
        there is time for that, a cancellation is spooled in its place.
        """
        if not self._is_searchable:
            return False
        is_in_time = id.due_ms - self._clock.now_ms() >= self._settings.short_delay_threshold_ms
        replacement = cancel_record(id, self._settings) if is_in_time else None
        withdrawn = await self._spool.run(self._file.withdraw, id, replacement)
        if withdrawn and not replacement:
            API_SPOOLED.dec()
        return withdrawn

    async def spooled(self) -> int:
        """Return the number of records in the spool."""
        return await self._spool.run(self._file.depth)

    @property
    def _is_searchable(self) -> bool:
        """True if the spool has records for this Kafka."""
        return self._spooling and self._file.refusal is None

    async def _send_once(
        self, records: Sequence[IntakeRecord], submission: Submission | None
    ) -> Refusals | None:
        """Return the refusals of Kafka; None if it does not answer, and the spool has all."""
        if self._spooling and self._nearly_empty:
            await self._wait_until_empty()
        if self._spooling:
            await self._put_shielded(submission, records)
            return None
        taken_ms, batch = self._clock.now_ms(), self._producer.hand_over(records)
        if submission:
            submission.follow(batch.arrived, batch.arrived_records, in_kafka=True)
        if not batch.rest:
            await asyncio.wait({batch.arrived}, timeout=ACKNOWLEDGE_TIMEOUT_S)
        # The rest queues behind the others of its batch, and before all later records.
        if batch.rest or batch.is_lost or not batch.arrived.done():
            await self._put_shielded(submission, records, taken_ms, batch)
            return None
        refused = batch.arrived.result()
        API_MESSAGES.labels("kafka").inc(len(records) - len(refused))
        return refused

    async def _wait_until_empty(self) -> None:
        try:
            await asyncio.wait_for(self._emptied.wait(), ACKNOWLEDGE_TIMEOUT_S)
        except TimeoutError:
            # Kafka does not take them after all: no other request need wait.
            self._nearly_empty = False

    async def _put_shielded(
        self,
        submission: Submission | None,
        records: Sequence[IntakeRecord],
        taken_ms: int | None = None,
        batch: ProducerBatch | None = None,
    ) -> None:
        """Put records to the end, also if the request times out, and let later ones queue."""
        if not self._spooling:
            log.warning("spooling started: Kafka does not answer")
        self._spooling = True
        self._emptied.clear()
        self._putting += 1
        put = asyncio.create_task(self._put(records, taken_ms, batch))
        if submission:
            submission.follow(put, lambda: [] if put.exception() else records, in_kafka=False)
        await asyncio.shield(put)

    async def _put(
        self, records: Sequence[IntakeRecord], taken_ms: int | None, batch: ProducerBatch | None
    ) -> None:
        """Spool records. Those that a batch has under way are removed when they arrive."""
        handed_over, rest = (batch.records, batch.rest) if batch else ((), records)
        numbers = list[int]()
        entries = [(each, taken_ms) for each in handed_over] + [(each, None) for each in rest]
        try:
            put = await self._spool.put(entries)
            numbers = [each for each in put[: len(handed_over)] if each is not None]
        except SpoolFull:
            self.is_full = True
            raise
        finally:
            self._putting -= 1
            if batch and batch.is_lost:
                self._must_read_back = True
            elif batch:
                # Records that the spool refused may arrive, too, and before all later ones.
                self._arriving[batch.arrived] = numbers
            self._filled.set()
        self.is_full = False
        API_MESSAGES.labels("spool").inc(len(records))
        API_SPOOLED.inc(sum(each is not None for each in put))

    async def _drain_for_ever(self) -> None:
        while True:
            await self._filled.wait()
            try:
                if self._must_read_back:
                    await self._read_back()
                await self._drain_once()
            except Exception as error:  # noqa: BLE001 (its end would strand accepted records)
                self.is_stuck = self._file.refusal is not None or not isinstance(error, KafkaError)
                # The text of an unknown error may contain a payload.
                text = error if isinstance(error, DuetimeError) else type(error).__name__
                log.warning("the spool cannot be drained error=%s", text)
                self._must_read_back = True
                await asyncio.sleep(DRAIN_RETRY_S)

    async def _drain_once(self) -> None:
        """Send the next records; after a crash between two lines they are read back."""
        # What was given to Kafka's client before it was spooled comes before the whole spool.
        while self._arriving:
            arrived, numbers = next(iter(self._arriving.items()))
            if refused := await arrived:
                # The read-back releases them, and they are sent again with the next ones.
                raise KafkaError(f"Kafka refuses {len(refused)} records: sending them again")
            await self._remove(numbers)
            del self._arriving[arrived]
        await self._spool.claim()
        now_ms = self._clock.now_ms()
        taken = await self._spool.run(self._file.take, MAX_DRAINED_RECORDS, now_ms)
        self.is_stuck = False
        size_bytes = sum(each.size_bytes for each in taken)
        self._nearly_empty = len(taken) < NEARLY_EMPTY_RECORDS and size_bytes < MAX_TAKEN_BYTES
        if taken:
            refused = await self._producer.send([each.record for each in taken])
            await self._remove(
                [each.number for each in taken if str(each.record.id) not in refused]
            )
            for each in taken:
                if str(each.record.id) in refused:
                    await self._send_alone(each)
        elif not (self._putting or self._arriving or self._must_read_back):
            self._filled.clear()
            self._spooling = self._nearly_empty = False
            self._emptied.set()
            # A put that ended during a read-back was counted twice.
            API_SPOOLED.set(0)
            log.info("spooling ended: the spool is empty")

    async def _send_alone(self, refused: Spooled) -> None:
        """Send a refused record again, and set it aside if it is refused alone, too."""
        errors = await self._producer.send([refused.record])
        if not errors:
            await self._remove([refused.number])
            return
        await self._spool.run(self._file.set_aside, refused.number)
        API_SPOOLED.dec()
        API_REFUSED.inc()
        for error in errors.values():
            log.warning("record set aside id=%s error=%s", refused.record.id, error)

    async def _remove(self, numbers: Sequence[int]) -> None:
        await self._spool.run(self._file.remove, numbers)
        API_SPOOLED.dec(len(numbers))
        self.is_full = False

    async def _read_back(self) -> None:
        """Find out which taken records arrived, after a crash or a failed batch."""
        await self._spool.claim()
        # The batches of these may still succeed; others may be added meanwhile.
        while arriving := list(self._arriving):
            await asyncio.wait(arriving)
            for each in arriving:
                del self._arriving[each]
        self._must_read_back = False
        unconfirmed = await self._spool.run(self._file.unconfirmed)
        arrived = await asyncio.to_thread(find_arrived, self._settings, unconfirmed)
        await self._spool.run(self._file.settle, unconfirmed, arrived)
        API_SPOOLED.set(await self._spool.run(self._file.depth))
        log.info("spool read back taken=%d arrived=%d", len(unconfirmed), len(arrived))
