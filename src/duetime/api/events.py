"""The live part of the dashboard, as server-sent events.

Kafka is polled every two seconds while anyone listens, once for all listeners.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from duetime.api.dispatcher import Dispatcher
from duetime.api.errors import of_error
from duetime.client.http_models import Answer, PendingCounts, PipelineStatus, SlotCount, Totals
from duetime.client.status import StatusReader, TotalsReader
from duetime.core.clock import Clock
from duetime.core.errors import DuetimeError, StoreError
from duetime.core.settings import Settings
from duetime.stores import PendingSlot, Reader

#: How often Kafka is polled, in seconds.
POLL_INTERVAL_S = 2.0

#: A comment, which shows that the connection is alive.
KEEP_ALIVE = ":\n\n"


class DashboardSnapshot(Answer):
    """The live part of the dashboard at one instant."""

    at_ms: int
    """The instant, epoch ms."""
    status: PipelineStatus
    pending: PendingCounts | None
    """Null while the store does not answer."""
    store_error: str | None
    """The error of the store in that case, as a sentence."""
    totals: Totals
    spooled: int
    """The messages in the spool of this process."""


class StatusPoller:
    """Reads the state from Kafka and the store. Blocks; for one thread at a time."""

    def __init__(self, settings: Settings, reader: Reader, clock: Clock) -> None:
        self._reader, self._clock = reader, clock
        self._status = StatusReader(settings)
        self._totals = TotalsReader(settings)

    def poll(self, spooled: int) -> DashboardSnapshot:
        """Return the present state. Raises KafkaError."""
        now_ms = self._clock.now_ms()
        slots: Sequence[PendingSlot] | None = None
        store_error = None
        try:
            slots = self._reader.pending(now_ms)
        except StoreError as error:
            # Everything else comes from Kafka.
            store_error = error.detail
        status = self._status.status(slots or (), now_ms)
        unknown = dict.fromkeys(("waiting", "late", "lag_ms")) if slots is None else {}
        return DashboardSnapshot(
            at_ms=now_ms,
            status=status.model_copy(update=unknown),
            pending=None if slots is None else pending_counts(slots),
            store_error=store_error,
            totals=self._totals.totals(),
            spooled=spooled,
        )

    def close(self) -> None:
        """Close the connections."""
        self._status.close()
        self._totals.close()


def pending_counts(slots: Sequence[PendingSlot]) -> PendingCounts:
    """Return the counts of slots as a model."""
    return PendingCounts(
        pending=sum(each.count for each in slots),
        slots=[
            SlotCount(from_ms=each.start_ms, to_ms=each.end_ms, count=each.count) for each in slots
        ],
    )


class StatusBroadcaster:
    """Sends each snapshot to all listeners. Enter it in a running event loop."""

    def __init__(self, open_poller: Callable[[], StatusPoller], dispatcher: Dispatcher) -> None:
        self._open_poller, self._dispatcher = open_poller, dispatcher
        #: None until there is a listener.
        self._poller: StatusPoller | None = None
        self._ended = asyncio.Event()
        #: The poll under way, or the last one.
        self._poll: asyncio.Task[str] | None = None
        self._started_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        if self._poll:
            await asyncio.wait({self._poll})
        if self._poller:
            await asyncio.to_thread(self._poller.close)

    def end(self) -> None:
        """End the streams of all listeners."""
        self._ended.set()

    async def events(self) -> AsyncIterator[str]:
        """Iterate over the events until the listener goes, or the server ends."""
        ended = asyncio.create_task(self._ended.wait())
        try:
            while not ended.done():
                poll = self._recent_poll()
                done, _ = await asyncio.wait(
                    {poll, ended}, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                yield poll.result() if poll in done else KEEP_ALIVE
                if poll in done:
                    await asyncio.wait({ended}, timeout=POLL_INTERVAL_S)
        finally:
            ended.cancel()

    def _recent_poll(self) -> asyncio.Task[str]:
        """Return the poll under way, a recent one, or a new one."""
        now_s = time.monotonic()
        is_recent = now_s - self._started_s < POLL_INTERVAL_S / 2
        if self._poll is None or (self._poll.done() and not is_recent):
            self._started_s = now_s
            self._poll = asyncio.create_task(self._event())
        return self._poll

    async def _event(self) -> str:
        spooled = None
        try:
            spooled = await self._dispatcher.spooled()
            self._poller = self._poller or self._open_poller()
            snapshot = await asyncio.to_thread(self._poller.poll, spooled)
        except DuetimeError as error:
            problem = json.loads(bytes(of_error(error).body))
            return event("problem", json.dumps({"problem": problem, "spooled": spooled}))
        return event("snapshot", snapshot.model_dump_json())


def event(name: str, data: str) -> str:
    """Return an event in its wire format; JSON has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n"
