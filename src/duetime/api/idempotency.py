"""Repeated requests: one that comes while the first is in flight gets the answer of the first.

It waits for the first one, and sends only what that did not. After that, the id itself helps: the
same id and instant are the same message, which is delivered once. A schedule is sent each time:
another definition replaces it, and the same one changes nothing.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from duetime.api.dispatcher import Dispatcher, Submission
from duetime.api.errors import IdTaken
from duetime.api.requests import NewMessage
from duetime.core import headers as H
from duetime.core.errors import UnknownMessage
from duetime.core.messages import MessageId
from duetime.core.records import IntakeRecord

#: How many rescheduled messages are kept: their cancellations arrive within some ms.
MAX_RESCHEDULED = 1_000

ResultT = TypeVar("ResultT")

#: Returns a record for each message, given the due times of earlier tries by id.
MakeRecords = Callable[[Mapping[str, int]], Sequence[IntakeRecord]]


@dataclass(slots=True)
class IdempotencyEntry:
    """A message in flight with an id of its sender."""

    record: IntakeRecord
    #: What a repeat has in common with it: all but the instant of `in`.
    content: object
    #: Set at the end of the request that sends it.
    ended: asyncio.Event
    #: Whether Kafka has it, or else the spool; None where neither has, and a repeat sends it.
    in_kafka: bool | None = None


class IdempotentRequest:
    """The messages of one request, in the block of `IdempotencyKeys.begin`."""

    def __init__(self, caller: str, records: Sequence[IntakeRecord]) -> None:
        self._caller = caller
        #: One for each message, for its answer.
        self.records = records
        #: Those that are still to be sent, each once.
        self.fresh: list[IntakeRecord] = []
        #: Whether Kafka has all accepted ones; otherwise the spool has some.
        self.in_kafka = True
        #: The fresh ones for which repeated requests wait, by caller and the ids of their senders.
        self.claimed: dict[tuple[str, str], IdempotencyEntry] = {}
        self.submission = Submission()
        self.ended = asyncio.Event()

    def add(
        self, message: NewMessage, record: IntakeRecord, earlier: IdempotencyEntry | None
    ) -> None:
        """Claim a message, unless an earlier request sent it. Raises IdTaken."""
        if message.id is None or record.schedule:
            self.fresh.append(record)
            return
        headers = [each for each in record.headers if each[0] != H.DUE_AT_MS]
        content = message.at, message.in_, record.key, record.value, headers
        key = self._caller, message.id
        if earlier and earlier.content != content:
            raise IdTaken(f"id {message.id} is another message's, being sent: choose another")
        if earlier and earlier.in_kafka is not None:
            self.in_kafka = self.in_kafka and earlier.in_kafka
        elif twin := self.claimed.get(key):
            if twin.content != content:
                raise IdTaken(f"id {message.id} is that of two messages: give each its own")
        else:
            self.fresh.append(record)
            # Others that waited for the earlier one have this request's outcome, too.
            entry = earlier or IdempotencyEntry(record, content, self.ended)
            entry.ended = self.ended
            self.claimed[key] = entry

    async def send(self, dispatcher: Dispatcher) -> None:
        """Send the fresh messages. Raises as `Dispatcher.send`."""
        if self.fresh:
            submission = self.submission if self.claimed else None
            in_kafka = await dispatcher.send(self.fresh, submission)
            self.in_kafka = self.in_kafka and in_kafka


class IdempotencyKeys:
    """The messages in flight by the ids of their senders. For the event loop."""

    def __init__(self) -> None:
        #: By caller and id.
        self._in_flight: dict[tuple[str, str], IdempotencyEntry] = {}

    @asynccontextmanager
    async def begin(
        self, messages: Sequence[NewMessage], make_records: MakeRecords, caller: str = ""
    ) -> AsyncIterator[IdempotentRequest]:
        """Wait for requests with the same ids, and claim all ids for the block.

        Raises IdTaken where an id in flight belongs to another message.
        """
        earlier = dict[str, IdempotencyEntry]()
        # All ids are claimed together, and none while this request waits, so that no two requests
        # wait for each other. Nothing may be awaited from here to the claim.
        while under_way := self._find(messages, caller):
            earlier |= under_way
            await next(iter(under_way.values())).ended.wait()
        request = IdempotentRequest(
            caller, make_records({id_: each.record.id.due_ms for id_, each in earlier.items()})
        )
        for message, record in zip(messages, request.records, strict=True):
            request.add(message, record, earlier.get(message.id or ""))
        self._in_flight |= request.claimed
        try:
            yield request
        finally:
            self._end_when_decided(request)

    def _find(self, messages: Sequence[NewMessage], caller: str) -> dict[str, IdempotencyEntry]:
        """Return those of these messages that are in flight, by id."""
        ids = (each.id for each in messages if each.id and each.cron is None)
        return {id_: entry for id_ in ids if (entry := self._in_flight.get((caller, id_)))}

    def _end_when_decided(self, request: IdempotentRequest) -> None:
        """End the request once nothing can accept its messages any longer."""
        submission, entries = request.submission, request.claimed.values()
        for entry in entries:
            entry.in_kafka = submission.accepted.get(entry.record.id)
        if submission.outstanding and any(each.in_kafka is None for each in entries):
            first = asyncio.ensure_future(
                asyncio.wait(submission.outstanding, return_when=asyncio.FIRST_COMPLETED)
            )
            first.add_done_callback(lambda _: self._end_when_decided(request))
            return
        for key in request.claimed:
            del self._in_flight[key]
        request.ended.set()


class SharedWork:
    """Runs functions in threads, one of each key at a time. For the event loop.

    The work of a request that timed out continues, and is shared by the repeated request.
    """

    def __init__(self) -> None:
        self._running = dict[Hashable, asyncio.Task[Any]]()

    async def run(self, key: Hashable, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns, or what work of this key under way returns."""
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(run_in_threadpool(work))
            self._running[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        result: ResultT = await asyncio.shield(task)
        return result

    def _end(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Where no request waits any longer, asyncio would log the error as never retrieved.
            task.exception()


class RescheduledIds:
    """The latest rescheduled messages. Thread-safe.

    The old message is cancelled some ms after the answer. A second request would still find it
    until then, and the message would be delivered at both times.
    """

    def __init__(self) -> None:
        self._ids = deque[MessageId](maxlen=MAX_RESCHEDULED)
        self._lock = threading.Lock()

    @contextmanager
    def once(self, identity: MessageId) -> Iterator[None]:
        """Enter the block once for each message, unless it fails. Raises UnknownMessage."""
        with self._lock:
            if identity in self._ids:
                raise UnknownMessage(
                    f"message {identity} is being rescheduled, or was: it goes on under a new id"
                )
            self._ids.append(identity)
        try:
            yield
        except BaseException:
            with self._lock, suppress(ValueError):
                self._ids.remove(identity)
            raise
