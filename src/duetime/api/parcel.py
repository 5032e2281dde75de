"""What is known about records that were handed to Kafka's client together, and by one request."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from duetime.errors import ClientFailed, KafkaError, RecordRefused
from duetime.outgoing import Outgoing

#: The ids that Kafka refuses for good, and why.
Refusals = Mapping[str, RecordRefused]


class Parcel:
    """Its future ends when all are reported: with what Kafka refuses for good.

    If others failed it raises KafkaError: they are to be sent again. In the event loop.
    """

    def __init__(self, records: Sequence[Outgoing]) -> None:
        self.records = records
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

    def reported(self, error: KafkaError | None, id: str) -> None:  # noqa: A002 (what all call it)
        """One of them has arrived, or will not."""
        if isinstance(error, RecordRefused):
            self._refused[id] = error
        elif error:
            self._failed[id] = error
        self._left -= 1
        if self._left:
            return
        if self._failed:
            self._end(next(iter(self._failed.values())))
        # Who waited may have gone.
        elif not self.arrived.done():
            self.arrived.set_result(self._refused)

    def lose(self, error: ClientFailed) -> None:
        """There are no reports to come."""
        self._end(error)

    def _end(self, error: KafkaError) -> None:
        if not self.arrived.done():
            self.arrived.set_exception(error)
            # Who waited may have gone: nobody need be told then.
            self.arrived.exception()


class OnTaken(Protocol):
    """Hears of records that are taken: by Kafka, or else by the spool."""

    def __call__(self, records: Sequence[Outgoing], *, in_kafka: bool) -> None:
        """Called in the event loop."""


class Errand:
    """What one request sends, and what is taken of it.

    That is told as it happens: a request may end with an error, or be given up, and some of it is
    taken all the same.
    """

    def __init__(self, on_taken: OnTaken | None = None) -> None:
        self._on_taken = on_taken
        #: What may still take some of it.
        self.under_way = set[asyncio.Future[Any]]()

    def handed_over(self, parcel: Parcel) -> None:
        """Kafka's client has these."""
        self._follow(parcel.arrived, parcel.there, in_kafka=True)

    def written(self, writing: "asyncio.Task[None]", records: Sequence[Outgoing]) -> None:
        """The spool is to have these, unless that raises."""
        self._follow(writing, lambda: [] if writing.exception() else records, in_kafka=False)

    def _follow(
        self,
        end: "asyncio.Future[Any]",
        taken: Callable[[], Sequence[Outgoing]],
        *,
        in_kafka: bool,
    ) -> None:
        """`taken` is asked at the end."""
        if not (on_taken := self._on_taken):
            return

        def ended(_: "asyncio.Future[Any]") -> None:
            self.under_way.discard(end)
            on_taken(taken(), in_kafka=in_kafka)

        self.under_way.add(end)
        end.add_done_callback(ended)
