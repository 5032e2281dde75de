"""Work that equal requests share: a try that was given up is still going on when the next comes."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

_Result = TypeVar("_Result")


class SharedWork:
    """Runs functions in threads; of one key, one at a time. In the event loop."""

    def __init__(self) -> None:
        self._running = dict[Hashable, asyncio.Task[Any]]()

    async def run(self, key: Hashable, work: Callable[[], _Result]) -> _Result:
        """Return what the work of this key returns, or raise what it raises.

        Work of the same key that is under way is waited for instead. It goes on where whoever waits
        for it is cancelled.
        """
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(run_in_threadpool(work))
            self._running[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        result: _Result = await asyncio.shield(task)
        return result

    def _end(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Where no request waits any more, asyncio would log the error as one never seen.
            task.exception()
