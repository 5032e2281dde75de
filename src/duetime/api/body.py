"""The bodies of requests: how large each may be, and how much of all of them is held at once.

A body that is being read holds what has been read of it, and no more: who says that much will come,
and sends little, holds little. Where there is no room for the next part, the request is refused at
once and gives back what it holds. So none waits for another, and the others go on.
"""

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from duetime.api.problems import RETRY_AFTER_S

#: What a body may have without counting, in bytes: small requests are answered while large ones
#: take all the room. There are as many of them as connections.
FREE_BYTES = 64 * 1024


class Room:
    """The bytes of all bodies that may be held at once. In the event loop."""

    def __init__(self, size_bytes: int) -> None:
        self._size = self._left = size_bytes

    def take(self, size_bytes: int) -> None:
        """Reserve bytes. Raises HTTPException (503) and reserves none where too few are left."""
        if size_bytes > self._left:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the bodies of other requests take all the room (api_bodies_bytes, {self._size}): "
                "try again later",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
        self._left -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Release reserved bytes."""
        self._left += size_bytes


class Body:
    """One body: counts what comes in."""

    def __init__(self, receive: Receive, most: int, room: Room) -> None:
        self._receive = receive
        self._most = most
        self._room = room
        self._read = self._held = 0

    async def receive(self) -> Message:
        """The next part. Raises HTTPException (413, 503)."""
        message = await self._receive()
        self._read += len(message.get("body", b""))
        # FastAPI lets these pass through its reading of the body.
        if self._read > self._most:
            detail = f"the body is over api_body_bytes ({self._most}): send less at a time"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
        more = max(0, self._read - FREE_BYTES) - self._held
        self._room.take(more)
        self._held += more
        return message

    def free(self) -> None:
        """Give back what it holds: the request is answered."""
        self._room.give_back(self._held)
        self._held = 0
