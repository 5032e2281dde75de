"""What is done with the shards: each of these is one script or one pipeline, in any process."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import cast

from redis import Redis
from redis.client import Pipeline
from redis.commands.core import Script

from duetime.config import Settings
from duetime.errors import ConfigError
from duetime.stores import ANY_TIME, DueTimes
from duetime.stores.redis.connect import answering, client
from duetime.stores.redis.keys import ShardKeys, shard_keys, shard_of
from duetime.stores.rows import PLACE, Record, Row, lost, portions, unpacked

#: The most records, and bytes of them, that one call of a script saves: Redis does nothing else
#: meanwhile, some ms.
SAVED, SAVED_BYTES = 500, 4 * 1024 * 1024

#: About how many bytes of records are read at once, and how many records at first and at most.
READ_BYTES, READ_FIRST, READ_MOST = 4 * 1024 * 1024, 100, 2_000

#: How many records one call frees, for the same reason.
FREED = 1_000

#: What each script but `save` begins with: one that has written, if only nothing, may go on where
#: memory is short, and these free some.
GOES_ON = "redis.call('DEL', KEYS[1] .. ':nothing')\n"

#: How long a claim is held without a word from its holder, in ms: as long as a leader may send
#: without one, so that who leads next finds what was left.
LEASE_MS = 5_000

#: How long a cancel is remembered once its time is over, in seconds: longer than a pipeline takes
#: to repeat what a crash has interrupted.
REMEMBERED_S = 3_600


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardClaim:
    """Records of one shard that one reader holds."""

    shard: int
    name: str
    count: int
    #: When it was first taken up, epoch ms, if that was before: some of it may have gone on.
    begun_ms: int | None = None
    #: When they are due, of a claim of what is overdue.
    due: DueTimes = ANY_TIME


class Shards:
    """The shards of one namespace. Thread-safe; may be pickled to an executor."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = shard_keys(settings.namespace, settings.store_shards)
        self._term_key = f"{settings.namespace}:term"

    @property
    def keys(self) -> Sequence[ShardKeys]:
        """The keys of each."""
        return self._keys

    def check(self) -> None:
        """Raises ConfigError where what waits was saved into another number of shards."""
        key, wanted = f"{self._settings.namespace}:shards", len(self._keys)
        redis = client(self._settings)
        with answering(self._settings):
            # Looked at first: where memory is short, nothing can be set.
            if (found := redis.get(key)) is None:
                redis.set(key, wanted, nx=True)
                found = redis.get(key)
            there = int(cast("bytes", found))
        if there != wanted:
            raise ConfigError(
                f"setting store_shards: it is {wanted}, and what waits in the store was saved "
                f"into {there}: set that, or empty the store and remove its key {key}"
            )

    def forget(self) -> None:
        """Remove every key of this namespace, what waits included."""
        redis = client(self._settings)
        with answering(self._settings):
            for key in redis.scan_iter(match=f"{self._settings.namespace}:*", count=1_000):
                redis.unlink(key)

    def begin_term(self) -> int:
        """From now on nobody saves who began before."""
        with self._pipeline() as pipeline:
            _run(pipeline, "term", [self._term_key])
            (term,) = pipeline.execute()
        return int(term)

    def save(self, rows: Iterable[Row], term: int) -> None:
        """Save them. Safe to repeat at once: what is there already stays as it is.

        Raises StoreError where another term has begun.
        """
        parts: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            parts[shard_of(row.id, len(self._keys))].append(row)
        with self._pipeline(saving=True) as pipeline:
            for shard, part in parts.items():
                for some in portions(part, SAVED, SAVED_BYTES):
                    self._save(pipeline, self._keys[shard], some, term)
            pipeline.execute()

    def claim(self, before_ms: int, most: int, name: str, owner: str) -> list[ShardClaim]:
        """Claim what is due before an instant, about so many of each shard at most."""
        with self._pipeline() as pipeline:
            for keys in self._keys:
                held = [keys.due, keys.claims + name, keys.leases, keys.owners]
                _run(pipeline, "claim", held, before_ms, most, name, owner, LEASE_MS)
            counts = pipeline.execute()
        return [
            ShardClaim(shard=shard, name=name, count=count)
            for shard, count in enumerate(counts)
            if count
        ]

    def take_over(self, owner: str, busy: Iterable[tuple[int, str]]) -> list[ShardClaim]:
        """Claim what has been claimed, and its lease has ended; but not what the owner works on.

        That is told by shard and name.
        """
        names: dict[int, list[str]] = defaultdict(list)
        for shard, name in busy:
            names[shard].append(name)
        with self._pipeline() as pipeline:
            for shard, keys in enumerate(self._keys):
                held = [keys.leases, keys.owners, keys.begun]
                _run(pipeline, "take_over", held, keys.claims, owner, LEASE_MS, *names[shard])
            found = pipeline.execute()
        return [
            ShardClaim(
                shard=shard,
                name=name.decode(),
                count=count,
                begun_ms=int(begun_ms) if begun_ms else None,
            )
            for shard, claims in enumerate(found)
            for name, count, begun_ms in claims
        ]

    def timed(self, claims: Sequence[ShardClaim]) -> list[ShardClaim]:
        """The claims, with when what they hold is due."""
        with self._pipeline() as pipeline:
            for each in claims:
                held = self._keys[each.shard].claims + each.name
                pipeline.zrange(held, 0, 0, withscores=True)
                pipeline.zrange(held, -1, -1, withscores=True)
            found = pipeline.execute()
        return [
            replace(claim, due=_due([*first, *last]))
            for claim, first, last in zip(claims, found[::2], found[1::2], strict=True)
        ]

    def begin(self, claims: Sequence[ShardClaim], owner: str, now_ms: int) -> bool:
        """Note since when they are taken up; false where another holds one of them by now."""
        with self._pipeline() as pipeline:
            for each in claims:
                keys = self._keys[each.shard]
                _run(pipeline, "begin", [keys.owners, keys.begun], each.name, owner, now_ms)
            return all(pipeline.execute())

    def renew(self, claims: Iterable[ShardClaim], owner: str) -> None:
        """Extend their leases, of those that are still held."""
        names: dict[int, list[str]] = defaultdict(list)
        for each in claims:
            names[each.shard].append(each.name)
        with self._pipeline() as pipeline:
            for shard, some in names.items():
                keys = self._keys[shard]
                _run(pipeline, "renew", [keys.leases, keys.owners], owner, LEASE_MS, *some)
            pipeline.execute()

    def settle(self, claim: ShardClaim, owner: str) -> bool:
        """Free what it holds; false where another holds it by now, or it is settled."""
        keys, left = self._keys[claim.shard], 1
        held = [keys.claims + claim.name, keys.due, keys.leases, keys.owners, keys.begun]
        while left > 0:
            with self._pipeline() as pipeline:
                arguments = (claim.name, owner, keys.records, FREED, REMEMBERED_S)
                _run(pipeline, "settle", held, *arguments)
                (left,) = pipeline.execute()
        return left == 0

    def give_up(self, claims: Iterable[ShardClaim], owner: str) -> None:
        """End their leases now."""
        with self._pipeline() as pipeline:
            for each in claims:
                keys = self._keys[each.shard]
                _run(pipeline, "give_up", [keys.leases, keys.owners], each.name, owner)
            pipeline.execute()

    def everything(self, part: int, parts: int) -> Iterator[list[Record]]:
        """What waits in one of so many parts of the shards, some at a time."""
        for keys in self._keys[part::parts]:
            for set_name in self.sets(keys):
                with answering(self._settings):
                    found = client(self._settings).zscan_iter(set_name, count=READ_FIRST)
                    names = (cast("bytes", name).decode() for name, _ in found)
                    while some := list(islice(names, READ_FIRST)):
                        yield [unpacked(each) for each in self.packed(keys, some) if each]

    def sets(self, keys: ShardKeys) -> Iterator[str]:
        """The sorted sets of a shard: what waits, then what is claimed and not settled."""
        yield keys.due
        # Looked for now: from there it goes to a claim, and not back while that is held.
        with answering(self._settings):
            claims = cast("list[bytes]", client(self._settings).zrange(keys.leases, 0, -1))
        yield from (keys.claims + claim.decode() for claim in claims)

    def records(self, claim: ShardClaim) -> Iterator[list[Record]]:
        """What a claim holds, in order of time, some at a time."""
        keys, start, size = self._keys[claim.shard], 0, READ_FIRST
        with answering(self._settings):
            while names := self._names(keys.claims + claim.name, start, start + size - 1):
                packed = self.packed(keys, names)
                yield [
                    unpacked(data) if data else lost(name)
                    for name, data in zip(names, packed, strict=True)
                ]
                start += len(names)
                average = sum(len(data or b"") for data in packed) // len(names) + 1
                size = min(max(READ_BYTES // average, 1), READ_MOST)

    def packed(self, keys: ShardKeys, names: Sequence[str]) -> list[bytes | None]:
        """The records of these names; None of those that are not there."""
        asked = [keys.records + name for name in names]
        return cast("list[bytes | None]", client(self._settings).mget(asked))

    def _names(self, key: str, start: int, last: int) -> list[str]:
        found = cast("list[bytes]", client(self._settings).zrange(key, start, last))
        return [name.decode() for name in found]

    @contextmanager
    def _pipeline(self, *, saving: bool = False) -> Iterator[Pipeline]:
        redis = client(self._settings, saving=saving)
        with answering(self._settings), redis.pipeline(transaction=False) as pipeline:
            yield pipeline

    def _save(self, pipeline: Pipeline, keys: ShardKeys, rows: Sequence[Row], term: int) -> None:
        flat = [part for row in rows for part in (row.name, row.due_ms, row.packed)]
        held = [keys.due, self._term_key]
        _run(pipeline, "save", held, term, keys.records, PLACE.size, *flat)


def _due(scored: Sequence[tuple[bytes, float]]) -> DueTimes:
    """Of its first and its last; another reader may have taken over the claim, and emptied it."""
    return DueTimes(int(scored[0][1]), int(scored[-1][1]) + 1) if scored else ANY_TIME


def _run(pipeline: Pipeline, name: str, keys: Sequence[str], *arguments: str | int | bytes) -> None:
    """Add a script to the pipeline, which loads it where the server does not know it."""
    _script(name)(keys=keys, args=arguments, client=pipeline)


@cache
def _script(name: str) -> Script:
    path = Path(__file__).with_name(f"{name}.lua")
    text = path.read_text(encoding="ascii")
    return Script(Redis(), text if name == "save" else GOES_ON + text)
