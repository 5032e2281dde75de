"""Redis: the connection, what it requires of the server, the keys, and the scripts.

Each operation on the shards is one script or one pipeline, in any process.

All keys begin with the namespace.

duetime:shards                the number of shards
duetime:term                  the term of the latest writer: only that one may save
duetime:0:due                 of shard 0, unclaimed messages: names of records, scored by due ms
duetime:0:m:<name>            a packed record (see `duetime.stores.row_store`)
duetime:0:claim:<claim>       the names that a claim has taken out of `due`, scored alike
duetime:0:leases              claims, scored by the end of their lease, in ms of Redis's clock
duetime:0:owners              the owner of each claim
duetime:0:begun               when each claim was started, epoch ms
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import cast

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.client import Pipeline
from redis.commands.core import Script
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from duetime.core.errors import ConfigError, StoreError
from duetime.core.settings import Settings
from duetime.kafka.offsets import ANY_TIME, DueTimes
from duetime.stores.row_store import (
    LEASE_MS,
    ORIGIN,
    Record,
    Row,
    batches,
    missing_record,
    next_batch_size,
    unpack,
)

#: The time limit of a command (a large claim is one) and of a connection attempt, in seconds.
TIMEOUT_S, CONNECT_TIMEOUT_S = 10.0, 2.0

#: Retries of a command after its connection broke, and the longest pause between two, in seconds: a
#: server that restarts is no reason to fail.
MAX_RETRIES, MAX_BACKOFF_S = 4, 0.5

#: The first release with all commands used here (ZRANGESTORE).
MIN_VERSION = (6, 2)

#: The most records, and bytes of them, that one script saves: Redis is blocked for some ms.
MAX_SAVED, MAX_SAVED_BYTES = 500, 4 * 1024 * 1024

#: The first and the largest number of a claim's records that one request reads.
FIRST_READ, MAX_READ = 100, 2_000

#: The most records that one script frees: Redis is blocked meanwhile.
MAX_FREED = 1_000

#: The first line of every script but `save`. A script that has written, even nothing, may continue
#: where memory is short, and some of these free memory.
ALLOW_WITHOUT_MEMORY = "redis.call('DEL', KEYS[1] .. ':nothing')\n"

#: How long a cancel is kept after it was settled, in seconds: longer than a pipeline takes to
#: repeat a batch that a crash has interrupted.
CANCEL_KEPT_S = 3_600


class ShardKeys:
    """The keys of one shard. `records` and `claims` are prefixes."""

    def __init__(self, namespace: str, shard: int) -> None:
        prefix = f"{namespace}:{shard}"
        self.due = f"{prefix}:due"
        self.records = f"{prefix}:m:"
        self.claims = f"{prefix}:claim:"
        self.leases = f"{prefix}:leases"
        self.owners = f"{prefix}:owners"
        self.begun = f"{prefix}:begun"


def shard_keys(namespace: str, shards: int) -> list[ShardKeys]:
    """Return the keys of every shard."""
    return [ShardKeys(namespace, each) for each in range(shards)]


def shard_of(message_id: str, shards: int) -> int:
    """Return the shard of a message, its cancel and its retries."""
    return zlib.crc32(message_id.encode()) % shards


def client(settings: Settings, *, saving: bool = False) -> Redis:
    """Return this process's connection pool.

    Every script and command here is idempotent, so it is retried after a broken connection. A save
    is not retried after a time-out: what it has saved may have been delivered meanwhile.
    """
    errors = (RedisConnectionError,) if saving else (RedisConnectionError, RedisTimeoutError)
    return _client(settings.store.get_secret_value(), errors)


@cache
def _client(url: str, errors: tuple[type[RedisError], ...]) -> Redis:
    return Redis.from_url(
        url,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(ExponentialBackoff(cap=MAX_BACKOFF_S, base=0.01), MAX_RETRIES, errors),
        retry_on_error=list(errors),
    )


@contextmanager
def redis_errors(settings: Settings) -> Iterator[None]:
    """Raise StoreError in place of an error of the Redis client."""
    try:
        yield
    except RedisError as error:
        # A pipeline's error quotes the command, which may contain a part of a message.
        _, _, message = str(error).rpartition("caused error: ")
        detail = " ".join(message.split()) or type(error).__name__
        raise StoreError(
            f"Redis at {server_address(settings)} does not answer as it should ({detail}): check "
            "that it is up, and its address, user and password in setting store"
        ) from None


def server_address(settings: Settings) -> str:
    """Return host:port/database, without user and password."""
    known = client(settings).connection_pool.connection_kwargs
    host, port = known.get("host", "localhost"), known.get("port", 6379)
    return f"{host}:{port}/{known.get('db', 0)}"


def check_server(settings: Settings) -> str:
    """Return a sentence that describes the server.

    Raises StoreError, and ConfigError if the server would lose messages.
    """
    with redis_errors(settings):
        info = client(settings).info()
    where, version = f"Redis at {server_address(settings)}", str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise ConfigError(f"{where} is {version}: use 6.2 or newer")
    if info.get("redis_mode") == "cluster" or info.get("cluster_enabled"):
        raise ConfigError(
            f"{where} is a cluster, which cannot run scripts over several keys: use one server, "
            "with replicas if you like"
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise ConfigError(
            f"{where} has maxmemory-policy {policy}, which removes waiting messages when memory is "
            "short: set noeviction"
        )
    if not info.get("aof_enabled"):
        raise ConfigError(
            f"{where} has no append-only file, so waiting messages would be lost when it stops: "
            "set appendonly yes"
        )
    address = server_address(settings)
    return f"Redis {version} at {address} has an append-only file and evicts nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardClaim:
    """Records of one shard that one scheduler has claimed; see `duetime.stores.Claim`."""

    shard: int
    name: str
    count: int
    started_ms: int | None = None
    due: DueTimes = ANY_TIME


class Shards:
    """The shards of one namespace. Thread-safe and picklable. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.keys = shard_keys(settings.namespace, settings.redis_shards)
        self._term_key = f"{settings.namespace}:term"

    def check(self) -> None:
        """Raise ConfigError if messages were saved into another number of shards."""
        key, wanted = f"{self._settings.namespace}:shards", len(self.keys)
        redis = client(self._settings)
        with redis_errors(self._settings):
            # Read first: where memory is short, nothing can be set.
            if (found := redis.get(key)) is None:
                redis.set(key, wanted, nx=True)
                found = redis.get(key)
            saved = int(cast("bytes", found))
        if saved != wanted:
            raise ConfigError(
                f"setting redis_shards: it is {wanted}, and the store's messages were saved into "
                f"{saved}: set that, or empty the store and remove its key {key}"
            )

    def clear(self) -> None:
        """Remove every key of this namespace, waiting messages included."""
        redis = client(self._settings)
        with redis_errors(self._settings):
            for key in redis.scan_iter(match=f"{self._settings.namespace}:*", count=1_000):
                redis.unlink(key)

    def begin_term(self) -> int:
        """See `RowStore.begin_term`."""
        with self._pipeline() as pipeline:
            _run(pipeline, "begin_term", [self._term_key])
            (term,) = pipeline.execute()
        return int(term)

    def save(self, rows: Iterable[Row], term: int) -> None:
        """See `RowStore.save`."""
        by_shard: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            by_shard[shard_of(row.id, len(self.keys))].append(row)
        with self._pipeline(saving=True) as pipeline:
            for shard, of_shard in by_shard.items():
                keys = self.keys[shard]
                for batch in batches(of_shard, MAX_SAVED, MAX_SAVED_BYTES):
                    flat = [part for row in batch for part in (row.name, row.due_ms, row.packed)]
                    arguments = (term, keys.records, ORIGIN.size, *flat)
                    _run(pipeline, "save", [keys.due, self._term_key], *arguments)
            pipeline.execute()

    def acquire(self, before_ms: int, limit: int, name: str, owner: str) -> list[ShardClaim]:
        """Claim what is due before an instant, about `limit` messages of each shard at most."""
        with self._pipeline() as pipeline:
            for keys in self.keys:
                used = [keys.due, keys.claims + name, keys.leases, keys.owners]
                _run(pipeline, "acquire", used, before_ms, limit, name, owner, LEASE_MS)
            found = pipeline.execute()
        return [
            ShardClaim(shard=shard, name=name, count=count, due=_due_times(scores))
            for shard, (count, *scores) in enumerate(found)
            if count
        ]

    def take_over(self, owner: str, busy: Iterable[ShardClaim]) -> list[ShardClaim]:
        """Take over the claims whose lease has ended, except the owner's `busy` ones."""
        names = _names_by_shard(busy)
        with self._pipeline() as pipeline:
            for shard, keys in enumerate(self.keys):
                used = [keys.leases, keys.owners, keys.begun]
                _run(pipeline, "take_over", used, keys.claims, owner, LEASE_MS, *names[shard])
            found = pipeline.execute()
        return [
            ShardClaim(
                shard=shard,
                name=name.decode(),
                count=count,
                started_ms=int(started_ms) if started_ms else None,
                due=_due_times(scores),
            )
            for shard, claims in enumerate(found)
            for name, started_ms, count, *scores in claims
        ]

    def mark_started(self, claims: Iterable[ShardClaim], owner: str, now_ms: int) -> bool:
        """Record when claims were started; return whether the owner still holds them all."""
        with self._pipeline() as pipeline:
            for each in claims:
                keys = self.keys[each.shard]
                _run(pipeline, "mark_started", [keys.owners, keys.begun], each.name, owner, now_ms)
            return all(pipeline.execute())

    def renew(self, claims: Iterable[ShardClaim], owner: str) -> None:
        """Extend the leases of claims that the owner still holds."""
        with self._pipeline() as pipeline:
            for shard, of_shard in _names_by_shard(claims).items():
                keys = self.keys[shard]
                _run(pipeline, "renew", [keys.leases, keys.owners], owner, LEASE_MS, *of_shard)
            pipeline.execute()

    def settle(self, claim: ShardClaim, owner: str) -> bool:
        """Free a claim's records; return whether no other owner holds it."""
        keys, left = self.keys[claim.shard], 1
        used = [keys.claims + claim.name, keys.due, keys.leases, keys.owners, keys.begun]
        arguments = (claim.name, owner, keys.records, MAX_FREED, CANCEL_KEPT_S)
        while left > 0:
            with self._pipeline() as pipeline:
                _run(pipeline, "settle", used, *arguments)
                (left,) = pipeline.execute()
        return left == 0

    def release(self, claims: Iterable[ShardClaim], owner: str) -> None:
        """End the leases of claims that the owner still holds."""
        with self._pipeline() as pipeline:
            for each in claims:
                keys = self.keys[each.shard]
                _run(pipeline, "release", [keys.leases, keys.owners], each.name, owner)
            pipeline.execute()

    def records(self, claim: ShardClaim) -> Iterator[list[Record]]:
        """See `RowStore.records`."""
        keys, start, size = self.keys[claim.shard], 0, FIRST_READ
        redis, key = client(self._settings), keys.claims + claim.name
        with redis_errors(self._settings):
            while found := cast("list[bytes]", redis.zrange(key, start, start + size - 1)):
                names = [name.decode() for name in found]
                packed = self.packed(keys, names)
                yield [
                    unpack(data) if data else missing_record(name)
                    for name, data in zip(names, packed, strict=True)
                ]
                start += len(names)
                size_bytes = sum(len(data or b"") for data in packed)
                size = next_batch_size(len(names), size_bytes, MAX_READ)

    def all_records(self, part: int, parts: int) -> Iterator[list[Record]]:
        """See `RowStore.all_records`. A part is every `parts`-th shard."""
        for keys in self.keys[part::parts]:
            for key in self.sets(keys):
                with redis_errors(self._settings):
                    found = client(self._settings).zscan_iter(key, count=FIRST_READ)
                    names = (cast("bytes", name).decode() for name, _ in found)
                    while batch := list(islice(names, FIRST_READ)):
                        yield [unpack(each) for each in self.packed(keys, batch) if each]

    def sets(self, keys: ShardKeys) -> Iterator[str]:
        """Yield the sorted sets of a shard: unclaimed messages first, then each claim."""
        yield keys.due
        # Listed only now: messages move from `due` to a claim, and do not return while it is held.
        with redis_errors(self._settings):
            claims = cast("list[bytes]", client(self._settings).zrange(keys.leases, 0, -1))
        yield from (keys.claims + claim.decode() for claim in claims)

    def packed(self, keys: ShardKeys, names: Sequence[str]) -> list[bytes | None]:
        """Return the packed records with these names, None for a missing one. Raises RedisError."""
        found = client(self._settings).mget([keys.records + name for name in names])
        return cast("list[bytes | None]", found)

    @contextmanager
    def _pipeline(self, *, saving: bool = False) -> Iterator[Pipeline]:
        redis = client(self._settings, saving=saving)
        with redis_errors(self._settings), redis.pipeline(transaction=False) as pipeline:
            yield pipeline


def _due_times(scores: Sequence[bytes]) -> DueTimes:
    """Return the due times between the first and the last score of a claim, if it has any."""
    return DueTimes(int(scores[0]), int(scores[-1]) + 1) if scores else ANY_TIME


def _names_by_shard(claims: Iterable[ShardClaim]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for each in claims:
        names[each.shard].append(each.name)
    return names


def _run(pipeline: Pipeline, name: str, keys: Sequence[str], *arguments: str | int | bytes) -> None:
    """Add a script to the pipeline, which loads it if the server does not know it."""
    _script(name)(keys=keys, args=arguments, client=pipeline)


@cache
def _script(name: str) -> Script:
    text = Path(__file__).with_name(f"{name}.lua").read_text(encoding="ascii")
    return Script(Redis(), text if name == "save" else ALLOW_WITHOUT_MEMORY + text)
