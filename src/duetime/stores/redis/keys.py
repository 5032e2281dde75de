"""Every key that the Redis store uses. All begin with the namespace.

duetime:shards                how many shards there are
duetime:term                  counts those who began to save: the last of them may
duetime:0:due                 of shard 0, what waits: names of records, scored by their due ms
duetime:0:m:<name>            a record that waits, packed (see `duetime.stores.rows`)
duetime:0:claim:<claim>       what a claim has taken out of `due`: the same
duetime:0:leases              its claims, scored by when their lease ends, in ms of Redis's clock
duetime:0:owners              who holds each claim
duetime:0:begun               since when each is taken up, epoch ms
"""

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys of one shard."""

    prefix: str

    @property
    def due(self) -> str:
        """What waits."""
        return f"{self.prefix}:due"

    @property
    def records(self) -> str:
        """How the keys of records begin."""
        return f"{self.prefix}:m:"

    @property
    def claims(self) -> str:
        """How the keys of claims begin."""
        return f"{self.prefix}:claim:"

    @property
    def leases(self) -> str:
        """When leases end."""
        return f"{self.prefix}:leases"

    @property
    def owners(self) -> str:
        """Who holds what."""
        return f"{self.prefix}:owners"

    @property
    def begun(self) -> str:
        """What was taken up when."""
        return f"{self.prefix}:begun"


def shard_keys(namespace: str, shards: int) -> list[ShardKeys]:
    """The keys of every shard."""
    return [ShardKeys(f"{namespace}:{number}") for number in range(shards)]


def shard_of(id: str, shards: int) -> int:  # noqa: A002 (what all call it)
    """Where a message is kept, with its cancel and its retries."""
    return zlib.crc32(id.encode()) % shards
