"""A world with one clock, in which only one task runs at a time: what a seed does, it does again.

Tasks are greenlets that run real code. Each waits in the world alone, and the world goes on with
the one whose time is next. A task belongs to a process, which may be paused or killed between any
two of its steps. Requests on their way belong to none.
"""

import heapq
import random
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """Ends a task: no handler of errors catches it."""


class Process:
    """Tasks that stand still and end together."""

    def __init__(self, name, machine=None):
        self.name, self.machine, self.is_alive = name, machine or name, True
        self.paused_until_s = 0.0
        #: In the order of their start.
        self.tasks = {}


class Task(greenlet):
    """A thread of a process."""

    def __init__(self, run, process):
        super().__init__(run)
        self.process = process
        #: Of its last wait: others have ended already.
        self.wait = 0
        #: It may clean up, and begins nothing.
        self.is_ending = False


class World:
    """Runs tasks on simulated time, in seconds."""

    def __init__(self, seed):
        self.random = random.Random(seed)  # noqa: S311 (no secret)
        self.now_s = 0.0
        self.nature = Process("nature")
        self._order = count()
        self._entries = []
        self._hub = getcurrent()
        #: The first error of a task.
        self.error = None
        #: Called at each step of a process, with its name: it may pause it.
        self.disturb = lambda *_: None
        self.history = []

    @property
    def process(self):
        """The process of the task that runs."""
        task = getcurrent()
        return task.process if isinstance(task, Task) else self.nature

    def start(self, run, process=None):
        """Run a task from now on, of the present process unless another is given."""
        process = process or self.process

        def until_done():
            try:
                if not task.is_ending:
                    run()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 (raised by run)
                self.error = self.error or error
            finally:
                process.tasks.pop(task, None)

        task = Task(until_done, process)
        task.parent = self._hub
        process.tasks[task] = None
        self._push(0.0, task)
        return task

    def at(self, delay_s, action):
        """Call `action` after a time, whatever happens to the process that asks for it."""
        heapq.heappush(self._entries, (self.now_s + delay_s, next(self._order), None, 0, action))

    def _push(self, delay_s, task):
        task.wait += 1
        entry = self.now_s + delay_s, next(self._order), task, task.wait, None
        heapq.heappush(self._entries, entry)

    def sleep(self, seconds):
        """Let others run, for so long, or until `wake`. Only of tasks."""
        task = getcurrent()
        if task.is_ending or not task.process.is_alive:
            raise Killed
        self.disturb(task.process, None)
        self._push(max(0.0, seconds), task)
        self._hub.switch()

    def step(self, name=None):
        """Let a fault come between two steps of a process, some of which have a name."""
        self.disturb(self.process, name)
        self.sleep(0)

    def wake(self, task):
        """End the wait of a task."""
        if not task.dead:
            self._push(0.0, task)

    def between(self, shortest_s, longest_s):
        """Let others run, for a random time."""
        self.sleep(self.random.uniform(shortest_s, longest_s))

    def kill(self, process):
        """End all tasks of a process, at once unless one of them asks for it."""
        process.is_alive = False
        for each in list(process.tasks):
            if each is not getcurrent():
                self.end(each)

    def end(self, task):
        """Throw Killed into a task; come back when it has ended."""
        task.is_ending = True
        if not task:
            # It has not begun, or has ended.
            return
        task.parent = getcurrent()
        task.throw(Killed)
        task.process.tasks.pop(task, None)

    def note(self, text):
        """Write a line of the history."""
        self.history.append(f"{self.now_s:7.3f} {text}")

    def pause(self, process, seconds):
        """Stop a process for so long."""
        process.paused_until_s = max(process.paused_until_s, self.now_s + seconds)

    def run(self, seconds):
        """Let so much time pass, then end all tasks. Raises what a task has raised."""
        processes = {self.nature: None}
        while self._entries and self._entries[0][0] < seconds and self.error is None:
            self.now_s, _, task, wait, action = heapq.heappop(self._entries)
            if action is not None:
                action()
            elif not task.dead and task.wait == wait:
                process = task.process
                processes[process] = None
                if process.paused_until_s > self.now_s:
                    self._push(process.paused_until_s - self.now_s, task)
                elif process.is_alive:
                    task.parent = self._hub
                    task.switch()
        for each in processes:
            self.kill(each)
        if self.error is not None:
            raise self.error

    @property
    def time(self):
        """In place of the module `time`."""
        return SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)

    @property
    def threading(self):
        """In place of the module `threading`. Its locks are real ones: no task waits with one."""
        return SimpleNamespace(
            Lock=threading.Lock,
            Event=lambda: Event(self),
            Thread=lambda target, **_: Thread(self, target),
            Timer=lambda seconds, run, args: Thread(
                self, lambda: (self.sleep(seconds), run(*args))
            ),
        )


class Event:
    """In place of threading.Event."""

    def __init__(self, world):
        self._world, self._is_set, self._waiting = world, False, []

    def is_set(self):
        return self._is_set

    def set(self):
        self._is_set = True
        for each in self._waiting:
            self._world.wake(each)

    def clear(self):
        self._is_set = False

    def wait(self, timeout=None):
        until_s = float("inf") if timeout is None else self._world.now_s + timeout
        task = getcurrent()
        self._waiting.append(task)
        try:
            while not self._is_set and self._world.now_s < until_s:
                self._world.sleep(min(until_s - self._world.now_s, 1e6))
        finally:
            self._waiting.remove(task)
        return self._is_set


class Thread:
    """In place of threading.Thread."""

    def __init__(self, world, target):
        self._world, self._target, self._done = world, target, Event(world)
        self._is_started = False

    def start(self):
        self._is_started = True

        def run():
            try:
                self._target()
            finally:
                self._done.set()

        self._world.start(run)

    def is_alive(self):
        return self._is_started and not self._done.is_set()

    def join(self, timeout=None):
        self._done.wait(timeout)


class Pool:
    """In place of ThreadPoolExecutor. A future is an event, and drops the task's error."""

    def __init__(self, world, workers):
        self._world, self._free, self._queue = world, workers, deque()
        self._running = set()

    def submit(self, run, *args):
        future = Event(self._world)
        self._queue.append((future, lambda: run(*args)))
        if self._free:
            self._free -= 1
            self._world.start(self._work)
        return future

    def _work(self):
        try:
            while self._queue:
                future, run = self._queue.popleft()
                self._running.add(future)
                try:
                    with suppress(Exception):
                        run()
                finally:
                    self._running.discard(future)
                    future.set()
        finally:
            self._free += 1

    def shutdown(self, *, wait=True, cancel_futures=False):
        if cancel_futures:
            while self._queue:
                self._queue.popleft()[0].set()
        for each in list(self._running) + [each for each, _ in self._queue]:
            if wait:
                each.wait()


def wait_all(futures, timeout=None):
    """In place of concurrent.futures.wait."""
    for each in futures:
        each.wait(timeout)
