"""Looking at what waits in Redis: counts by sorted sets alone, messages in order of time."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Unpack, cast

from duetime.config import Settings
from duetime.message import MessageId
from duetime.stores import Found, Pending
from duetime.stores.listing import merged
from duetime.stores.redis.connect import answering, client
from duetime.stores.redis.keys import ShardKeys, shard_of
from duetime.stores.redis.shards import Shards
from duetime.stores.rows import CANCEL_MARK, KeyedSearch, found_in_parts, names_of, unpacked
from duetime.stores.selection import Asked, Position, Selection
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

    def search(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        *,
        retry_ms: int | None = None,
    ) -> KeyedSearch:
        """Return a search for this id."""
        return KeyedSearch(self, id, retry_ms)

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
        limit: int | None = None,
        **asked: Unpack[Asked],
    ) -> Iterator[Found]:
        """The messages that wait, by due time, without cancelled ones; some hundreds are held."""
        selection = Selection.of(**asked)
        with answering(self._settings):
            streams = [self._stream(each, selection) for each in self._sources()]
            wanted = (each for each in merged(streams) if selection.is_for(each.topic))
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

    def _stream(self, source: Source, selection: Selection) -> Iterator[Found]:
        # In a sorted set, too, names come in order where their times are the same.
        last = passed = selection.behind
        while page := self._page(source.set_name, last, selection.to_ms):
            left = [each.name for each in page if each > passed]
            names = [each for each in left if not each.startswith(CANCEL_MARK)]
            yield from found_in_parts(names, partial(self._found, source.keys))
            last, passed = page[-1], max(passed, page[-1])

    def _found(self, keys: ShardKeys, names: Sequence[str]) -> list[Found]:
        """The messages of these names, without cancelled ones."""
        packed = self._shards.packed(keys, [*names, *(CANCEL_MARK + name for name in names)])
        pairs = zip(packed[: len(names)], packed[len(names) :], strict=True)
        found = [
            unpacked(message).found() for message, cancel in pairs if message and cancel is None
        ]
        return [each for each in found if each]

    def _page(self, set_name: str, last: Position, to_ms: int) -> list[Position]:
        """The next names behind this one; where it is not there, from the first of its ms on."""
        found = self._following(set_name, last)
        if found is None:
            asked = client(self._settings).zrange(
                set_name,
                last.due_ms,
                to_ms,
                byscore=True,
                offset=0,
                num=PAGE,
                withscores=True,
            )
            found = _positions(asked)
        return [each for each in found if each.due_ms < to_ms]

    def _following(self, set_name: str, last: Position) -> list[Position] | None:
        """The next names behind this one, which has to be there: else None."""
        redis = client(self._settings)
        while (rank := cast("int | None", redis.zrank(set_name, last.name))) is not None:
            found = _positions(redis.zrange(set_name, rank, rank + PAGE, withscores=True))
            # What is claimed meanwhile leaves the set in front: then its rank is another.
            if found and found[0] == last:
                return found[1:]
        return None


def _positions(found: object) -> list[Position]:
    pairs = cast("list[tuple[bytes, float]]", found)
    return [Position(int(due_ms), name.decode()) for name, due_ms in pairs]
