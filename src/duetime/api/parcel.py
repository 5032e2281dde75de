"""What is known about records that were handed to Kafka's client together."""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress

from duetime.errors import KafkaError, RecordRefused

#: The ids that Kafka refuses for good, and why.
Refusals = Mapping[str, RecordRefused]


class Parcel:
    """Its future ends when all are reported: with what Kafka refuses for good.

    If others failed it raises KafkaError: they are to be sent again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.arrived: asyncio.Future[Refusals] = loop.create_future()
        self._loop = loop
        self._left = count
        self._refused: dict[str, RecordRefused] = {}
        self._error: KafkaError | None = None
        # Reports come in from the thread that polls, and from whoever sends.
        self._lock = threading.Lock()

    def reported(self, error: KafkaError | None, id: str) -> None:  # noqa: A002 (what all call it)
        """One of them has arrived, or will not."""
        with self._lock:
            if isinstance(error, RecordRefused):
                self._refused[id] = error
            else:
                self._error = self._error or error
            self._left -= 1
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
            self.arrived.set_result(self._refused)
