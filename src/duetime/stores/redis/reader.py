"""Looking at what waits in Redis: counts by sorted sets alone, messages in order of time."""

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

from duetime.config import Settings
from duetime.message import LATEST_MS, MessageId
from duetime.stores import Found, Pending
from duetime.stores.redis.connect import answering, client
from duetime.stores.redis.keys import ShardKeys, shard_of
from duetime.stores.redis.shards import Shards
from duetime.stores.rows import CANCEL_MARK, names_of, unpacked
from duetime.stores.stretches import stretches_of

#: How many names are looked at at a time.
PAGE = 500


class Source(NamedTuple):
    """A sorted set of names that wait: of a shard, or of a claim in it."""

    keys: ShardKeys
    set_name: str


class RedisReader:
    """What waits in Redis, for any process that wants to know. Thread-safe. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wheel = settings.wheel
        self._shards = Shards(settings)

    def find(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        now_ms: int,  # noqa: ARG002 (what all take)
        *,
        retry_ms: int | None = None,
    ) -> Found | None:
        """The message with this id, if it waits; `cancelled` if a cancel waits for it too."""
        keys = self._shards.keys[shard_of(str(id), len(self._shards.keys))]
        with answering(self._settings):
            message, cancel = self._shards.packed(keys, names_of(id, retry_ms))
        return unpacked(message).found(cancelled=cancel is not None) if message else None

    def pending(self, now_ms: int) -> Sequence[Pending]:
        """How many records wait, by the slots that the wheel would have them in."""
        with answering(self._settings):
            sources = self._sources()
            stretches = stretches_of(self._wheel, self._oldest_ms(sources, now_ms), now_ms)
            with client(self._settings).pipeline(transaction=False) as pipeline:
                for each in stretches:
                    for source in sources:
                        pipeline.zcount(source.set_name, each.start_ms, f"({each.end_ms}")
                counts = pipeline.execute()
        size = len(sources)
        totals = [sum(counts[at : at + size]) for at in range(0, len(counts), size)]
        return [
            Pending(slot=each.slot, start_ms=each.start_ms, end_ms=each.end_ms, count=total)
            for each, total in zip(stretches, totals, strict=True)
            if total
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
        """The messages that wait, by due time, without cancelled ones; some hundreds are held."""
        first_ms = 0 if from_ms is None else from_ms
        last_ms = LATEST_MS if to_ms is None else to_ms - 1
        with answering(self._settings):
            streams = [self._stream(each, first_ms, last_ms) for each in self._sources()]
            merged = heapq.merge(*streams, key=lambda each: each[0])
            wanted = (found for _, found in merged if topic in (None, found.topic))
            yield from islice(wanted, limit)

    def close(self) -> None:
        """Nothing is held open for it."""

    def _sources(self) -> list[Source]:
        """Every sorted set with names: what waits, and what is claimed and not settled."""
        return [
            Source(keys, name) for keys in self._shards.keys for name in self._shards.sets(keys)
        ]

    def _oldest_ms(self, sources: Sequence[Source], now_ms: int) -> int:
        with client(self._settings).pipeline(transaction=False) as pipeline:
            for source in sources:
                pipeline.zrange(source.set_name, 0, 0, withscores=True)
            firsts = pipeline.execute()
        return min((int(first[0][1]) for first in firsts if first), default=now_ms)

    def _stream(self, source: Source, first_ms: int, last_ms: int) -> Iterator[tuple[float, Found]]:
        passed = set[bytes]()
        while page := self._page(source.set_name, first_ms, last_ms, passed):
            names = [name.decode() for name, _ in page]
            cancels = [CANCEL_MARK + name for name in names]
            packed = self._shards.packed(source.keys, names + cancels)
            pairs = zip(packed[: len(names)], packed[len(names) :], strict=True)
            for (_, due_ms), (message, cancel) in zip(page, pairs, strict=True):
                found = unpacked(message).found() if message and cancel is None else None
                if found:
                    yield due_ms, found
            # By time and not by rank: what is claimed meanwhile leaves the set in front.
            if page[-1][1] > first_ms:
                first_ms, passed = int(page[-1][1]), set()
            passed |= {name for name, due_ms in page if due_ms == first_ms}

    def _page(
        self, set_name: str, first_ms: int, last_ms: int, passed: set[bytes]
    ) -> list[tuple[bytes, float]]:
        """The next names from then on, by due time; of the first ms, some are `passed`."""
        found = client(self._settings).zrange(
            set_name,
            first_ms,
            last_ms,
            byscore=True,
            offset=0,
            num=PAGE + len(passed),
            withscores=True,
        )
        page = cast("list[tuple[bytes, float]]", found)
        return [each for each in page if each[0] not in passed]
