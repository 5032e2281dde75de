"""Redis's scripts in any order of calls by two owners, on a real server, against a model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from redis import Redis
from tests.support.saved import NOW_MS, row

from duetime.core.errors import StoreError
from duetime.core.settings import Settings
from duetime.stores.redis.scripts import ShardClaim, Shards, shard_of
from duetime.stores.row_store import unpack

OWNERS = st.sampled_from(["first", "second"])

#: The number of an id, when it is due, the offset in the inbox, and whether it is a cancel. So few
#: that most meet another one, and few cancels, as nothing is saved behind a cancel.
ROWS = st.tuples(
    st.integers(0, 3), st.integers(0, 1), st.integers(0, 1), st.sampled_from([False] * 9 + [True])
)


@dataclass
class Claim:
    """A claim as it must be: who holds it, and the due times of its records by name."""

    shard: int
    name: str
    owner: str | None
    due: dict[str, int]
    started_ms: int | None = None
    is_ended: bool = False

    def key(self):
        return ShardClaim(shard=self.shard, name=self.name, count=len(self.due))


@dataclass
class Shard:
    """A shard as it must be."""

    #: The due times of unclaimed records, by name.
    due: dict[str, int] = field(default_factory=dict)
    #: The origins of all records that are kept, by name.
    origins: dict[str, int] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)


class RedisStates(RuleBasedStateMachine):
    """Two shards, two owners that claim, and one writer after another."""

    url: str

    def __init__(self):
        super().__init__()
        self.redis = Redis.from_url(self.url)
        self.redis.flushdb()
        self.shards = Shards(Settings(store=self.url, redis_shards=2))
        self.term = self.shards.begin_term()
        self.model = [Shard(), Shard()]
        self.counter = 0

    @property
    def claims(self):
        return [claim for shard in self.model for claim in shard.claims.values()]

    def claim(self, data):
        return data.draw(st.sampled_from(self.claims))

    @rule(rows=st.lists(ROWS, min_size=1, max_size=6))
    def save(self, rows):
        found = [
            row(NOW_MS + due, f"m{number}", offset=offset, is_cancel=is_cancel)
            for number, due, offset, is_cancel in rows
        ]
        self.shards.save(found, self.term)
        for each, (_, _, offset, _) in zip(found, rows, strict=True):
            shard = self.model[shard_of(each.id, 2)]
            is_known = shard.origins.get(each.name) == offset or each.name in shard.due
            if not is_known and f"!{each.name}" not in shard.origins:
                shard.origins[each.name] = offset
                shard.due[each.name] = each.due_ms

    @rule()
    def begin_term(self):
        old, self.term = self.term, self.shards.begin_term()
        with pytest.raises(StoreError, match="another writer has begun since"):
            self.shards.save([row(NOW_MS)], old)

    @rule(owner=OWNERS, before=st.integers(1, 2), limit=st.integers(1, 3), repeats=st.booleans())
    def acquire(self, owner, before, limit, repeats):
        self.counter += 1
        name = f"claim-{self.counter}"
        found = self.shards.acquire(NOW_MS + before, limit, name, owner)
        for index, shard in enumerate(self.model):
            early = sorted(each for each in shard.due.values() if each < NOW_MS + before)
            # The messages of a millisecond stay together.
            last = early[:limit][-1] if early else 0
            taken = {each: due for each, due in shard.due.items() if due <= last}
            if taken:
                shard.claims[name] = Claim(index, name, owner, taken)
                shard.due = {each: due for each, due in shard.due.items() if due > last}
        assert [(each.shard, each.count) for each in found] == [
            (each.shard, len(each.due)) for each in self.claims if each.name == name
        ]
        # The answer may be lost: the second one is the same while there is a claim.
        if repeats and len(found) == len(self.model):
            assert self.shards.acquire(NOW_MS + before, limit, name, owner) == found

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def end_lease(self, data):
        claim = self.claim(data)
        self.redis.zadd(self.shards.keys[claim.shard].leases, {claim.name: 1})
        claim.is_ended = True

    @rule(data=st.data(), owner=OWNERS)
    def take_over(self, data, owner):
        own = [each for each in self.claims if each.owner == owner]
        busy = data.draw(st.lists(st.sampled_from(own), unique_by=id)) if own else []
        found = self.shards.take_over(owner, [each.key() for each in busy])
        kept = {(each.shard, each.name) for each in busy}
        taken = [e for e in self.claims if e.is_ended and (e.shard, e.name) not in kept]
        assert {(each.shard, each.name, each.count, each.started_ms) for each in found} == {
            (each.shard, each.name, len(each.due), each.started_ms) for each in taken
        }
        for each in taken:
            each.owner, each.is_ended = owner, False

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), owner=OWNERS)
    def mark_started(self, data, owner):
        self.counter += 1
        claim = self.claim(data)
        is_held = self.shards.mark_started([claim.key()], owner, self.counter)
        assert is_held == (claim.owner == owner)
        if is_held and claim.started_ms is None:
            claim.started_ms = self.counter

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), owner=OWNERS)
    def renew(self, data, owner):
        claim = self.claim(data)
        self.shards.renew([claim.key()], owner)
        if claim.owner == owner:
            claim.is_ended = False

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), owner=OWNERS)
    def release(self, data, owner):
        claim = self.claim(data)
        self.shards.release([claim.key()], owner)
        if claim.owner == owner:
            claim.owner, claim.is_ended = None, True

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), owner=OWNERS)
    def settle(self, data, owner):
        claim = self.claim(data)
        shard = self.model[claim.shard]
        assert self.shards.settle(claim.key(), owner) == (claim.owner in {owner, None})
        if claim.owner == owner:
            del shard.claims[claim.name]
            for name in claim.due:
                # A cancel is kept for a while, and so is another record with the id that waits. One
                # that is claimed by now loses its payload, and the release job rejects it.
                if not name.startswith("!") and name not in shard.due:
                    shard.origins.pop(name, None)

    @invariant()
    def each_record_is_where_it_must_be(self):
        for keys, shard in zip(self.shards.keys, self.model, strict=True):
            assert self.scores(keys.due) == shard.due
            assert set(self.scores(keys.leases)) == set(shard.claims)
            for claim in shard.claims.values():
                assert self.scores(keys.claims + claim.name) == claim.due
            kept = {key.decode() for key in self.redis.scan_iter(f"{keys.records}*", count=1_000)}
            assert kept == {keys.records + name for name in shard.origins}
            packed = self.shards.packed(keys, list(shard.origins)) if kept else []
            assert [unpack(each).offset for each in packed] == list(shard.origins.values())
            assert shard.due.keys() <= shard.origins.keys()

    def scores(self, key):
        return {n.decode(): int(due) for n, due in self.redis.zrange(key, 0, -1, withscores=True)}

    def teardown(self):
        self.redis.close()


class TestRedisStates(RedisStates.TestCase):
    settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)

    @pytest.fixture(autouse=True)
    def _server(self, redis_server):
        RedisStates.url = redis_server.url
