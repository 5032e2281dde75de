"""Idempotency: what senders called their messages, so that a second try gets the first's answer.

A second try that comes while the first is under way waits for it, and sends only if that failed.

Kept in memory, for the latest ids of this process. Beyond that the id itself helps: with the same
`at`, it is the same message, and is delivered once if it still waits.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

from duetime.api.problems import IdTaken
from duetime.api.wanted import NewMessage
from duetime.outgoing import Outgoing

#: How many ids are remembered: some 300 bytes each.
MOST = 100_000


@dataclass(slots=True, kw_only=True)
class Known:
    """A message that was to be sent."""

    print: bytes
    due_ms: int
    #: Whether Kafka or the spool has it: until then another try sends it again, under the same id.
    taken: bool = False
    #: Set when the try that is under way has ended, if there is one.
    ended: asyncio.Event | None = None


class Keys:
    """The latest ids of senders. In the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[str, Known] = OrderedDict()

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
    ) -> AsyncIterator[list[Outgoing]]:
        """Gives those that are not taken yet, each once. They are when the block ends well."""
        # All of them are claimed together, and none while others are waited for: no two tries can
        # wait for each other.
        while ended := self._under_way(messages):
            await ended.wait()
        claimed, fresh = self._claimed(messages, records)
        try:
            yield fresh
        except BaseException:
            _let_go(claimed, taken=False)
            raise
        _let_go(claimed, taken=True)

    def _under_way(self, messages: Iterable[NewMessage]) -> asyncio.Event | None:
        """The end of another try that sends any of these."""
        known = (self._known.get(each.id) for each in messages if each.id)
        return next((each.ended for each in known if each and each.ended), None)

    def _claimed(
        self, messages: Iterable[NewMessage], records: Iterable[Outgoing]
    ) -> tuple[list[Known], list[Outgoing]]:
        """What others have to wait for, and what is to be sent."""
        claimed, fresh, ended = list[Known](), list[Outgoing](), asyncio.Event()
        for message, record in zip(messages, records, strict=True):
            known = self._noted(message, record) if message.id else None
            # One that is claimed comes twice in this batch.
            if known and (known.taken or known.ended):
                continue
            fresh.append(record)
            if known:
                known.ended = ended
                claimed.append(known)
        return claimed, fresh

    def _noted(self, message: NewMessage, record: Outgoing) -> Known:
        due_ms = record.id.due_ms
        known = self._known.setdefault(
            record.id.unique, Known(print=_print(message), due_ms=due_ms)
        )
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return known


def _let_go(claimed: Iterable[Known], *, taken: bool) -> None:
    for known in claimed:
        known.taken = taken
        if known.ended:
            known.ended.set()
        known.ended = None


def _print(message: NewMessage) -> bytes:
    return sha256(message.model_dump_json().encode(errors="surrogatepass")).digest()
