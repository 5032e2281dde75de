"""What a reader of a delayed topic gets: a record with confluent-kafka's manners."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from duetime.delayed.partition import DelayedPartition, Due
from duetime.delayed.retries import Tried
from duetime.outgoing import Header
from duetime.stores.records import headers_of

#: Puts a message off, by so long or by the back-off.
PutOff = Callable[["DelayedMessage", timedelta | None], None]


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A record whose time has come. As confluent-kafka's Message, and what a delay adds to it."""

    due: Due
    source: DelayedPartition
    put_off: PutOff

    @property
    def deliver_after_ms(self) -> int:
        """When it was to be delivered, epoch ms; 0 is at once."""
        return self.due.deliver_after_ms

    @property
    def attempts(self) -> int:
        """How often it was put off before."""
        return Tried.of(self.due.record).attempts

    def unack(self, retry_in: timedelta | None = None) -> None:
        """Have it come again: so long from now, or after a back-off that doubles each time.

        The retry is another record of the same partition, for this group alone; after the most
        attempts it is a dead letter. It is safe once `commit` has returned, which waits for it.
        """
        self.put_off(self, retry_in)

    def topic(self) -> str:
        """The delayed topic."""
        return self.due.record.topic() or ""

    def partition(self) -> int:
        """Its partition."""
        return self.due.record.partition() or 0

    def offset(self) -> int:
        """Its offset: not ascending, because records come in the order of their times."""
        return self.due.record.offset() or 0

    def key(self) -> bytes | None:
        """The key."""
        return self.due.record.key()

    def value(self) -> bytes | None:
        """The value."""
        return self.due.record.value()

    def headers(self) -> list[Header]:
        """All headers, in order; empty where there are none."""
        return headers_of(self.due.record)

    def timestamp(self) -> tuple[int, int]:
        """The type of the timestamp, and the timestamp, as confluent-kafka gives them."""
        return self.due.record.timestamp()

    def error(self) -> None:
        """None: errors are raised by `poll`."""
