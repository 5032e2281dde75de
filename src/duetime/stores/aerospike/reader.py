"""Looking at what waits in Aerospike, by its index over due times."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from duetime.config import Settings
from duetime.message import LATEST_MS, MessageId
from duetime.stores import Found, Pending
from duetime.stores.aerospike.cache import BATCH, MessageCache
from duetime.stores.aerospike.fields import record_of
from duetime.stores.rows import CANCEL_MARK, names_of
from duetime.stores.stretches import stretches_of


class AerospikeReader:
    """What waits in Aerospike, for any process that wants to know. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._wheel = settings.wheel
        self._cache = MessageCache(settings)

    def find(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        now_ms: int,  # noqa: ARG002 (what all take)
        *,
        retry_ms: int | None = None,
    ) -> Found | None:
        """The message with this id, if it waits; `cancelled` if a cancel waits for it too."""
        name, cancel = names_of(id, retry_ms)
        found = self._cache.found([name, cancel])
        return record_of(found[name]).found(cancelled=cancel in found) if name in found else None

    def pending(self, now_ms: int) -> Sequence[Pending]:
        """How many records wait in each slot. Reads the due times of all that waits."""
        due_ms = [each.due_ms for each in self._cache.due(0, LATEST_MS)]
        stretches = stretches_of(self._wheel, min(due_ms, default=now_ms), now_ms)
        starts = [each.start_ms for each in stretches]
        counts = Counter(bisect_right(starts, each) - 1 for each in due_ms)
        return [
            Pending(slot=one.slot, start_ms=one.start_ms, end_ms=one.end_ms, count=counts[number])
            for number, one in enumerate(stretches)
            if counts[number]
        ]

    def messages(
        self,
        now_ms: int,  # noqa: ARG002 (what all take)
        *,
        topic: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        limit: int | None = None,
    ) -> Iterator[Found]:
        """The messages that wait, by due time, without cancelled ones; all due times are held."""
        end_ms = LATEST_MS if to_ms is None else to_ms
        waiting = self._cache.due(from_ms or 0, end_ms)
        names = [each.name for each in sorted(waiting, key=lambda each: each.due_ms)]
        wanted = (each for each in self._found(names) if topic in (None, each.topic))
        yield from islice(wanted, limit)

    def close(self) -> None:
        """Nothing is held open for it."""

    def _found(self, names: Sequence[str]) -> Iterator[Found]:
        cancelled = {name[1:] for name in names if name.startswith(CANCEL_MARK)}
        left = [name for name in names if name not in cancelled]
        for start in range(0, len(left), BATCH):
            there = self._cache.found(left[start : start + BATCH])
            for name in there:
                if found := record_of(there[name]).found():
                    yield found
