"""Redis as a store: what only it has to promise."""

import pytest
from redis import Redis
from tests.conftest import eventually, local_redis
from tests.stores.saved import NOW_MS, row

from duetime.config import Settings, load_settings
from duetime.errors import ConfigError, StoreError
from duetime.local.ports import free_port
from duetime.local.properties import HOST
from duetime.message import MessageId
from duetime.stores import ANY_TIME
from duetime.stores.opening import check_store, open_store
from duetime.stores.redis.keys import shard_keys, shard_of
from duetime.stores.redis.reader import RedisReader
from duetime.stores.redis.shards import Shards
from duetime.stores.rows import name_of
from duetime.stores.selection import Position

pytestmark = pytest.mark.system

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


class Saver(Shards):
    """Shards with a term of their own."""

    def __init__(self, settings):
        super().__init__(settings)
        self._term = self.begin_term()

    def save(self, rows):
        super().save(rows, self._term)


@pytest.fixture
def shards(settings):
    return Saver(settings)


@pytest.fixture
def opened(settings):
    """Opens stores, and closes them."""
    stores = []

    def another():
        stores.append(open_store(settings))
        return stores[-1]

    yield another
    for each in stores:
        each.close()


@pytest.fixture
def end_leases(redis, settings):
    """Lets the leases of all claims end, as time would."""

    def end():
        for keys in shard_keys(settings.namespace, settings.store_shards):
            for name in redis.zrange(keys.leases, 0, -1):
                redis.zadd(keys.leases, {name: 1})

    return end


def values_in(shards, claims):
    return sorted(
        record.value for claim in claims for some in shards.records(claim) for record in some
    )


def test_what_a_reader_left_when_it_died_is_taken_over_and_known_as_begun(
    opened, shards, end_leases
):
    shards.save([row(NOW_MS, "begun"), row(NOW_MS + SECOND, "claimed")])
    dead, alive = opened(), opened()
    dead.begin(dead.overdue(NOW_MS + 1), 17)
    dead.overdue(NOW_MS + MINUTE)
    dead.close()
    assert alive.overdue(NOW_MS + MINUTE) == []
    end_leases()
    taken = alive.overdue(NOW_MS + MINUTE)
    assert sorted((each.count, each.begun_ms or 0) for each in taken) == [(1, 0), (1, 17)]
    # When it is due, is known of what is taken over, too.
    assert {each.due.from_ms for each in taken} == {NOW_MS, NOW_MS + SECOND}


def test_what_is_overdue_is_taken_up_though_nobody_can_say_when_it_was_due(
    opened, shards, monkeypatch, caplog
):
    shards.save([row(NOW_MS)])
    store = opened()

    def refuse(_claims):
        raise StoreError("does it answer?")

    monkeypatch.setattr(store._shards, "timed", refuse)
    (claim,) = store.overdue(NOW_MS + 1)
    assert (claim.count, claim.due) == (1, ANY_TIME)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    store.settle([claim])
    assert store.overdue(NOW_MS + 1) == []


def test_a_reader_that_lives_keeps_what_it_holds_though_it_stood_still(opened, shards, end_leases):
    shards.save([row(NOW_MS)])
    store = opened()
    claims = store.overdue(NOW_MS + 1)
    end_leases()
    assert store.overdue(NOW_MS + MINUTE) == []
    store.settle(claims)
    assert store.find(MessageId(due_ms=NOW_MS, unique="m"), NOW_MS) is None


def test_leases_are_extended_while_a_reader_works(opened, shards, redis, end_leases, settings):
    shards.save([row(NOW_MS)])
    (claim,) = opened().overdue(NOW_MS + 1)
    end_leases()
    leases = shard_keys(settings.namespace, settings.store_shards)[claim.shard].leases
    eventually(lambda: redis.zscore(leases, claim.name) >= NOW_MS / 2, within_s=30)


def test_who_has_lost_its_lease_begins_nothing_and_frees_nothing(opened, shards, end_leases):
    shards.save([row(NOW_MS, value=b"x")])
    slow, quick = opened(), opened()
    claims = slow.overdue(NOW_MS + 1)
    end_leases()
    taken = quick.overdue(NOW_MS + 1)
    with pytest.raises(StoreError, match="another reader"):
        slow.begin(claims, NOW_MS)
    slow.give_up(claims)
    slow.settle(claims)
    assert values_in(shards, taken) == [b"x"]


