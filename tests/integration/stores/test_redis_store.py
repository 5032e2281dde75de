"""The Redis store: the guarantees that only it has to give."""

import pytest
from redis import Redis
from tests.support.clocks import eventually
from tests.support.saved import NOW_MS, row
from tests.support.servers import local_redis

from duetime.core.errors import ConfigError, StoreError
from duetime.core.messages import MessageId, SortKey
from duetime.core.settings import Settings, load_settings
from duetime.local.process import HOST, free_port
from duetime.stores.factory import check_store, open_store
from duetime.stores.redis import RedisReader
from duetime.stores.redis.scripts import Shards, shard_keys, shard_of
from duetime.stores.row_store import record_name

SECOND, MINUTE = 1_000, 60_000


@pytest.fixture(scope="module")
def server(redis_server):
    return redis_server


@pytest.fixture
def redis(server):
    """The server, empty."""
    with Redis.from_url(server.url) as client:
        client.flushdb()
        yield client


@pytest.fixture
def settings(server, redis):  # noqa: ARG001 (it must be empty)
    return Settings(store=server.url)


class TermShards(Shards):
    """Shards with a term of their own."""

    def __init__(self, settings):
        super().__init__(settings)
        self._term = self.begin_term()

    def save(self, rows):
        super().save(rows, self._term)


@pytest.fixture
def shards(settings):
    return TermShards(settings)


@pytest.fixture
def opened(settings):
    """Open stores, and close them after the test."""
    stores = []

    def another():
        stores.append(open_store(settings))
        return stores[-1]

    yield another
    for each in stores:
        each.close()


@pytest.fixture
def end_leases(redis, settings):
    """End the leases of all claims, as time would."""

    def end():
        for keys in shard_keys(settings.namespace, settings.redis_shards):
            for name in redis.zrange(keys.leases, 0, -1):
                redis.zadd(keys.leases, {name: 1})

    return end


def values_in(shards, claims):
    return sorted(
        record.value for claim in claims for some in shards.records(claim) for record in some
    )


def test_claims_of_a_dead_scheduler_are_taken_over_as_started(opened, shards, end_leases):
    shards.save([row(NOW_MS, "begun"), row(NOW_MS + SECOND, "claimed")])
    dead, alive = opened(), opened()
    dead.mark_started(dead.acquire_overdue(NOW_MS + 1), 17)
    dead.acquire_overdue(NOW_MS + MINUTE)
    dead.close()
    assert alive.acquire_overdue(NOW_MS + MINUTE) == []
    end_leases()
    taken = alive.acquire_overdue(NOW_MS + MINUTE)
    assert sorted((each.count, each.started_ms or 0) for each in taken) == [(1, 0), (1, 17)]
    # Claims that are taken over have due times as well.
    assert {each.due.from_ms for each in taken} == {NOW_MS, NOW_MS + SECOND}


def test_overdue_messages_are_claimed_with_their_due_times(opened, shards):
    shards.save([row(NOW_MS), row(NOW_MS + SECOND, "later")])
    store = opened()
    claims = store.acquire_overdue(NOW_MS + SECOND + 1)
    assert sum(each.count for each in claims) == 2
    assert min(each.due.from_ms for each in claims) == NOW_MS
    assert max(each.due.to_ms for each in claims) == NOW_MS + SECOND + 1
    store.settle(claims)
    assert store.acquire_overdue(NOW_MS + SECOND + 1) == []


def test_a_paused_scheduler_keeps_its_claims(opened, shards, end_leases, settings):
    shards.save([row(NOW_MS)])
    store = opened()
    claims = store.acquire_overdue(NOW_MS + 1)
    end_leases()
    assert store.acquire_overdue(NOW_MS + MINUTE) == []
    store.settle(claims)
    assert RedisReader(settings).find(MessageId(due_ms=NOW_MS, unique="m"), NOW_MS) is None


def test_leases_are_extended_while_a_scheduler_works(opened, shards, redis, end_leases, settings):
    shards.save([row(NOW_MS)])
    (claim,) = opened().acquire_overdue(NOW_MS + 1)
    end_leases()
    leases = shard_keys(settings.namespace, settings.redis_shards)[claim.shard].leases
    eventually(lambda: redis.zscore(leases, claim.name) >= NOW_MS / 2, within_s=30)


def test_a_scheduler_without_its_lease_frees_nothing(opened, shards, end_leases):
    shards.save([row(NOW_MS, value=b"x")])
    slow, quick = opened(), opened()
    claims = slow.acquire_overdue(NOW_MS + 1)
    end_leases()
    taken = quick.acquire_overdue(NOW_MS + 1)
    with pytest.raises(StoreError, match="another scheduler"):
        slow.mark_started(claims, NOW_MS)
    slow.release(claims)
    slow.settle(claims)
    assert values_in(shards, taken) == [b"x"]


