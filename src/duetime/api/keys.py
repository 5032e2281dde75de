"""Idempotency: what senders called their messages, so that a second try gets the first's answer.

Kept in memory, for the latest ids of this process. Beyond that the id itself helps: with the same
`at`, it is the same message, and is delivered once if it still waits.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from duetime.api.models import NewMessage
from duetime.api.problems import IdTaken
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


class Keys:
    """The latest ids of senders. Not for several threads."""

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

    def note(self, messages: Iterable[NewMessage], records: Iterable[Outgoing]) -> list[Outgoing]:
        """Remember these; returns those that are not taken yet."""
        return [
            record
            for message, record in zip(messages, records, strict=True)
            if not (message.id and self._noted(message, record).taken)
        ]

    def take(self, records: Sequence[Outgoing]) -> None:
        """Note that they are taken."""
        for record in records:
            if known := self._known.get(record.id.unique):
                known.taken = True

    def _noted(self, message: NewMessage, record: Outgoing) -> Known:
        due_ms = record.id.due_ms
        known = self._known.setdefault(
            record.id.unique, Known(print=_print(message), due_ms=due_ms)
        )
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return known


def _print(message: NewMessage) -> bytes:
    return sha256(message.model_dump_json().encode(errors="surrogatepass")).digest()