def test_who_was_paused_while_another_began_to_save_saves_no_more(opened, settings):
    paused, leader = Saver(settings), Saver(settings)
    leader.save([row(NOW_MS)])
    store = opened()
    store.settle(store.overdue(NOW_MS + 1))
    with pytest.raises(StoreError, match="another writer has begun"):
        paused.save([row(NOW_MS)])
    assert store.overdue(NOW_MS + 1) == []


def test_what_is_saved_again_after_its_cancel_was_heard_does_not_come(opened, shards):
    message, cancel = row(NOW_MS), row(NOW_MS, offset=1, is_cancel=True)
    store = opened()
    shards.save([message, cancel])
    store.settle(store.overdue(NOW_MS + 1))
    shards.save([message, cancel])
    assert store.overdue(NOW_MS + 1) == []


def test_a_repeated_save_of_what_is_claimed_changes_nothing(opened, shards):
    store = opened()
    shards.save([row(NOW_MS)])
    claims = store.overdue(NOW_MS + 1)
    shards.save([row(NOW_MS)])
    assert store.overdue(NOW_MS + 1) == []
    store.settle(claims)
    assert list(store.pending(NOW_MS)) == []


def test_what_is_routed_back_while_it_is_claimed_waits_anew(opened, shards):
    # A clock that is set back: the turn finds that it is not due yet.
    store = opened()
    shards.save([row(NOW_MS, offset=1, value=b"x")])
    claims = store.overdue(NOW_MS + 1)
    shards.save([row(NOW_MS, offset=2, value=b"x")])
    store.settle(claims)
    assert values_in(shards, store.overdue(NOW_MS + 1)) == [b"x"]


def test_a_retry_waits_beside_the_message_whose_turn_is_not_settled(opened, shards):
    store = opened()
    first = row(NOW_MS)
    shards.save([first])
    claims = store.overdue(NOW_MS + 1)
    retry_ms = NOW_MS + MINUTE
    name = name_of(first.id, retry_ms, is_cancel=False)
    shards.save([first._replace(name=name, due_ms=retry_ms)])
    store.settle(claims)
    assert store.overdue(NOW_MS + SECOND) == []
    assert len(values_in(shards, store.overdue(retry_ms + 1))) == 1


def test_a_cancel_is_in_the_claim_of_its_message_however_small_claims_are(settings, shards):
    messages = [row(NOW_MS, f"m{each}", offset=each) for each in range(50)]
    cancels = [row(NOW_MS, f"m{each}", offset=50 + each, is_cancel=True) for each in range(50)]
    shards.save([*messages, *cancels, row(NOW_MS - 1, "before"), row(NOW_MS + 1, "after")])
    small = open_store(settings.model_copy(update={"job_messages": 1_000}))
    claims = small.overdue(NOW_MS + 1)
    small.close()
    held = [
        [str(one.headers[4][1]) for some in shards.records(each) for one in some] for each in claims
    ]
    assert sum(len(ids) for ids in held) == 101
    for ids in held:
        assert all(ids.count(each) == 2 for each in ids if "before" not in each)


def test_a_payload_that_somebody_removed_is_no_silent_loss(opened, shards, redis, settings):
    shards.save([row(NOW_MS)])
    identity = row(NOW_MS).id
    keys = shard_keys(settings.namespace, settings.store_shards)
    redis.delete(keys[shard_of(identity, len(keys))].records + identity)
    (record,) = next(shards.records(opened().overdue(NOW_MS + 1)[0]))
    assert (record.key, record.headers) == (identity.encode(), [])


def test_no_key_expires_and_an_outage_of_a_day_loses_nothing(tmp_path):
    with local_redis(tmp_path) as server:
        settings = Settings(store=server.url)
        shards = Saver(settings)
        shards.save(row(NOW_MS + each, f"m{each}", value=b"%d" % each) for each in range(1_000))
        with Redis.from_url(server.url) as client:
            assert {client.ttl(key) for key in client.scan_iter()} == {-1}
        server.kill()
        server.start()
        store = open_store(settings)
        claims = store.overdue(NOW_MS + 24 * 60 * MINUTE)
        assert values_in(shards, claims) == sorted(b"%d" % each for each in range(1_000))
        store.close()


def test_what_was_saved_into_another_number_of_shards_is_not_passed_over(opened, settings):
    opened()
    with pytest.raises(ConfigError, match="it is 7, and what waits in the store was saved into 4"):
        open_store(settings.model_copy(update={"store_shards": 7}))


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"appendonly": "no"}, "append-only file"),
        ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru"),
        ({"cluster-enabled": "yes"}, "is a cluster"),
    ],
    ids=str,
)
def test_a_server_that_would_lose_messages_is_refused(tmp_path, properties, words):
    with (
        local_redis(tmp_path, properties) as server,
        pytest.raises(ConfigError, match=words) as refused,
    ):
        check_store(Settings(store=server.url))
    assert "set " in str(refused.value) or "use " in str(refused.value)