def test_a_writer_of_an_earlier_term_is_rejected(opened, settings):
    paused, leader = TermShards(settings), TermShards(settings)
    leader.save([row(NOW_MS)])
    store = opened()
    store.settle(store.acquire_overdue(NOW_MS + 1))
    with pytest.raises(StoreError, match="another writer has begun"):
        paused.save([row(NOW_MS)])
    assert store.acquire_overdue(NOW_MS + 1) == []


def test_a_cancelled_message_saved_again_is_dropped(opened, shards):
    message, cancel = row(NOW_MS), row(NOW_MS, offset=1, is_cancel=True)
    store = opened()
    shards.save([message, cancel])
    store.settle(store.acquire_overdue(NOW_MS + 1))
    shards.save([message, cancel])
    assert store.acquire_overdue(NOW_MS + 1) == []


def test_saving_a_claimed_message_again_changes_nothing(opened, shards, settings):
    store = opened()
    shards.save([row(NOW_MS)])
    claims = store.acquire_overdue(NOW_MS + 1)
    shards.save([row(NOW_MS)])
    assert store.acquire_overdue(NOW_MS + 1) == []
    store.settle(claims)
    assert RedisReader(settings).pending(NOW_MS) == []


def test_a_message_rescheduled_while_claimed_waits_again(opened, shards):
    # After the clock is set back, the release job finds that it is not due.
    store = opened()
    shards.save([row(NOW_MS, offset=1, value=b"x")])
    claims = store.acquire_overdue(NOW_MS + 1)
    shards.save([row(NOW_MS, offset=2, value=b"x")])
    store.settle(claims)
    assert values_in(shards, store.acquire_overdue(NOW_MS + 1)) == [b"x"]


def test_a_retry_waits_while_its_message_is_claimed(opened, shards):
    store = opened()
    first = row(NOW_MS)
    shards.save([first])
    claims = store.acquire_overdue(NOW_MS + 1)
    retry_ms = NOW_MS + MINUTE
    name = record_name(first.id, retry_ms, is_cancel=False)
    shards.save([first._replace(name=name, due_ms=retry_ms)])
    store.settle(claims)
    assert store.acquire_overdue(NOW_MS + SECOND) == []
    assert len(values_in(shards, store.acquire_overdue(retry_ms + 1))) == 1


def test_a_small_claim_has_messages_with_their_cancels(settings, shards):
    messages = [row(NOW_MS, f"m{each}", offset=each) for each in range(50)]
    cancels = [row(NOW_MS, f"m{each}", offset=50 + each, is_cancel=True) for each in range(50)]
    shards.save([*messages, *cancels, row(NOW_MS - 1, "before"), row(NOW_MS + 1, "after")])
    small = open_store(settings.model_copy(update={"max_messages_per_job": 1_000}))
    claims = small.acquire_overdue(NOW_MS + 1)
    small.close()
    held = [
        [str(one.headers[4][1]) for some in shards.records(each) for one in some] for each in claims
    ]
    assert sum(len(ids) for ids in held) == 101
    for ids in held:
        assert all(ids.count(each) == 2 for each in ids if "before" not in each)


def test_a_removed_payload_is_no_silent_loss(opened, shards, redis, settings):
    shards.save([row(NOW_MS)])
    identity = row(NOW_MS).id
    keys = shard_keys(settings.namespace, settings.redis_shards)
    redis.delete(keys[shard_of(identity, len(keys))].records + identity)
    (record,) = next(shards.records(opened().acquire_overdue(NOW_MS + 1)[0]))
    assert (record.key, record.headers) == (identity.encode(), [])


def test_no_key_expires_during_an_outage(tmp_path):
    with local_redis(tmp_path) as server:
        settings = Settings(store=server.url)
        shards = TermShards(settings)
        shards.save(row(NOW_MS + each, f"m{each}", value=b"%d" % each) for each in range(1_000))
        with Redis.from_url(server.url) as client:
            assert {client.ttl(key) for key in client.scan_iter()} == {-1}
        server.kill()
        server.start()
        store = open_store(settings)
        claims = store.acquire_overdue(NOW_MS + 24 * 60 * MINUTE)
        assert values_in(shards, claims) == sorted(b"%d" % each for each in range(1_000))
        store.close()


def test_another_number_of_shards_is_rejected(opened, settings):
    opened()
    with pytest.raises(ConfigError, match="saved into 4"):
        open_store(settings.model_copy(update={"redis_shards": 7}))


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"appendonly": "no"}, "append-only file"),
        ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru"),
        # By default its second port is 10,000 higher, where outgoing connections have theirs.
        ({"cluster-enabled": "yes", "cluster-port": str(free_port())}, "is a cluster"),
    ],
    ids=["no append-only file", "evicting", "cluster"],
)
def test_a_server_that_would_lose_messages_is_rejected(tmp_path, properties, words):
    with (
        local_redis(tmp_path, properties) as server,
        pytest.raises(ConfigError, match=words) as refused,
    ):
        check_store(Settings(store=server.url))
    assert "set " in str(refused.value) or "use " in str(refused.value)


