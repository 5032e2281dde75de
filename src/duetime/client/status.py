"""Pipeline status and message totals, as `duetime status` and the HTTP API return them.

The leader and the standbys follow from their heartbeats, and what is overdue from offsets. The
totals do as well: an offset grows by one with each record, and with each transaction (a redrive, or
a sender's). So two reads give a rate, and no read fetches a message. Messages that are delivered at
once, or through the lanes, are not counted.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from duetime.core.clock import Clock
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames, enabled_delayed_topics
from duetime.kafka.heartbeats import MemberReader
from duetime.kafka.offsets import Offsets, Unreadable
from duetime.stores import PendingSlot
from duetime.stores.factory import open_reader

if TYPE_CHECKING:
    from duetime.client.http_models import PipelineStatus, Totals

# ruff: noqa: PLC0415 (making the models takes a tenth of the time that `duetime` takes to start)

#: State of a healthy query.
RUNS = "runs"

#: Maximum number of overdue releases that are reported: all are in one heartbeat, which is small.
MAX_OVERDUE_RELEASES = 8

#: A message is delivered within this time of its due time, in ms: later, it is overdue.
LATE_MS = 1_000


def status(settings: Settings, clock: Clock) -> "PipelineStatus":
    """Return the status now. Raises KafkaError."""
    with closing(open_reader(settings)) as reader, closing(StatusReader(settings)) as asking:
        now_ms = clock.now_ms()
        return asking.status(reader.pending(now_ms), now_ms)


class StatusReader:
    """Reads the status repeatedly over the same connections. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._members = MemberReader(settings)

    def status(self, slots: Sequence[PendingSlot], now_ms: int) -> "PipelineStatus":
        """Return the status, given the pending slots. Raises KafkaError."""
        from duetime.client.http_models import OverdueRelease, PipelineStatus

        leader, standbys = self._members.read(now_ms)
        told = leader.status if leader else {}
        late, lag_ms = count_overdue(slots, now_ms)
        return PipelineStatus(
            leader=leader.name if leader else None,
            since_ms=told.get("since_ms"),
            standbys=[each.name for each in standbys],
            waiting=sum(slot.count for slot in slots),
            late=late,
            lag_ms=lag_ms,
            overdue_released=told.get("overdue_released"),
            overdue_releases=[
                OverdueRelease(at_ms=at_ms, messages=messages, from_ms=from_ms, to_ms=to_ms)
                for at_ms, messages, from_ms, to_ms in told.get("overdue_releases", ())
            ],
            queries=told.get("queries", {}),
        )

    def close(self) -> None:
        """Close the connection."""
        self._members.close()


class TotalsReader:
    """Reads the totals repeatedly over the same connection. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._offsets = Offsets(settings, self._names.release_group)

    def totals(self) -> "Totals":
        """Return the totals now. Raises KafkaError."""
        from duetime.client.http_models import Totals

        names = self._names
        intake = (*names.intake, *enabled_delayed_topics(self._settings))
        outcomes = [names.rejected, names.retry, names.dead_letter]
        appended = self._offsets.appended([*intake, *outcomes])
        messages = [appended[each] for each in intake if each != names.control]
        known = [each for each in messages if each is not None]
        return Totals(
            taken_in=sum(known) if len(known) == len(messages) else None,
            cancels=appended[names.control],
            released=self._released(),
            rejected=appended[names.rejected],
            failed=appended[names.retry],
            dead=appended[names.dead_letter],
        )

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def _released(self) -> int | None:
        """Return the number of settled records: only the wheel counts them."""
        if self._settings.store_kind != "kafka":
            return None
        try:
            partitions = self._offsets.readable_partitions(self._names.wheel(0))
        except Unreadable:
            return None
        return sum(self._offsets.committed(partitions).values())


def count_overdue(slots: Iterable[PendingSlot], now_ms: int) -> tuple[int, int]:
    """Return the number of overdue records, and the time since the oldest slot ended, in ms."""
    late = [slot for slot in slots if slot.end_ms + LATE_MS < now_ms]
    lag_ms = max((now_ms - slot.end_ms for slot in late), default=0)
    return sum(slot.count for slot in late), lag_ms