def test_a_server_without_room_saves_nothing_more_and_delivers_what_it_has(tmp_path):
    with local_redis(tmp_path, {"maxmemory": "4mb"}) as server:
        settings = Settings(store=server.url)
        saver, count = Saver(settings), 0

        def fill():
            nonlocal count
            while count < 1_000:
                saver.save([row(NOW_MS, str(count), value=bytes(50_000))])
                count += 1

        with pytest.raises(StoreError, match="maxmemory"):
            fill()
        # As after a crash: a new leader begins, too.
        store = open_store(settings)
        saver.begin_term()
        claims = store.overdue(NOW_MS + 1)
        store.begin(claims, NOW_MS)
        assert sum(each.count for each in claims) == count > 0
        store.settle(claims)
        store.close()
        Saver(settings).save([row(NOW_MS, "later")])


def test_what_was_claimed_before_redis_failed_is_found_again(opened, settings, monkeypatch):
    store = opened()
    Saver(settings).save([row(NOW_MS, str(number)) for number in range(100)])
    claim, calls = store._shards.claim, iter([True])

    def once(*asked):
        if next(calls, None):
            return claim(*asked)
        raise StoreError("away")

    monkeypatch.setattr(store._shards, "claim", once)
    with pytest.raises(StoreError):
        store.overdue(NOW_MS + 1)
    monkeypatch.undo()
    found = []
    eventually(
        lambda: found.extend(store.overdue(NOW_MS + 1)) or sum(each.count for each in found) == 100
    )


def test_tls_user_password_and_database_are_used_and_the_password_is_never_told(
    tmp_path, certificate
):
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
        Saver(settings).save([row(NOW_MS)])
        store = open_store(settings)
        assert len(store.overdue(NOW_MS + 1)) == 1
        store.close()
        wrong = load_settings(store=url.replace("correct", "wrong"))
        with pytest.raises(StoreError) as refused:
            check_store(wrong)
    assert "horse" not in f"{settings!r} {settings.model_dump()} {refused.value}"


def test_where_nobody_answers_one_sentence_says_so():
    with pytest.raises(StoreError, match=f"Redis at {HOST}:1/0 does not answer"):
        check_store(Settings(store=f"redis://:secret@{HOST}:1/0"))


@pytest.mark.parametrize("store", ["redis", "postgres://host", "redis//host", ""])
def test_a_store_that_does_not_exist_is_refused_without_repeating_it(store):
    with pytest.raises(ConfigError, match="setting store: must be kafka, redis://") as refused:
        load_settings(store=store)
    assert "postgres" not in str(refused.value)


def test_many_that_are_due_at_once_are_listed_from_any_on_while_others_are_claimed(
    settings, shards, opened, monkeypatch
):
    monkeypatch.setattr("duetime.stores.redis.reader.PAGE", 7)
    early = [row(NOW_MS - each, f"early{each}") for each in range(1, 50)]
    rows = [row(NOW_MS, f"m{each:03}") for each in range(200)]
    shards.save([*early, *rows])
    reader, store = RedisReader(settings), opened()
    behind = [str(each.id) for each in reader.messages(NOW_MS, after=Position(NOW_MS, "z"))]
    assert behind == []
    found = reader.messages(NOW_MS, after=Position.of(rows[100].id, NOW_MS))
    listed = [str(next(found).id)]
    assert sum(each.count for each in store.overdue(NOW_MS)) == len(early)
    listed += [str(each.id) for each in found]
    assert listed == [each.id for each in rows[101:]]


def test_a_listing_passes_over_nothing_when_others_claim_meanwhile(settings, shards, opened):
    rows = [row(NOW_MS + each // 3 * MINUTE, f"m{each}") for each in range(3_000)]
    shards.save(rows)
    reader, store = RedisReader(settings), opened()
    found = reader.messages(NOW_MS)
    first = [str(next(found).id) for _ in range(10)]
    # What is claimed leaves the sets that are being read, in front of where the reading is.
    claims = store.overdue(rows[900].due_ms)
    assert sum(each.count for each in claims) == 900
    listed = first + [str(each.id) for each in found]
    assert len(listed) == len(set(listed))
    assert set(listed) >= {each.id for each in rows[900:]}
