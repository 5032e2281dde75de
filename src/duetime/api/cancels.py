"""What was cancelled, so that who asks again gets the same answer: the first may have been lost.

Once its window is planned, nothing in Kafka says of a message that it was cancelled. Kept in
memory, for the latest of this process.
"""

from duetime.api.latest import Latest
from duetime.message import MessageId

#: How many are remembered: some 300 bytes each.
MOST = 100_000


class Cancels:
    """The latest that are certain not to be delivered, and who was told so. In the event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._known: Latest[tuple[str, MessageId], None] = Latest(most)

    def note(self, caller: str, identity: MessageId) -> None:
        """This caller is told that it is cancelled."""
        self._known[caller, identity] = None

    def has(self, caller: str, identity: MessageId) -> bool:
        """Whether this caller was told. Others may not be allowed to know."""
        return (caller, identity) in self._known
