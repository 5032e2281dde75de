"""Looking at what waits in Aerospike, by its index over due times."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Unpack

from duetime.config import Settings
from duetime.message import LATEST_MS, MessageId
from duetime.stores import Found, Pending
from duetime.stores.aerospike.cache import MessageCache
from duetime.stores.aerospike.fields import record_of
from duetime.stores.listing import merged
from duetime.stores.rows import CANCEL_MARK, PLACE, KeyedSearch, found_in_parts, names_of
from duetime.stores.selection import Asked, Position, Selection
from duetime.stores.stretches import stretches_of

#: What the name of another record with the id of one that is there ends with: its place.
ANOTHER = re.compile(rf"~[0-9a-f]{{{2 * PLACE.size}}}$")


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

    def search(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        *,
        retry_ms: int | None = None,
    ) -> KeyedSearch:
        """Return a search for this id."""
        return KeyedSearch(self, id, retry_ms)

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
        limit: int | None = None,
        **asked: Unpack[Asked],
    ) -> Iterator[Found]:
        """The messages that wait, by due time, without cancelled ones; all due times are held."""
        selection = Selection.of(**asked)
        names = self._names(selection)
        found = merged([found_in_parts(names, self._found)])
        wanted = (each for each in found if selection.is_for(each.topic))
        yield from islice(wanted, limit)

    def close(self) -> None:
        """Nothing is held open for it."""

    def _names(self, selection: Selection) -> list[str]:
        """Those that are asked for, as they are called in the store, in order."""
        waiting = self._cache.due(selection.from_ms, selection.to_ms)
        cancelled = {each.name[1:] for each in waiting if each.name.startswith(CANCEL_MARK)}
        placed = sorted(
            (Position(each.due_ms, ANOTHER.sub("", each.name)), each.name)
            for each in waiting
            if not each.name.startswith(CANCEL_MARK)
        )
        return [
            name
            for position, name in placed
            if position.name not in cancelled and position > selection.behind
        ]

    def _found(self, names: Sequence[str]) -> list[Found]:
        there = self._cache.found(names)
        found = [record_of(there[name]).found() for name in names if name in there]
        return [each for each in found if each]
