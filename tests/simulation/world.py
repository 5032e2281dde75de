"""A world with one clock, in which only one task runs at a time: what a seed does, it does again.

Tasks are threads that run real code. Each waits in `sleep` alone, and the world wakes the one whose
time is next.
"""

import heapq
import random
import threading
from itertools import count


class TheEnd(BaseException):
    """Ends a task once the world's time is over: no handler of errors catches it."""


class World:
    """Runs tasks on simulated time, in seconds."""

    def __init__(self, seed):
        self.random = random.Random(seed)  # noqa: S311 (no secret)
        self.now_s = 0.0
        self._order = count()
        self._sleeping = []
        self._tasks, self._idle = [], threading.Semaphore(0)
        self._is_over = False
        #: The first error of a task.
        self.error = None

    def start(self, run):
        """Run a task from now on."""
        thread = threading.Thread(target=self._task, args=(run,), daemon=True)
        self._tasks.append(thread)
        thread.start()
        self._idle.acquire()

    def sleep(self, seconds):
        """Let others run, for so long. Only of tasks."""
        if self._is_over:
            raise TheEnd
        awake = threading.Semaphore(0)
        heapq.heappush(self._sleeping, (self.now_s + seconds, next(self._order), awake))
        self._idle.release()
        awake.acquire()
        if self._is_over:
            raise TheEnd

    def between(self, shortest_s, longest_s):
        """Let others run, for a random time."""
        self.sleep(self.random.uniform(shortest_s, longest_s))

    def run(self, seconds):
        """Let so much time pass, then end all tasks. Raises what a task has raised."""
        while self._sleeping and self._sleeping[0][0] < seconds and self.error is None:
            self.now_s, _, awake = heapq.heappop(self._sleeping)
            awake.release()
            self._idle.acquire()
        self._is_over = True
        while self._sleeping:
            heapq.heappop(self._sleeping)[2].release()
            self._idle.acquire()
        for each in self._tasks:
            each.join()
        if self.error is not None:
            raise self.error

    def _task(self, run):
        try:
            self.sleep(0)
            run()
        except TheEnd:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by run)
            self.error = self.error or error
        finally:
            self._idle.release()
