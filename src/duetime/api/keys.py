"""Idempotency: what senders called their messages, so that a second try gets the first's answer.

A second try that comes while the first is under way waits for it, and sends only if that failed.

Kept in memory, for the latest ids of this process. Beyond that the id itself helps: with the same
`at`, it is the same message, and is delivered once if it still waits.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

from duetime.api.latest import Latest
from duetime.api.parcel import Refusals
from duetime.api.problems import IdTaken
from duetime.api.spool import NotKept
from duetime.api.wanted import NewMessage
from duetime.outgoing import Outgoing

#: How many ids are remembered: some 400 bytes each.
MOST = 100_000


@dataclass(slots=True, kw_only=True)
class Known:
    """A message that was to be sent."""

    print: bytes
    due_ms: int
    #: Whether Kafka has it, or the spool; None of neither: another try sends it again, under the
    #: same id.
    in_kafka: bool | None = None
    #: Set when the try that is under way has ended, if there is one.
    ended: asyncio.Event | None = None


class Sending:
    """What one request sends, in the block of `Keys.sending`."""

    def __init__(self) -> None:
        #: Each that is not taken yet, once.
        self.fresh: list[Outgoing] = []
        #: Whether Kafka has all that are taken; if not, the spool has some.
        self.in_kafka = True
        #: What other tries have to wait for.
        self._claimed: list[Known] = []
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
                self._claimed.append(known)

    def took(self, *, in_kafka: bool) -> None:
        """Kafka has taken those that are fresh, or the spool."""
        self.in_kafka = self.in_kafka and in_kafka
        for known in self._claimed:
            known.in_kafka = in_kafka

    def decided(self, arriving: "asyncio.Future[Refusals]") -> None:
        """It ends late, with what has become of those that nobody kept."""
        if not (arriving.cancelled() or arriving.exception() or arriving.result()):
            self.took(in_kafka=True)
        self.end()

    def end(self) -> None:
        """Other tries may go on."""
        for known in self._claimed:
            known.ended = None
        self._ended.set()


class Keys:
    """The latest ids of senders. In the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._known: Latest[str, Known] = Latest(most)

    def due_ms(self, message: NewMessage) -> int | None:
        """When this message was due at its first try; None at that. Raises IdTaken."""
        known = self._known.get(message.id or "")
        if known is None:
            return None
        if known.print != _print(message):
            raise IdTaken(f"id {message.id} was another message's a while ago: choose another")
        return known.due_ms

    def check(self, messages: Iterable[NewMessage]) -> None:
        """Raise IdTaken where two of them differ, and have one id."""
        first = dict[str, NewMessage]()
        for message in messages:
            other = first.setdefault(message.id, message) if message.id else message
            if other is not message and _print(other) != _print(message):
                raise IdTaken(f"id {message.id} is that of two messages: give each its own")

    @asynccontextmanager
    async def sending(
        self, messages: Sequence[NewMessage], records: Sequence[Outgoing]
    ) -> AsyncIterator[Sending]:
        """Gives what is to be sent; say what has taken it before the block ends."""
        # All of them are claimed together, and none while others are waited for: no two tries can
        # wait for each other.
        while ended := self._under_way(messages):
            await ended.wait()
        sending = Sending()
        for message, record in zip(messages, records, strict=True):
            sending.add(record, self._noted(message, record) if message.id else None)
        arriving = None
        try:
            yield sending
        except NotKept as error:
            arriving = error.arriving
            raise
        finally:
            if arriving:
                # It may arrive all the same: a second try waits until that is known.
                arriving.add_done_callback(sending.decided)
            else:
                sending.end()

    def _under_way(self, messages: Iterable[NewMessage]) -> asyncio.Event | None:
        """The end of another try that sends any of these."""
        known = (self._known.get(each.id) for each in messages if each.id)
        return next((each.ended for each in known if each and each.ended), None)

    def _noted(self, message: NewMessage, record: Outgoing) -> Known:
        due_ms = record.id.due_ms
        return self._known.setdefault(record.id.unique, Known(print=_print(message), due_ms=due_ms))


def _print(message: NewMessage) -> bytes:
    return sha256(message.model_dump_json().encode(errors="surrogatepass")).digest()
