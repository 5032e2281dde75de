"""Idempotency: what senders called their messages, so that a second try gets the first's answer.

A second try that comes while the first is under way waits for it, and sends only if that failed.

Kept in memory, for the latest ids of this process. Beyond that the id itself helps: with the same
`at`, it is the same message, and is delivered once if it still waits. A series is not kept: another
definition takes its place, and the same one changes nothing.

What one caller calls its messages is no business of another's. But of an id and an instant the
wheel keeps one message, whosesoever it is: another caller's is refused, where that is known here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from duetime.api.dispatcher import Dispatcher
from duetime.api.latest import Latest
from duetime.api.problems import IdTaken
from duetime.api.requests import NewMessage
from duetime.api.submission import Submission
from duetime.message import DUE_AT_MS, MessageId
from duetime.outgoing import Outgoing

_Name = TypeVar("_Name")

#: How many ids are remembered: some 600 bytes each.
MOST = 100_000


@dataclass(slots=True, kw_only=True)
class Known:
    """A message that was to be sent."""

    print: bytes
    due_ms: int
    #: Whether it may have left this process.
    is_begun: bool = False
    #: Whether Kafka has it, or the spool; None of neither: another try sends it again, under the
    #: same id.
    in_kafka: bool | None = None
    #: Set when the try that is under way has ended, if there is one.
    ended: asyncio.Event | None = None


class Sending:
    """What one request sends, in the block of `Keys.sending`."""

    def __init__(self, caller: str, records: Sequence[Outgoing]) -> None:
        self.caller = caller
        #: Each of its messages, as it is answered.
        self.records = records
        #: Each that is not taken yet, once.
        self.fresh: list[Outgoing] = []
        #: Whether Kafka has all that are taken; if not, the spool has some.
        self.in_kafka = True
        #: What other tries have to wait for.
        self.claimed: list[tuple[Outgoing, Known]] = []
        self._submission: Submission | None = None
        self._ended = asyncio.Event()

    def add(self, record: Outgoing, known: Known | None) -> None:
        """One of its messages; `known` is of those with an id of their own."""
        if known and known.in_kafka is not None:
            self.in_kafka = self.in_kafka and known.in_kafka
        # One that is claimed comes twice in this batch.
        elif not (known and known.ended):
            self.fresh.append(record)
            if known:
                known.ended = self._ended
                self.claimed.append((record, known))

    async def by(self, dispatcher: Dispatcher) -> None:
        """Send those that are fresh. Raises as `Dispatcher.send`."""
        if not self.fresh:
            return
        for _, known in self.claimed:
            known.is_begun = True
        self._submission = Submission(self.took if self.claimed else None)
        in_kafka = await dispatcher.send(self.fresh, self._submission)
        self.in_kafka = self.in_kafka and in_kafka

    def took(self, records: Sequence[Outgoing], *, in_kafka: bool) -> None:
        """Kafka has taken these, or the spool: who asks again is told what took them first."""
        names = {str(each.id) for each in records}
        for record, known in self.claimed:
            if known.in_kafka is None and str(record.id) in names:
                known.is_begun, known.in_kafka = True, in_kafka

    def undecided(self) -> list["asyncio.Future[Any]"]:
        """What decides about those that nobody has taken, and somebody still may."""
        is_decided = all(known.in_kafka is not None for _, known in self.claimed)
        return [] if is_decided or not self._submission else list(self._submission.under_way)

    def end(self) -> None:
        """Other tries may go on."""
        for _, known in self.claimed:
            known.ended = None
        self._ended.set()


class Keys:
    """The latest ids of senders. In the event loop."""

    def __init__(self, most: int = MOST) -> None:
        #: By who called them so.
        self._known: Latest[tuple[str, str], Known] = Latest(most)
        #: By their full ids; the first of each.
        self._firsts: Latest[str, Known] = Latest(most)

    def due_ms(self, message: NewMessage, caller: str = "") -> int | None:
        """When this caller's message with its id was due at its first try; None at that."""
        known = self._known.get((caller, message.id or ""))
        return known.due_ms if known else None

    @asynccontextmanager
    async def sending(
        self,
        messages: Sequence[NewMessage],
        make: Callable[[], Sequence[Outgoing]],
        caller: str = "",
    ) -> AsyncIterator[Sending]:
        """Gives what is to be sent: send it before the block ends.

        `make` gives the records, and asks for what is known by then. Raises IdTaken where an id is
        that of another message.
        """
        # All of them are claimed together, and none while others are waited for: no two tries can
        # wait for each other. Nothing else may run from here to the claim.
        while ended := self._under_way(messages, caller):
            await ended.wait()
        sending = Sending(caller, make())
        try:
            self._claim(messages, sending)
            yield sending
        finally:
            self._end_when_decided(sending)

    def set_aside(self, id: MessageId) -> None:  # noqa: A002 (what all call it)
        """Kafka refuses what the spool has taken: another try is to be sent."""
        if known := self._firsts.get(str(id)):
            known.in_kafka = None

    def _under_way(self, messages: Iterable[NewMessage], caller: str) -> asyncio.Event | None:
        """The end of another try that sends any of these."""
        known = (self._known.get((caller, each.id)) for each in messages if each.id)
        return next((each.ended for each in known if each and each.ended), None)

    def _claim(self, messages: Iterable[NewMessage], sending: Sending) -> None:
        """All of them, or none. Raises IdTaken."""
        own = dict[str, Known]()
        for message, record in zip(messages, sending.records, strict=True):
            if message.id is None:
                continue
            known = Known(print=_print(message, record), due_ms=record.id.due_ms)
            if own.setdefault(message.id, known).print != known.print:
                raise IdTaken(f"id {message.id} is that of two messages: give each its own")
            name = sending.caller, message.id
            earlier = self._known.get(name, known), self._firsts.get(str(record.id), known)
            if any(each.print != known.print for each in earlier):
                raise IdTaken(f"id {message.id} was another message's a while ago: choose another")
        for record in sending.records:
            mine = own.get(record.id.unique)
            sending.add(record, mine and self._noted(sending.caller, record, mine))

    def _noted(self, caller: str, record: Outgoing, known: Known) -> Known:
        """The one that is remembered of this caller's: this, or that of an earlier try."""
        if record.series is None:
            self._firsts.setdefault(str(record.id), known)
        return self._known.setdefault((caller, record.id.unique), known)

    def _end_when_decided(self, sending: Sending) -> None:
        """What nobody has taken may still be: a second try waits until that is known."""
        if late := sending.undecided():
            one = asyncio.ensure_future(asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED))
            one.add_done_callback(lambda _: self._end_when_decided(sending))
        else:
            self._end(sending)

    def _end(self, sending: Sending) -> None:
        sending.end()
        for record, known in sending.claimed:
            is_over = record.series is not None or not known.is_begun
            if is_over:
                _forget(self._known, (sending.caller, record.id.unique), known)
                _forget(self._firsts, str(record.id), known)


def _forget(latest: "Latest[_Name, Known]", name: _Name, known: Known) -> None:
    # It may be forgotten already, and another be called so.
    if latest.get(name) is known:
        del latest[name]


def _print(message: NewMessage, record: Outgoing) -> bytes:
    """What two tries of one message have in common: all but the instant that `in` leads to."""
    headers = [each for each in record.headers if each[0] != DUE_AT_MS]
    said = (message.at, message.in_, headers, record.key, record.value)
    return sha256(repr(said).encode()).digest()
