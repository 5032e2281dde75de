"""The one thread that has the spool's file: what is asked is done in the order of asking."""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from duetime.api.spool.errors import failed
from duetime.api.spool.file import Spool
from duetime.outgoing import Outgoing

_Done = TypeVar("_Done")


class Part(NamedTuple):
    """Records for the spool; and when they were handed to Kafka's client, if they were."""

    records: Sequence[Outgoing]
    taken_ms: int | None = None


class Put(NamedTuple):
    """What one request has for the spool, and the numbers that each part gets there."""

    parts: Sequence[Part]
    numbers: "Future[list[list[int]]]"


class SpoolThread:
    """Does with the spool what the event loop asks for."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._executor = ThreadPoolExecutor(1, "spool")
        self._puts: deque[Put] = deque()

    async def ask(self, do: Callable[..., _Done], *arguments: object) -> _Done:
        """What this method of the spool gives. Raises SpoolFailed."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, do, *arguments)
        except sqlite3.Error as error:
            raise failed(error) from error

    async def keep(self, *parts: Part) -> list[list[int]]:
        """As `Spool.put_all`: all of them, or none."""
        put = Put(parts, Future())
        self._puts.append(put)
        self._executor.submit(self._keep)
        return await asyncio.wrap_future(put.numbers)

    def close(self) -> None:
        """Close the file, when all is done that was asked."""
        self._executor.shutdown()
        self._spool.close()

    def _keep(self) -> None:
        """In the thread: one write to the disk for all that came during the last one."""
        puts = [self._puts.popleft() for _ in range(len(self._puts))]
        try:
            kept = iter(self._spool.put_all([part for put in puts for part in put.parts]))
        except Exception as error:  # noqa: BLE001 (whoever waits is to hear of it)
            for put in puts:
                put.numbers.set_exception(error)
            return
        for put in puts:
            put.numbers.set_result([next(kept) for _ in put.parts])
