"""Which messages this process has given another time: of two requests at once, one is done.

The cancel of the old message is in its slot some ms after the answer. Until then, a second request
would find that the message waits, and it would be delivered at both times.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from duetime.api.latest import Latest
from duetime.errors import UnknownMessage
from duetime.message import MessageId

#: How many are remembered: some 200 bytes each.
MOST = 10_000


class Rescheduled:
    """The latest of them. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._known: Latest[MessageId, None] = Latest(most)
        self._lock = threading.Lock()

    @contextmanager
    def once(self, identity: MessageId) -> Iterator[None]:
        """Enter the block once for each message, unless it fails. Raises UnknownMessage."""
        with self._lock:
            if identity in self._known:
                raise UnknownMessage(
                    f"message {identity} is being rescheduled, or was: it goes on under a new id"
                )
            self._known[identity] = None
        try:
            yield
        except BaseException:
            with self._lock:
                self._known.pop(identity, None)
            raise
