"""Redis as a store: what waits is in memory, and an outage of any length removes nothing.

A key per message and a sorted set by due time, in shards. A reader *claims* what is due before an
instant: in one step it leaves the sorted set for one of the claim's own, and the claim has a lease.
While the reader lives it extends the lease; if it does not, another reader takes the claim over, as
a whole and knowing since when it was taken up. So two readers never hold the same message, and what
a crash leaves is found as it is with the wheel.

    save        due: a b c d      leases: -
    claim       due: c d          claim 1: a b      leases: 1 until 12:00:05
    settle      due: c d          leases: -         (a and b are freed)
    or a crash  due: c d          claim 1: a b      taken over by whoever looks after 12:00:05

No key expires before its message is delivered.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from secrets import token_hex

from duetime.config import Settings
from duetime.errors import StoreError, words
from duetime.message import MessageId
from duetime.stores import Found, Pending
from duetime.stores.held import Held
from duetime.stores.redis.reader import RedisReader
from duetime.stores.redis.shards import LEASE_MS, ShardClaim, Shards
from duetime.wheel import Slot

log = logging.getLogger(__name__)

#: About how many messages one claim of a shard takes at most, as a part of a job's.
PARTS = 8


class RedisStore:
    """What waits in Redis, as one planner sees it. Thread-safe.

    Raises StoreError, and ConfigError where what waits was saved under other settings.
    """

    #: It has windows, and no far slots.
    levels = 1

    def __init__(self, settings: Settings) -> None:
        self._wheel = settings.wheel
        self._most = max(1, settings.job_messages // PARTS)
        self._shards = Shards(settings)
        self._shards.check()
        self._reader = RedisReader(settings)
        self._owner = token_hex(8)
        self._held = Held[tuple[int, str], ShardClaim](
            lambda held: self._shards.renew(held.values(), self._owner), lease_ms=LEASE_MS
        )

    def due(self, slot: Slot) -> Sequence[ShardClaim]:
        """Claim what waits and is due before the slot's end: what came late for its own, too."""
        return self._claim(self._wheel.end_ms(slot))

    def overdue(self, now_ms: int) -> Sequence[ShardClaim]:
        """Claim what others have left, and all that is past due."""
        found = self._hold(self._shards.take_over(self._owner, self._held.all()))
        try:
            found += chain.from_iterable(iter(lambda: self._claim(now_ms), []))
        except StoreError:
            # Nobody hears of them here: they are found again when their leases end.
            self._let_go(found)
            raise
        return self._timed(found)

    def begin(self, claims: Iterable[ShardClaim], now_ms: int) -> None:
        """Note it beside the claims. Raises StoreError where another reader has one by now."""
        if not self._shards.begin(list(claims), self._owner, now_ms):
            raise StoreError("another reader has taken over what was claimed: leaving it to that")

    def settle(self, claims: Iterable[ShardClaim]) -> None:
        """Free what they hold. What a crash leaves of it is taken over as begun."""
        for each in claims:
            if not self._shards.settle(each, self._owner):
                log.warning("lease lost before settling shard=%d claim=%s", each.shard, each.name)
            self._let_go([each])

    def give_up(self, claims: Iterable[ShardClaim]) -> None:
        """Drop the claims: rescue finds what they held."""
        dropped = list(claims)
        self._let_go(dropped)
        self._shards.give_up(dropped, self._owner)

    def find(self, id: MessageId, now_ms: int) -> Found | None:  # noqa: A002 (what all call it)
        """The message with this id, if it waits."""
        return self._reader.find(id, now_ms)

    def pending(self, now_ms: int) -> Iterator[Pending]:
        """What waits, slot by slot, in order of time."""
        return iter(self._reader.pending(now_ms))

    def close(self) -> None:
        """Stop extending leases. What is claimed is found by others when they end."""
        self._held.close()

    def _timed(self, found: list[ShardClaim]) -> list[ShardClaim]:
        """The claims with when they are due, which is told: they are taken up without it, too."""
        try:
            return self._shards.timed(found)
        except StoreError as error:
            log.warning("could not look when what is overdue was due error=%s", words(error))
            return found

    def _claim(self, before_ms: int) -> list[ShardClaim]:
        return self._hold(
            self._shards.claim(before_ms, self._most, f"{before_ms}-{token_hex(8)}", self._owner)
        )

    def _hold(self, claims: list[ShardClaim]) -> list[ShardClaim]:
        self._held.take({(each.shard, each.name): each for each in claims})
        return claims

    def _let_go(self, claims: Iterable[ShardClaim]) -> None:
        self._held.let_go((each.shard, each.name) for each in claims)
