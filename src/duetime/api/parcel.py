"""What is known about records that were handed to Kafka's client together."""

import asyncio
from collections.abc import Mapping

from duetime.errors import KafkaError, RecordRefused

#: The ids that Kafka refuses for good, and why.
Refusals = Mapping[str, RecordRefused]


class Parcel:
    """Its future ends when all are reported: with what Kafka refuses for good.

    If others failed it raises KafkaError: they are to be sent again. In the event loop.
    """

    def __init__(self, count: int) -> None:
        self.arrived: asyncio.Future[Refusals] = asyncio.get_running_loop().create_future()
        self._left = count
        self._refused: dict[str, RecordRefused] = {}
        self._error: KafkaError | None = None

    def reported(self, error: KafkaError | None, id: str) -> None:  # noqa: A002 (what all call it)
        """One of them has arrived, or will not."""
        if isinstance(error, RecordRefused):
            self._refused[id] = error
        elif error:
            self._error = error
        self._left -= 1
        # Who waited may have gone.
        if self._left or self.arrived.done():
            return
        if self._error:
            self.arrived.set_exception(self._error)
            # Who waited may have gone: nobody need be told then.
            self.arrived.exception()
        else:
            self.arrived.set_result(self._refused)
