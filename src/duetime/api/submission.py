"""What one request sends, and what is taken of it: by Kafka, or else by the spool."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from duetime.api.producer_batch import ProducerBatch
from duetime.outgoing import Outgoing


class OnTaken(Protocol):
    """Hears of records that are taken: by Kafka, or else by the spool."""

    def __call__(self, records: Sequence[Outgoing], *, in_kafka: bool) -> None:
        """Called in the event loop."""


class Submission:
    """What one request sends, and what is taken of it.

    That is told as it happens: a request may end with an error, or be given up, and some of it is
    taken all the same.
    """

    def __init__(self, on_taken: OnTaken | None = None) -> None:
        self._on_taken = on_taken
        #: What may still take some of it.
        self.under_way = set[asyncio.Future[Any]]()

    def handed_over(self, batch: ProducerBatch) -> None:
        """Kafka's client has these."""
        self._follow(batch.arrived, batch.there, in_kafka=True)

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
