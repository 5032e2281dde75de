"""Redis as a store: waiting messages are in memory, and an outage of any length removes nothing.

A shard has a key per message and a sorted set by due time. A scheduler *claims* what is due before
an instant: one script moves it to a sorted set of the claim, and gives the claim a lease. The
scheduler extends the lease while it lives. After that, another scheduler takes over the whole
claim, with the instant at which it was started. So two schedulers never hold one message, and what
a crash leaves is found as with the wheel.

    save        due: a b c d      leases: -
    acquire     due: c d          claim 1: a b      leases: 1 until 12:00:05
    settle      due: c d          leases: -         (a and b are freed)
    or a crash  due: c d          claim 1: a b      taken over by the first scan after 12:00:05

No key expires before its message is delivered.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from secrets import token_hex
from typing import cast

from duetime.core.errors import StoreError
from duetime.core.messages import MessageId, PendingMessage, SortKey
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.stores import MessageFilter, PendingSlot
from duetime.stores.redis.scripts import (
    ShardClaim,
    ShardKeys,
    Shards,
    check_server,
    client,
    redis_errors,
    shard_of,
)
from duetime.stores.row_store import (
    CANCEL_MARK,
    Backend,
    KeyedReader,
    LeaseKeeper,
    counted_slots,
    empty_slots,
    read_messages,
    record_names,
    unpack,
)

log = logging.getLogger(__name__)

#: A claim of a shard takes about this fraction of a job's messages, at most.
CLAIMS_PER_JOB = 8

#: The number of names that one request reads.
PAGE_SIZE = 500


class RedisStore:
    """The messages in Redis, for one scheduler; see `duetime.stores.Store`. Raises StoreError."""

    #: Windows are acquired in time. There are no far slots.
    levels = 1

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError if messages were saved under other settings."""
        self._wheel = settings.wheel
        self._max_claim = max(1, settings.max_messages_per_job // CLAIMS_PER_JOB)
        self._shards = Shards(settings)
        self._shards.check()
        self._owner = token_hex(8)
        self._leases = LeaseKeeper[tuple[int, str], ShardClaim](
            lambda held: self._shards.renew(held.values(), self._owner)
        )

    def acquire(self, slot: Slot) -> Sequence[ShardClaim]:
        """Claim what is due before the slot's end, including what came late for an earlier slot."""
        return self._claim(self._wheel.end_ms(slot))

    def acquire_overdue(self, now_ms: int) -> Sequence[ShardClaim]:
        """Claim what others have left, and all that is overdue."""
        claims = self._hold(self._shards.take_over(self._owner, self._leases.held().values()))
        try:
            claims += chain.from_iterable(iter(lambda: self._claim(now_ms), []))
        except StoreError:
            # The caller never learns of these claims: they are found when their leases end.
            self._drop(claims)
            raise
        return claims

    def mark_started(self, claims: Iterable[ShardClaim], now_ms: int) -> None:
        """Record the instant with each claim. Raises StoreError if another scheduler holds one."""
        if not self._shards.mark_started(claims, self._owner, now_ms):
            raise StoreError("another scheduler has taken over the claims: it will deliver them")

    def settle(self, claims: Iterable[ShardClaim]) -> None:
        """Free the claims' records. What a crash leaves of them is taken over as started."""
        for each in claims:
            if not self._shards.settle(each, self._owner):
                log.warning("lease lost before settling shard=%d claim=%s", each.shard, each.name)
            self._drop([each])

    def release(self, claims: Iterable[ShardClaim]) -> None:
        """End the leases: the next overdue scan takes the claims over."""
        claims = list(claims)
        self._drop(claims)
        self._shards.release(claims, self._owner)

    def close(self) -> None:
        """Stop extending leases. Other schedulers take over open claims when they end."""
        self._leases.close()

    def _claim(self, before_ms: int) -> list[ShardClaim]:
        name = f"{before_ms}-{token_hex(8)}"
        return self._hold(self._shards.acquire(before_ms, self._max_claim, name, self._owner))

    def _hold(self, claims: list[ShardClaim]) -> list[ShardClaim]:
        self._leases.add({(each.shard, each.name): each for each in claims})
        return claims

    def _drop(self, claims: Iterable[ShardClaim]) -> None:
        self._leases.remove((each.shard, each.name) for each in claims)


class RedisReader(KeyedReader):
    """The messages that wait in Redis. Thread-safe. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._wheel = settings.wheel
        self._shards = Shards(settings)

    def lookup(self, message_id: MessageId, retry_ms: int | None) -> PendingMessage | None:
        """See `KeyedReader.lookup`."""
        keys = self._shards.keys[shard_of(str(message_id), len(self._shards.keys))]
        with redis_errors(self._settings):
            message, cancel = self._shards.packed(keys, record_names(message_id, retry_ms))
        return unpack(message).to_message(cancelled=cancel is not None) if message else None

    def pending(self, now_ms: int) -> Sequence[PendingSlot]:
        """Count the records of each slot that the wheel would have."""
        with redis_errors(self._settings), client(self._settings).pipeline(False) as pipeline:
            sets = self._name_sets()
            for _, key in sets:
                pipeline.zrange(key, 0, 0, withscores=True)
            firsts = pipeline.execute()
            oldest_ms = min((int(first[0][1]) for first in firsts if first), default=now_ms)
            slots = empty_slots(self._wheel, oldest_ms, now_ms)
            for slot in slots:
                for _, key in sets:
                    pipeline.zcount(key, slot.start_ms, f"({slot.end_ms}")
            counts = pipeline.execute()
        size = len(sets)
        return counted_slots(
            slots, [sum(counts[at : at + size]) for at in range(0, len(counts), size)]
        )

    def streams(self, message_filter: MessageFilter) -> Sequence[Iterator[PendingMessage]]:
        """Return a stream for each sorted set. Some hundred messages are held."""
        return [self._stream(*each, message_filter) for each in self._name_sets()]

    def _name_sets(self) -> list[tuple[ShardKeys, str]]:
        """Return the shard and key of each sorted set: unclaimed messages, then claims."""
        return [(keys, key) for keys in self._shards.keys for key in self._shards.sets(keys)]

    def _stream(
        self, keys: ShardKeys, key: str, message_filter: MessageFilter
    ) -> Iterator[PendingMessage]:
        # A sorted set orders names with one score by name, as sort keys are ordered.
        last = passed = message_filter.after
        with redis_errors(self._settings):
            while page := self._page(key, last, message_filter.to_ms):
                messages = [
                    each.name
                    for each in page
                    if each > passed and not each.name.startswith(CANCEL_MARK)
                ]
                yield from read_messages(messages, partial(self._uncancelled, keys))
                last, passed = page[-1], max(passed, page[-1])

    def _uncancelled(self, keys: ShardKeys, names: Sequence[str]) -> list[PendingMessage]:
        packed = self._shards.packed(keys, [*names, *(CANCEL_MARK + name for name in names)])
        pairs = zip(packed[: len(names)], packed[len(names) :], strict=True)
        found = (
            unpack(message).to_message() for message, cancel in pairs if message and not cancel
        )
        return [each for each in found if each]

    def _page(self, key: str, last: SortKey, to_ms: int) -> list[SortKey]:
        """Return the next names after `last`; if it is gone, from the first of its ms on."""
        found = self._following(key, last)
        if found is None:
            found = _sort_keys(
                client(self._settings).zrange(
                    key, last.due_ms, to_ms, byscore=True, offset=0, num=PAGE_SIZE, withscores=True
                )
            )
        return [each for each in found if each.due_ms < to_ms]

    def _following(self, key: str, last: SortKey) -> list[SortKey] | None:
        """Return the next names after `last`; None if it is not in the set."""
        redis = client(self._settings)
        while (rank := cast("int | None", redis.zrank(key, last.name))) is not None:
            found = _sort_keys(redis.zrange(key, rank, rank + PAGE_SIZE, withscores=True))
            # Names claimed meanwhile leave the front of the set, and ranks change.
            if found and found[0] == last:
                return found[1:]
        return None


def _sort_keys(scored: object) -> list[SortKey]:
    pairs = cast("list[tuple[bytes, float]]", scored)
    return [SortKey(int(due_ms), name.decode()) for name, due_ms in pairs]


BACKEND = Backend(store=RedisStore, reader=RedisReader, rows=Shards, check=check_server)
