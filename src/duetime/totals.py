"""How many messages have come in and gone on so far, as far as Kafka's offsets tell.

An offset is a number that grows by one with each record, and with each transaction (redrive, a
sender's own). So two looks at it give a rate, and no look reads a message. What is delivered at
once, or by the lanes, leaves no such number behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from duetime.config import Settings
from duetime.stores.offsets import Offsets, Unreadable
from duetime.topics import TopicNames, enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Since the topics were created; None is what cannot be known."""

    #: Records in the intake topics, cancels aside.
    taken_in: int | None
    cancels: int | None
    #: Records that left the wheel in their second: delivered, or dropped as cancelled or double.
    released: int | None
    rejected: int | None
    #: Attempts to deliver that failed.
    failed: int | None
    #: Dead letters, with those that were brought back.
    dead: int | None


class TotalsReader:
    """Asks Kafka again and again over the same connection. Not for several threads at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._offsets = Offsets(settings, self._names.release_group)

    def totals(self) -> Totals:
        """Raises KafkaError."""
        names = self._names
        delayed = enabled(self._settings)
        ended = [names.rejected, names.failed, names.dead]
        written = self._offsets.appended([*names.intake, *delayed, *ended])
        messages = [written[each] for each in (*names.intake, *delayed) if each != names.control]
        return Totals(
            taken_in=_sum(messages),
            cancels=written[names.control],
            released=self._released(),
            rejected=written[names.rejected],
            failed=written[names.failed],
            dead=written[names.dead],
        )

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _released(self) -> int | None:
        """What windows have settled. Another store than the wheel keeps no count of it."""
        if self._settings.store_kind != "kafka":
            return None
        try:
            places = self._offsets.readable_places(self._names.wheel(0))
        except Unreadable:
            return None
        return sum(self._offsets.committed(places).values())


def _sum(counts: Sequence[int | None]) -> int | None:
    """None where one is not known."""
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None