def test_a_full_server_delivers_what_it_has(tmp_path):
    with local_redis(tmp_path, {"maxmemory": "4mb"}) as server:
        settings = Settings(store=server.url)
        shards, count = TermShards(settings), 0

        def fill():
            nonlocal count
            while count < 1_000:
                shards.save([row(NOW_MS, str(count), value=bytes(50_000))])
                count += 1

        with pytest.raises(StoreError, match="maxmemory"):
            fill()
        # A new leader can begin as well.
        store = open_store(settings)
        shards.begin_term()
        claims = store.acquire_overdue(NOW_MS + 1)
        store.mark_started(claims, NOW_MS)
        assert sum(each.count for each in claims) == count > 0
        store.settle(claims)
        store.close()
        TermShards(settings).save([row(NOW_MS, "later")])


def test_claims_made_before_an_outage_are_found_again(opened, settings, monkeypatch):
    store = opened()
    TermShards(settings).save([row(NOW_MS, str(number)) for number in range(100)])
    claim, calls = store._shards.acquire, iter([True])

    def once(*asked):
        if next(calls, None):
            return claim(*asked)
        raise StoreError("away")

    monkeypatch.setattr(store._shards, "acquire", once)
    with pytest.raises(StoreError):
        store.acquire_overdue(NOW_MS + 1)
    monkeypatch.undo()
    found = []
    eventually(
        lambda: (
            found.extend(store.acquire_overdue(NOW_MS + 1))
            or sum(each.count for each in found) == 100
        )
    )


def test_tls_and_credentials_are_used_and_never_shown(tmp_path, certificate):
    key, chain = certificate
    port = free_port()
    properties = {
        "requirepass": "correct-horse",
        "tls-port": str(port),
        "tls-cert-file": str(chain),
        "tls-key-file": str(key),
        "tls-auth-clients": "no",
    }
    with local_redis(tmp_path, properties):
        url = f"rediss://default:correct-horse@{HOST}:{port}/3?ssl_ca_certs={chain}"
        settings = load_settings(store=url)
        assert f"{HOST}:{port}/3" in check_store(settings)
        TermShards(settings).save([row(NOW_MS)])
        store = open_store(settings)
        assert len(store.acquire_overdue(NOW_MS + 1)) == 1
        store.close()
        wrong = load_settings(store=url.replace("correct", "wrong"))
        with pytest.raises(StoreError) as refused:
            check_store(wrong)
    assert "horse" not in f"{settings!r} {settings.model_dump()} {refused.value}"


def test_an_unreachable_server_is_reported_in_one_sentence():
    with pytest.raises(StoreError, match=f"Redis at {HOST}:1/0 does not answer"):
        check_store(Settings(store=f"redis://:secret@{HOST}:1/0"))


@pytest.mark.parametrize("store", ["redis", "postgres://host", "redis//host", ""])
def test_an_unknown_store_is_rejected_without_quoting_it(store):
    with pytest.raises(ConfigError, match="setting store: must be kafka, redis://") as refused:
        load_settings(store=store)
    assert "postgres" not in str(refused.value)


def test_a_page_continues_after_claims_in_front_of_it(settings, shards, opened, monkeypatch):
    monkeypatch.setattr("duetime.stores.redis.PAGE_SIZE", 7)
    early = [row(NOW_MS - each, f"early{each}") for each in range(1, 50)]
    rows = [row(NOW_MS, f"m{each:03}") for each in range(200)]
    shards.save([*early, *rows])
    reader, store = RedisReader(settings), opened()
    behind = [str(each.id) for each in reader.messages(NOW_MS, after=SortKey(NOW_MS, "z"))]
    assert behind == []
    found = reader.messages(NOW_MS, after=SortKey.of(rows[100].id, NOW_MS))
    listed = [str(next(found).id)]
    assert sum(each.count for each in store.acquire_overdue(NOW_MS)) == len(early)
    listed += [str(each.id) for each in found]
    assert listed == [each.id for each in rows[101:]]


def test_a_listing_skips_nothing_during_claims(settings, shards, opened):
    rows = [row(NOW_MS + each // 3 * MINUTE, f"m{each}") for each in range(3_000)]
    shards.save(rows)
    reader, store = RedisReader(settings), opened()
    found = reader.messages(NOW_MS)
    first = [str(next(found).id) for _ in range(10)]
    # Claimed names leave the sets that are being read, before the current position.
    claims = store.acquire_overdue(rows[900].due_ms)
    assert sum(each.count for each in claims) == 900
    listed = first + [str(each.id) for each in found]
    assert len(listed) == len(set(listed))
    assert set(listed) >= {each.id for each in rows[900:]}
