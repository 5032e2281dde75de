"""What was cancelled, so that who asks again gets the same answer: the first may have been lost.

And so that nobody is told that such a message is taken, whose cancel goes on.

Once its window is planned, nothing in Kafka says of a message that it was cancelled. Kept in
memory, for the latest of this process.
"""

from collections.abc import Iterable

from duetime.api.latest import Latest
from duetime.api.problems import IdTaken
from duetime.message import MessageId
from duetime.outgoing import Outgoing

#: How many are remembered: some 300 bytes each.
MOST = 100_000


class Cancels:
    """The latest that are certain not to be delivered, and who was told so. In the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._known: Latest[MessageId, set[str]] = Latest(most)

    def note(self, caller: str, identity: MessageId) -> None:
        """This caller is told that it is cancelled."""
        self._known.setdefault(identity, set()).add(caller)

    def has(self, caller: str, identity: MessageId) -> bool:
        """Whether this caller was told. Others may not be allowed to know."""
        return caller in self._known.get(identity, ())

    def check(self, records: Iterable[Outgoing]) -> None:
        """Raise IdTaken for a message that would not be delivered: its cancel goes on."""
        if not self._known:
            return
        for each in records:
            if each.series is None and each.id in self._known:
                raise IdTaken(f"{each.id} was cancelled a while ago: choose another id")
