"""What the dashboard shows by itself, as server-sent events.

Kafka is asked every two seconds while anybody listens, once for all who do, and not at all while
nobody does.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from duetime.api.dispatcher import Dispatcher
from duetime.api.problems import of_error
from duetime.api.punctuality import Punctuality
from duetime.api.responses import Look, State, Sums, counts
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import DuetimeError, StoreError
from duetime.status import StatusReader
from duetime.stores import Pending, Reader
from duetime.totals import TotalsReader

#: How often Kafka is asked, in seconds.
EVERY_S = 2.0

#: Says nothing, but that the connection is alive.
ALIVE = ":\n\n"


class Lookout:
    """Asks Kafka for all of it. Blocks; one thread at a time."""

    def __init__(self, settings: Settings, reader: Reader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._since_ms = clock.now_ms()
        self._status = StatusReader(settings)
        self._totals = TotalsReader(settings)
        self._punctuality = Punctuality(settings, clock)

    def look(self, spooled: int) -> Look:
        """What is to be seen now. Raises KafkaError."""
        now_ms = self._clock.now_ms()
        slots, trouble = self._waiting(now_ms)
        state = self._state(slots, now_ms)
        return Look(
            at_ms=now_ms,
            since_ms=self._since_ms,
            lateness=self._punctuality.look() if state.leader else None,
            status=state,
            pending=None if slots is None else counts(slots),
            store_trouble=trouble,
            totals=self._sums(),
            spooled=spooled,
        )

    def _waiting(self, now_ms: int) -> tuple[Sequence[Pending] | None, str | None]:
        """What waits; or None, and why. All else is Kafka's to tell, and is told all the same."""
        try:
            return self._reader.pending(now_ms), None
        except StoreError as error:
            return None, error.detail

    def _state(self, slots: Sequence[Pending] | None, now_ms: int) -> State:
        status = self._status.status(slots or (), now_ms)
        unknown = dict.fromkeys(("waiting", "late", "lag_ms")) if slots is None else {}
        return State.model_validate(status, from_attributes=True).model_copy(update=unknown)

    def _sums(self) -> Sums:
        """Of everybody's messages, and not of our own."""
        sums = Sums.model_validate(self._totals.totals(), from_attributes=True)
        own = self._punctuality
        taken_in, released = _less(sums.taken_in, own.sent), _less(sums.released, own.released)
        return sums.model_copy(update={"taken_in": taken_in, "released": released})

    def close(self) -> None:
        """Close its connections."""
        self._status.close()
        self._totals.close()
        self._punctuality.close()


def _less(total: int | None, own: int) -> int | None:
    return None if total is None else max(0, total - own)


class Watch:
    """Hands what is seen to all who listen. Enter it in a running event loop."""

    def __init__(self, open_lookout: Callable[[], Lookout], dispatcher: Dispatcher) -> None:
        self._open = open_lookout
        #: None until somebody listens.
        self._lookout: Lookout | None = None
        self._dispatcher = dispatcher
        self._ended = asyncio.Event()
        self._looking: asyncio.Task[str] | None = None
        self._begun_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        if self._looking:
            await asyncio.wait({self._looking})
        if self._lookout:
            await asyncio.to_thread(self._lookout.close)

    def end(self) -> None:
        """End the events of all who listen."""
        self._ended.set()

    async def events(self) -> AsyncIterator[str]:
        """Until the listener goes, or the server ends."""
        ended = asyncio.create_task(self._ended.wait())
        try:
            while not ended.done():
                looking = self._look()
                done, _ = await asyncio.wait(
                    {looking, ended}, timeout=EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                yield looking.result() if looking in done else ALIVE
                if looking in done:
                    await asyncio.wait({ended}, timeout=EVERY_S)
        finally:
            ended.cancel()

    def _look(self) -> asyncio.Task[str]:
        """The look under way, the last one if that is fresh, or a new one."""
        now_s = time.monotonic()
        if self._looking is None or (self._looking.done() and now_s - self._begun_s >= EVERY_S / 2):
            self._begun_s = now_s
            self._looking = asyncio.create_task(self._told())
        return self._looking

    async def _told(self) -> str:
        spooled = None
        try:
            spooled = await self._dispatcher.spooled()
            self._lookout = self._lookout or self._open()
            seen = await asyncio.to_thread(self._lookout.look, spooled)
        except DuetimeError as error:
            problem = json.loads(bytes(of_error(error).body))
            return event("trouble", json.dumps({"problem": problem, "spooled": spooled}))
        return event("look", seen.model_dump_json())


def event(name: str, data: str) -> str:
    """An event as it goes over the wire; JSON has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n"
