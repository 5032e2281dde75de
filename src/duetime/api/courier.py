"""Records on their way to Kafka, and who waits for them. Runs in the event loop.

```
nothing is spooled    -> Kafka's client -> acknowledged within 1 s: Kafka has it
                                        -> not: spooled as taken; the client goes on trying
something is spooled  -> spool          -> drained in order, once what is before it has arrived
```
The client tries for ever, and sends each record once (idempotence): so this process hears whether a
record has arrived, or ends before. Then the next one reads back what has (`readback`).
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeVar

from duetime.api.readback import arrived
from duetime.api.spool import Spool, SpoolFull
from duetime.client import Producer
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import DuetimeError, KafkaError
from duetime.metrics import API_MESSAGES, API_SPOOLED
from duetime.outgoing import Outgoing

log = logging.getLogger(__name__)

#: How long Kafka may take to acknowledge before the spool answers for it, in seconds.
ACKNOWLEDGE_S = 1.0

#: How long the thread waits for a report before it looks whether it is to end, in seconds.
POLL_S = 0.1

#: How long what is under way may take to arrive at the end, in seconds: it is spooled anyway.
FLUSH_S = 0.5

#: How long to wait before Kafka is asked again, in seconds.
ASK_AGAIN_S = 1.0

#: How many of the spool are handed over at a time.
AT_ONCE = 1_000

#: So few that are left in the spool are waited for: if who comes then was spooled as well, the
#: spool would never be empty.
FEW = 100

#: Never given up: what was handed over may have arrived, and only trying on tells.
FOR_EVER: dict[str, Any] = {"delivery.timeout.ms": 0, "reconnect.backoff.max.ms": 1_000}

_Done = TypeVar("_Done")


class Put(NamedTuple):
    """What one request has for the spool, and the numbers that it gets there."""

    records: Sequence[Outgoing]
    taken_ms: int | None
    numbers: "Future[list[int]]"


class Courier:
    """Sends records. Enter it in a running event loop; it closes the spool at its end."""

    def __init__(self, settings: Settings, spool: Spool, clock: Clock) -> None:
        self._settings = settings
        self._spool = spool
        self._clock = clock
        self._producer = Producer(settings, **FOR_EVER)
        self._ended = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="courier", daemon=True)
        # One thread: what is asked of the spool is done in the order in which it was asked.
        self._clerk = ThreadPoolExecutor(1, "spool")
        #: Whether the last one that was to be spooled found no room.
        self.is_full = False
        #: Whether records have to queue behind others in the spool.
        self._spooling = spool.depth() > 0
        self._putting = 0
        self._puts: deque[Put] = deque()
        #: The numbers of what was handed over before it was spooled.
        self._arriving: dict[asyncio.Future[None], Sequence[int]] = {}
        self._filled = asyncio.Event()
        #: Whether few are left in the spool, and Kafka takes them.
        self._ending = False
        self._emptied = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._poller.start()
        if self._spooling:
            self._filled.set()
        self._drainer = asyncio.create_task(self._drain(crashed=self._spooling))
        return self

    async def __aexit__(self, *_: object) -> None:
        """What has not arrived by then stays in the spool."""
        self._drainer.cancel()
        with suppress(asyncio.CancelledError):
            await self._drainer
        await asyncio.to_thread(self._producer.flush, FLUSH_S)
        self._ended.set()
        await asyncio.to_thread(self._poller.join)
        self._clerk.shutdown()
        self._spool.close()

    async def send(self, records: Sequence[Outgoing]) -> bool:
        """Returns whether Kafka has them; if not, the spool has. Raises KafkaError, SpoolFull."""
        if not records:
            return not self._spooling
        if self._spooling and self._ending:
            await self._end_of_spool()
        if self._spooling:
            # To the end, also where the request's time is up: what is put must be followed.
            await asyncio.shield(self._put(records))
            return False
        taken_ms, arriving = self._clock.now_ms(), self._hand_over(records)
        await asyncio.wait({arriving}, timeout=ACKNOWLEDGE_S)
        if not arriving.done():
            await asyncio.shield(self._put(records, taken_ms, arriving))
            return False
        arriving.result()
        API_MESSAGES.labels("kafka").inc(len(records))
        return True

    async def spooled(self) -> int:
        """How many are in the spool."""
        count: int = await self._ask(self._spool.depth)
        return count

    async def _end_of_spool(self) -> None:
        """Wait a moment for the spool to be empty."""
        try:
            await asyncio.wait_for(self._emptied.wait(), ACKNOWLEDGE_S)
        except TimeoutError:
            # Kafka does not take them after all: nobody else need wait.
            self._ending = False

    async def _put(
        self,
        records: Sequence[Outgoing],
        taken_ms: int | None = None,
        arriving: "asyncio.Future[None] | None" = None,
    ) -> None:
        """Spool them. Those that are arriving are taken out when they have."""
        if not self._spooling:
            log.warning("Kafka does not answer: what is accepted goes into the spool")
        self._spooling = True
        self._emptied.clear()
        self._putting += 1
        try:
            numbers = await self._kept(records, taken_ms)
        except SpoolFull:
            self.is_full = True
            raise
        finally:
            self._putting -= 1
            self._filled.set()
        self.is_full = False
        API_MESSAGES.labels("spool").inc(len(records))
        API_SPOOLED.inc(len(numbers))
        if arriving:
            self._arriving[arriving] = numbers

    async def _kept(self, records: Sequence[Outgoing], taken_ms: int | None) -> list[int]:
        put = Put(records, taken_ms, Future())
        self._puts.append(put)
        self._clerk.submit(self._keep)
        return await asyncio.wrap_future(put.numbers)

    def _keep(self) -> None:
        """In the clerk's thread: one write to the disk for all that came during the last one."""
        puts = [self._puts.popleft() for _ in range(len(self._puts))]
        try:
            kept = self._spool.put_all([(each.records, each.taken_ms) for each in puts])
        except Exception as error:  # noqa: BLE001 (whoever waits is to hear of it)
            for put in puts:
                put.numbers.set_exception(error)
            return
        for put, numbers in zip(puts, kept, strict=True):
            put.numbers.set_result(numbers)

    async def _drain(self, *, crashed: bool) -> None:
        """Hand over what is spooled, in order, for as long as there is any; again and again."""
        while True:
            await self._filled.wait()
            try:
                if crashed:
                    await self._read_back()
                    crashed = False
                await self._drain_once()
            except DuetimeError as error:
                log.warning("the spool waits: %s", error)
                crashed = True
                await asyncio.sleep(ASK_AGAIN_S)

    async def _drain_once(self) -> None:
        """A crash between two lines leaves what is read back."""
        # What was handed over before it was spooled is before all that is in the spool.
        while self._arriving:
            arriving, numbers = next(iter(self._arriving.items()))
            await arriving
            await self._remove(numbers)
            del self._arriving[arriving]
        taken = await self._ask(self._spool.take, AT_ONCE, self._clock.now_ms())
        self._ending = len(taken) < FEW
        if taken:
            await self._hand_over([each.record for each in taken])
            await self._remove([each.number for each in taken])
        elif not (self._putting or self._arriving):
            self._filled.clear()
            self._spooling = self._ending = False
            self._emptied.set()
            log.info("the spool is empty")

    async def _remove(self, numbers: Sequence[int]) -> None:
        await self._ask(self._spool.remove, numbers)
        API_SPOOLED.dec(len(numbers))
        self.is_full = False

    async def _read_back(self) -> None:
        """Find out what the last process, or a failed hand-over, has sent. Raises KafkaError."""
        if self._arriving:
            # Their client may still succeed.
            await asyncio.wait(self._arriving)
            self._arriving.clear()
        taken = await self._ask(self._spool.taken)
        found = await asyncio.to_thread(arrived, self._settings, taken)
        await self._ask(self._spool.settle, found)
        API_SPOOLED.set(await self._ask(self._spool.depth))
        log.info("read back taken=%d arrived=%d", len(taken), len(found))

    def _hand_over(self, records: Sequence[Outgoing]) -> "asyncio.Future[None]":
        """The future ends when all have arrived, or raises KafkaError."""
        parcel = Parcel(asyncio.get_running_loop(), len(records))
        for record in records:
            self._producer.send(record, parcel.reported)
        return parcel.arrived

    def _poll(self) -> None:
        while not self._ended.is_set():
            self._producer.poll(POLL_S)

    async def _ask(self, do: Callable[..., _Done], *arguments: object) -> _Done:
        return await asyncio.get_running_loop().run_in_executor(self._clerk, do, *arguments)


class Parcel:
    """What is known about records that were handed over together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.arrived: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._left = count
        self._error: KafkaError | None = None
        # Reports come in from the thread that polls, and from whoever sends.
        self._lock = threading.Lock()

    def reported(self, error: KafkaError | None, _: str) -> None:
        """One of them has arrived, or will not."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            left = self._left
        if not left:
            # At the end nobody may be there any more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        # Who waited may have gone.
        if self.arrived.done():
            return
        if self._error:
            self.arrived.set_exception(self._error)
            # Who waited may have gone: nobody need be told then.
            self.arrived.exception()
        else:
            self.arrived.set_result(None)
