"""What is known about records that were handed to Kafka's client together."""

import asyncio
from collections.abc import Mapping, Sequence

from duetime.errors import ClientFailed, KafkaError, RecordRefused
from duetime.outgoing import Outgoing

#: The ids that Kafka refuses for good, and why.
Refusals = Mapping[str, RecordRefused]


class ProducerBatch:
    """Its future ends when all are reported: with what Kafka refuses for good.

    If others failed it raises KafkaError: they are to be sent again. In the event loop.
    """

    def __init__(self, records: Sequence[Outgoing]) -> None:
        self.records = records
        #: The last of them, for which the client had no room: they were not handed over.
        self.rest: Sequence[Outgoing] = ()
        self.arrived: asyncio.Future[Refusals] = asyncio.get_running_loop().create_future()
        self._left = len(records)
        self._refused: dict[str, RecordRefused] = {}
        self._failed: dict[str, KafkaError] = {}

    @property
    def is_lost(self) -> bool:
        """Whether Kafka's client has failed with it: some may have arrived, and no report comes."""
        return self.arrived.done() and isinstance(self.arrived.exception(), ClientFailed)

    def there(self) -> list[Outgoing]:
        """Those that are known to have arrived, once all are reported."""
        if self._left:
            return []
        missing = self._refused.keys() | self._failed.keys()
        return [each for each in self.records if str(each.id) not in missing]

    def leave(self, count: int) -> None:
        """The client has no room for the last ones, so many: nobody will report them."""
        handed = len(self.records) - count
        self.records, self.rest = self.records[:handed], self.records[handed:]
        self._left -= count
        self._end_if_all_reported()

    def reported(self, error: KafkaError | None, id: str) -> None:  # noqa: A002 (what all call it)
        """One of them has arrived, or will not."""
        if isinstance(error, RecordRefused):
            self._refused[id] = error
        elif error:
            self._failed[id] = error
        self._left -= 1
        self._end_if_all_reported()

    def lose(self, error: ClientFailed) -> None:
        """There are no reports to come."""
        self._end(error)

    def _end_if_all_reported(self) -> None:
        if self._left:
            return
        if self._failed:
            self._end(next(iter(self._failed.values())))
        # Who waited may have gone.
        elif not self.arrived.done():
            self.arrived.set_result(self._refused)

    def _end(self, error: KafkaError) -> None:
        if not self.arrived.done():
            self.arrived.set_exception(error)
            # Who waited may have gone: nobody need be told then.
            self.arrived.exception()
