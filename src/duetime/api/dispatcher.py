"""Records on their way to Kafka, and who waits for them. Runs in the event loop.

```
nothing is spooled    -> Kafka's client -> acknowledged within 1 s: Kafka has it
                                        -> not: spooled as taken; the client goes on trying
                                        -> has no room for it: spooled
something is spooled  -> spool          -> drained in order, once what is before it has arrived
```
The client tries for ever, and sends each record once (idempotence): so this process hears whether a
record has arrived, or ends before. Then the next one reads back what has (`spool.readback`).

What Kafka refuses is sent once more alone: its client sends several at a time, and they are refused
together. What is refused alone, too, is the sender's mistake, or is set aside in the spool.

A client that fails for good is replaced. What it held may have arrived, and is found out as after a
crash.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from duetime.api.async_producer import AsyncProducer
from duetime.api.producer_batch import ProducerBatch, Refusals
from duetime.api.spool.claim import SpoolClaim
from duetime.api.spool.errors import SpoolFull
from duetime.api.spool.file import AT_ONCE_BYTES, Spool
from duetime.api.spool.readback import arrived
from duetime.api.spool.rows import Spooled, apart
from duetime.api.spool.thread import Part, SpoolThread
from duetime.api.submission import Submission
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import DuetimeError, KafkaError, RecordRefused
from duetime.message import MessageId
from duetime.metrics import API_MESSAGES, API_REFUSED, API_SPOOLED
from duetime.outgoing import Outgoing, cancelled

log = logging.getLogger(__name__)

#: How long Kafka may take to acknowledge before the spool answers for it, in seconds.
ACKNOWLEDGE_S = 1.0

#: How long what is under way may take to arrive at the end, in seconds: it is spooled anyway.
FLUSH_S = 0.5

#: How long to wait before Kafka is asked again, in seconds.
ASK_AGAIN_S = 1.0

#: How many of the spool are handed over at a time.
AT_ONCE = 1_000

#: So few that are left in the spool are waited for: if who comes then was spooled as well, the
#: spool would never be empty.
FEW = 100


class Dispatcher:
    """Sends records. Enter it in a running event loop; it closes the spool at its end."""

    def __init__(
        self,
        settings: Settings,
        spool: Spool,
        clock: Clock,
        on_aside: Callable[[MessageId], None] | None = None,
    ) -> None:
        self._settings = settings
        self._spool = spool
        self._clock = clock
        #: Called with each message of the spool that Kafka refuses for good.
        self._on_aside = on_aside
        self._producer = AsyncProducer(settings)
        self._thread = SpoolThread(spool)
        self._claim = SpoolClaim(settings, spool, self._thread)
        #: Whether the last one that was to be spooled found no room.
        self.is_full = False
        #: Whether what is in the spool cannot be sent, and not because of Kafka.
        self.is_stuck = False
        #: Whether records have to queue behind others in the spool.
        self._spooling = (depth := spool.depth()) > 0
        API_SPOOLED.set(depth)
        #: Whether some of what is in the spool may have arrived, and nobody will report it.
        self._crashed = self._spooling
        self._putting = 0
        #: The numbers of what was handed over before it was spooled.
        self._arriving: dict[asyncio.Future[Refusals], Sequence[int]] = {}
        self._filled = asyncio.Event()
        #: Whether few are left in the spool, and Kafka takes them.
        self._ending = False
        self._emptied = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._spooling:
            self._filled.set()
        self._poller = asyncio.create_task(self._producer.take_reports())
        self._asker = asyncio.create_task(self._claim.keep_up(lambda: self._spooling))
        self._drainer = asyncio.create_task(self._drain())
        return self

    async def __aexit__(self, *_: object) -> None:
        """What has not arrived by then stays in the spool."""
        for each in (self._drainer, self._asker, self._poller):
            await _cancelled(each)
        await self._producer.flush(FLUSH_S)
        self._thread.close()

    async def send(self, records: Sequence[Outgoing], submission: Submission | None = None) -> bool:
        """Returns whether Kafka has them; if not, the spool has.

        Raises KafkaError, RecordRefused, SpoolFull, SpoolFailed: some may be taken then, and the
        submission is told which.
        """
        submission = submission or Submission()
        refused = await self._sent(records, submission)
        if not refused:
            return refused is not None
        alone = [each for each in records if str(each.id) in refused]
        return await self._sent_alone(alone, submission)

    async def find(self, id: MessageId) -> Outgoing | None:  # noqa: A002 (what all call it)
        """The message, if it is in the spool. Raises SpoolFailed."""
        return await self._thread.ask(self._spool.find, id) if self._is_searched else None

    async def withdraw(self, id: MessageId) -> bool:  # noqa: A002 (what all call it)
        """Take the message out of the spool; False where it is not there, or taken already.

        Kafka may have it, too, by an earlier try of which this process knows nothing: where there
        is time for that, a cancel is spooled in its place.
        """
        if not self._is_searched:
            return False
        cancel = cancelled(id, self._settings)
        is_heard = id.due_ms - self._clock.now_ms() >= self._settings.horizon_ms
        instead = replace(cancel, id=apart(id)) if is_heard else None
        withdrawn = await self._thread.ask(self._spool.withdraw, id, instead)
        if withdrawn and not instead:
            API_SPOOLED.dec()
        return withdrawn

    async def spooled(self) -> int:
        """How many are in the spool."""
        count: int = await self._thread.ask(self._spool.depth)
        return count

    @property
    def _is_searched(self) -> bool:
        """Whether there is anything in the spool that is for this Kafka."""
        return self._spooling and not self._claim.is_refused

    async def _end_of_spool(self) -> None:
        """Wait a moment for the spool to be empty."""
        try:
            await asyncio.wait_for(self._emptied.wait(), ACKNOWLEDGE_S)
        except TimeoutError:
            # Kafka does not take them after all: nobody else need wait.
            self._ending = False

    async def _sent(self, records: Sequence[Outgoing], submission: Submission) -> Refusals | None:
        """Which of them Kafka refuses; None where it does not answer, and the spool has them."""
        if self._spooling and self._ending:
            await self._end_of_spool()
        if self._spooling:
            await self._spooled_by(submission, records)
            return None
        taken_ms, batch = self._clock.now_ms(), self._producer.hand_over(records)
        submission.handed_over(batch)
        if not batch.rest:
            await asyncio.wait({batch.arrived}, timeout=ACKNOWLEDGE_S)
        # What there is no room for is behind those, and before all that comes from here on.
        if batch.rest or batch.is_lost or not batch.arrived.done():
            await self._spooled_by(submission, records, taken_ms, batch)
            return None
        refused = batch.arrived.result()
        API_MESSAGES.labels("kafka").inc(len(records) - len(refused))
        return refused

    async def _sent_alone(self, records: Sequence[Outgoing], submission: Submission) -> bool:
        """Send each once more. Raises RecordRefused when all were tried."""
        errors, in_kafka = list[RecordRefused](), True
        for record in records:
            refused = await self._sent([record], submission)
            in_kafka = in_kafka and refused is not None
            errors += (refused or {}).values()
        if errors:
            raise errors[0]
        return in_kafka

    async def _spooled_by(
        self,
        submission: Submission,
        records: Sequence[Outgoing],
        taken_ms: int | None = None,
        batch: ProducerBatch | None = None,
    ) -> None:
        """To the end, also where the request's time is up: what is put must be followed."""
        self._begin_to_put()
        writing = asyncio.create_task(self._put(records, taken_ms, batch))
        submission.written(writing, records)
        await asyncio.shield(writing)

    def _begin_to_put(self) -> None:
        """From here on, what comes has to queue."""
        if not self._spooling:
            log.warning("Kafka does not answer: what is accepted goes into the spool")
        self._spooling = True
        self._emptied.clear()
        self._putting += 1

    async def _put(
        self,
        records: Sequence[Outgoing],
        taken_ms: int | None = None,
        batch: ProducerBatch | None = None,
    ) -> None:
        """Spool them. Those that are arriving, in a batch, are taken out when they have."""
        handed, rest = (batch.records, batch.rest) if batch else ((), records)
        numbers: Sequence[int] = ()
        try:
            self._claim.require()
            numbers, more = await self._thread.keep(Part(handed, taken_ms), Part(rest))
        except SpoolFull:
            self.is_full = True
            raise
        finally:
            self._putting -= 1
            if batch and batch.is_lost:
                self._crashed = True
            elif batch:
                # Also what was not kept may arrive: it is before all that comes now.
                self._arriving[batch.arrived] = numbers
            self._filled.set()
        self.is_full = False
        API_MESSAGES.labels("spool").inc(len(records))
        API_SPOOLED.inc(len(numbers) + len(more))

    async def _drain(self) -> None:
        """Hand over what is spooled, in order, for as long as there is any; again and again."""
        while True:
            await self._filled.wait()
            try:
                if self._crashed:
                    await self._read_back()
                await self._drain_once()
            except Exception as error:  # noqa: BLE001 (ended, it would strand what was accepted)
                self.is_stuck = self._claim.is_refused or not isinstance(error, KafkaError)
                # Of a stranger's error nobody knows whose words are in it.
                told = error if isinstance(error, DuetimeError) else type(error).__name__
                log.warning("the spool waits: %s", told)
                self._crashed = True
                await asyncio.sleep(ASK_AGAIN_S)

    async def _drain_once(self) -> None:
        """A crash between two lines leaves what is read back."""
        # What was handed over before it was spooled is before all that is in the spool.
        while self._arriving:
            arriving, numbers = next(iter(self._arriving.items()))
            if refused := await arriving:
                # They are found not to have arrived, and come again with the next ones.
                raise KafkaError(f"Kafka has refused {len(refused)} of them: sending them again")
            await self._remove(numbers)
            del self._arriving[arriving]
        await self._claim.confirm()
        taken = await self._thread.ask(self._spool.take, AT_ONCE, self._clock.now_ms())
        self.is_stuck = False
        size = sum(each.size_bytes for each in taken)
        self._ending = len(taken) < FEW and size < AT_ONCE_BYTES
        if taken:
            refused = await self._producer.sent([each.record for each in taken])
            there = [each.number for each in taken if str(each.record.id) not in refused]
            await self._remove(there)
            await self._set_aside([each for each in taken if str(each.record.id) in refused])
        elif not (self._putting or self._arriving or self._crashed):
            self._filled.clear()
            self._spooling = self._ending = False
            self._emptied.set()
            log.info("the spool is empty")

    async def _set_aside(self, refused: Sequence[Spooled]) -> None:
        """Those that are refused alone, too: they would hold up all that is behind them."""
        for each in refused:
            again = await self._producer.sent([each.record])
            if not again:
                await self._remove([each.number])
                continue
            await self._thread.ask(self._spool.set_aside, each.number)
            API_SPOOLED.dec()
            API_REFUSED.inc()
            for error in again.values():
                log.warning("set aside id=%s error=%s", each.record.id, error)
            if self._on_aside:
                self._on_aside(each.record.id)

    async def _remove(self, numbers: Sequence[int]) -> None:
        await self._thread.ask(self._spool.remove, numbers)
        API_SPOOLED.dec(len(numbers))
        self.is_full = False

    async def _read_back(self) -> None:
        """Find out what the last process, or a failed hand-over, has sent. Raises KafkaError."""
        await self._claim.confirm()
        # Their client may still succeed; others may be spooled as arriving meanwhile.
        while waited := list(self._arriving):
            await asyncio.wait(waited)
            for each in waited:
                del self._arriving[each]
        self._crashed = False
        taken = await self._thread.ask(self._spool.taken)
        found = await asyncio.to_thread(arrived, self._settings, taken)
        await self._thread.ask(self._spool.settle, taken, found)
        API_SPOOLED.set(await self._thread.ask(self._spool.depth))
        log.info("read back taken=%d arrived=%d", len(taken), len(found))


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
