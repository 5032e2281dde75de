"""The Aerospike store's and the post-processor's logic, on a server in memory."""

import base64
import json
from itertools import count

import aerospike
import pytest
from tests.conftest import SetClock
from tests.stores.aerospike_in_memory import InMemory
from tests.stores.saved import NOW_MS, row

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import StoreError
from duetime.pipeline.notices import notices
from duetime.stores.aerospike import AerospikeStore
from duetime.stores.aerospike.cache import MessageCache
from duetime.stores.aerospike.leases import LEASE_MS
from duetime.stores.aerospike.reader import AerospikeReader
from duetime.wheel import Slot

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000

numbers = count()


def with_notices(test):
    """They come as a batch of Spark's."""
    return pytest.mark.system(pytest.mark.parametrize("settings", [True], indirect=True)(test))


@pytest.fixture
def server(monkeypatch):
    """Whoever connects, connects to this."""
    found = InMemory()
    monkeypatch.setattr(aerospike, "client", lambda _config: found)
    return found


@pytest.fixture(params=[True, False], ids=["notices", "windows"])
def settings(request, server):  # noqa: ARG001 (nobody connects before it is there)
    # Clients are kept for as long as the process lives, by their address.
    url = f"aerospike://in-memory-{next(numbers)}/test"
    return Settings(store=url, aerospike_notices=request.param)


@pytest.fixture
def clock():
    return SetClock(NOW_MS)


@pytest.fixture
def opened(settings, clock):
    """Opens stores, and closes them."""
    stores = []

    def another():
        stores.append(AerospikeStore(settings, clock))
        return stores[-1]

    yield another
    for each in stores:
        each.close()


@pytest.fixture
def store(opened):
    return opened()


@pytest.fixture
def cache(settings):
    found = MessageCache(settings)
    term = found.begin_term()
    found.keep = lambda *rows: found.save(rows, term)
    return found


@pytest.fixture
def told(spark, settings, store, clock):
    """Tells the post-processor of rows whose ids were removed; gives what was taken up."""

    def tell(*rows, msg="delete", by_digest=False):
        taken = []
        records = [
            (b"{}", notice(settings, each, msg=msg, by_digest=by_digest).encode()) for each in rows
        ]
        batch = spark.createDataFrame(records, "key binary, value binary")
        notices(settings, store, taken.extend, clock)(batch, 0)
        return taken

    return tell


def notice(settings, about, *, msg, by_digest):
    where = {"namespace": "test", "set": "kafka_message_id"}
    digest = bytes(aerospike.calc_digest("test", "kafka_message_id", about.name))
    named = {} if by_digest else {"userKey": about.name}
    assert settings.aerospike_notices
    return json.dumps(
        {"metadata": {"msg": msg, "digest": base64.b64encode(digest).decode(), **where, **named}}
    )


def names_of(claims):
    return sorted(name for each in claims for name in each.names)


@with_notices
@pytest.mark.parametrize("by_digest", [False, True], ids=["by key", "by digest"])
def test_what_is_told_of_is_taken_up_and_removed_when_it_is_settled(
    told, cache, store, server, by_digest
):
    rows = [row(NOW_MS - each, f"m{each}") for each in range(3)]
    cache.keep(*rows)
    claims = told(*rows[:2], by_digest=by_digest)
    assert names_of(claims) == sorted(each.name for each in rows[:2])
    store.begin(claims, NOW_MS)
    # Not before the send is acknowledged.
    assert len(cache.waiting([each.name for each in rows])) == 3
    store.settle(claims)
    assert cache.waiting([each.name for each in rows]) == cache.waiting([rows[2].name])
    assert {key[2] for key in server.records if "claim" not in key[1]} == {rows[2].name}


@with_notices
def test_a_write_is_ignored(told, cache):
    cache.keep(row(NOW_MS))
    assert told(row(NOW_MS), msg="write") == []


@with_notices
def test_a_notice_that_comes_twice_takes_up_nothing_more(told, cache, store):
    cache.keep(row(NOW_MS))
    claims = told(row(NOW_MS), row(NOW_MS))
    assert names_of(claims) == [row(NOW_MS).name]
    # While it is worked on, and after that.
    assert told(row(NOW_MS)) == []
    store.settle(claims)
    assert told(row(NOW_MS)) == []


@with_notices
def test_a_notice_of_what_is_gone_is_harmless(told, cache):
    cache.keep(row(NOW_MS, "there"))
    assert told(row(NOW_MS, "gone")) == []
    assert told(row(NOW_MS, "gone"), by_digest=True) == []


@with_notices
def test_a_notice_that_comes_early_is_kept_until_the_message_is_due_or_left_to_rescue(
    told, cache, store, clock, settings
):
    soon = row(NOW_MS + settings.horizon_ms - 1, "soon")
    later = row(NOW_MS + settings.horizon_ms, "later")
    cache.keep(soon, later)
    # A turn waits for what is due within the horizon.
    assert names_of(told(soon, later)) == [soon.name]
    clock.ms = later.due_ms + 1
    assert names_of(store.overdue(clock.ms)) == [later.name]


@with_notices
def test_a_message_is_taken_up_with_its_cancel_whichever_was_told_of(told, cache, store):
    message, cancel = row(NOW_MS), row(NOW_MS, offset=1, is_cancel=True)
    for one in (message, cancel):
        cache.keep(message, cancel)
        claims = told(one)
        assert names_of(claims) == sorted([message.name, cancel.name])
        store.settle(claims)


def test_messages_live_for_ever_and_ids_until_they_are_due(cache, server, settings):
    due_ms = SystemClock().now_ms() + HOUR
    cache.keep(row(due_ms))
    lives = {key[1]: ttl for key, ttl in server.ttl.items()}
    ids_s = lives.pop("kafka_message_id", None)
    assert lives == dict.fromkeys(
        ["kafka_message_cache", "kafka_message_claim"], aerospike.TTL_NEVER_EXPIRE
    )
    if settings.aerospike_notices:
        assert HOUR / SECOND - 60 < ids_s <= HOUR / SECOND


@pytest.mark.parametrize("ago_ms", [5 * SECOND, MINUTE, 5 * MINUTE, HOUR, 48 * HOUR])
def test_what_nobody_was_told_of_is_rescued_however_long_it_is_overdue(store, cache, ago_ms):
    # The published polls look at 10 s to 2 min, and at 2 h and more; between them is a gap.
    cache.keep(row(NOW_MS - ago_ms), row(NOW_MS + MINUTE, "later"))
    (claim,) = store.overdue(NOW_MS)
    assert claim.names == (row(NOW_MS - ago_ms).name,)
    assert claim.due == (NOW_MS - ago_ms, NOW_MS - ago_ms + 1)
    assert store.overdue(NOW_MS) == []


def test_what_a_reader_left_when_it_died_is_taken_over_and_known_as_begun(opened, cache, clock):
    cache.keep(row(NOW_MS, "begun"), row(NOW_MS + SECOND, "claimed"))
    dead, alive = opened(), opened()
    dead.begin(dead.overdue(NOW_MS + 1), 17)
    dead.overdue(NOW_MS + MINUTE)
    dead.close()
    assert alive.overdue(NOW_MS + MINUTE) == []
    clock.ms += LEASE_MS
    taken = alive.overdue(NOW_MS + MINUTE)
    assert sorted((each.count, each.begun_ms or 0) for each in taken) == [(1, 0), (1, 17)]


def test_who_has_lost_its_lease_begins_nothing_and_removes_nothing(opened, cache, clock):
    cache.keep(row(NOW_MS))
    slow, quick = opened(), opened()
    claims = slow.overdue(NOW_MS + 1)
    clock.ms += LEASE_MS
    assert names_of(quick.overdue(NOW_MS + 1)) == [row(NOW_MS).name]
    with pytest.raises(StoreError, match="another reader"):
        slow.begin(claims, NOW_MS)
    slow.give_up(claims)
    slow.settle(claims)
    assert cache.waiting([row(NOW_MS).name])


def test_who_was_paused_while_another_began_to_save_saves_no_more(settings):
    paused, leader = MessageCache(settings), MessageCache(settings)
    before = paused.begin_term()
    leader.save([row(NOW_MS)], leader.begin_term())
    with pytest.raises(StoreError, match="another writer has begun"):
        paused.save([row(NOW_MS, "late")], before)


def test_a_server_that_goes_away_in_the_middle_of_saving_has_each_once_in_the_end(
    cache, server, store
):
    rows = [row(NOW_MS - each, f"m{each}") for each in range(30)]
    server.left = 17
    with pytest.raises(StoreError, match="does not answer"):
        cache.keep(*rows)
    server.left = None
    cache.keep(*rows)
    assert sum(each.count for each in store.pending(NOW_MS)) == 30
    assert names_of(store.overdue(NOW_MS + 1)) == sorted(each.name for each in rows)


def test_what_the_server_does_not_take_is_told(cache):
    with pytest.raises(StoreError, match="refused a record"):
        cache.keep(row(NOW_MS, value=bytes(1024 * 1024)))


def test_a_far_message_has_an_id_that_lives_as_long_as_any_may(cache, server, settings):
    cache.keep(row(NOW_MS + 20 * 365 * 24 * HOUR))
    assert ("kafka_message_id" in {key[1] for key in server.ttl}) == settings.aerospike_notices


def test_what_is_saved_again_stays_as_it_is_and_another_of_that_id_waits_beside_it(cache, store):
    cache.keep(row(NOW_MS))
    cache.keep(row(NOW_MS))
    assert sum(each.count for each in store.pending(NOW_MS)) == 1
    cache.keep(row(NOW_MS, offset=1))
    assert sum(each.count for each in store.pending(NOW_MS)) == 2


def test_what_waits_is_listed_by_name_each_once_without_the_cancelled_and_from_any_on(
    cache, settings
):
    uniques = ["b", "a-b", "a", "B", "gone", "b~1"]
    cache.keep(*(row(NOW_MS, each) for each in uniques), row(NOW_MS, "gone", is_cancel=True))
    # Another record with each id waits beside the first.
    cache.keep(*(row(NOW_MS, each, offset=1) for each in uniques))
    reader = AerospikeReader(settings)
    listed = list(reader.messages(NOW_MS))
    assert [each.id.unique for each in listed] == ["B", "a", "a-b", "b", "b~1"]
    for number, each in enumerate(listed, 1):
        assert list(reader.messages(NOW_MS, after=each.position)) == listed[number:]
    assert list(reader.messages(NOW_MS, allows=lambda topic: topic != "orders")) == []


def test_of_more_than_a_claim_takes_each_message_is_with_its_cancel(cache, settings):
    few = AerospikeStore(settings.model_copy(update={"job_messages": 10}))
    messages = [row(NOW_MS, f"m{each}") for each in range(20)]
    cancels = [row(NOW_MS, f"m{each}", offset=1, is_cancel=True) for each in range(20)]
    cache.keep(*messages, *cancels)
    taken = names_of(few.overdue(NOW_MS + 1))
    few.close()
    assert 10 <= len(taken) <= 20
    assert {name.removeprefix("!") for name in taken} & set(taken) == {
        name for name in taken if f"!{name}" in taken
    }


@pytest.mark.parametrize("settings", [False], indirect=True)
def test_what_was_saved_late_for_its_window_goes_with_a_later_one(store, cache, settings):
    slot = settings.wheel.place(NOW_MS, NOW_MS)
    cache.keep(row(NOW_MS, "in time"))
    first = store.due(slot)
    cache.keep(row(NOW_MS, "late"), row(NOW_MS + SECOND, "next"))
    assert names_of(store.due(Slot(0, slot.number + 1))) == [row(NOW_MS + SECOND, "next").name]
    store.settle(first)
    assert names_of(store.due(Slot(0, slot.number + 2))) == [row(NOW_MS, "late").name]


def test_its_parts_together_are_all_that_waits(cache):
    rows = [row(NOW_MS + each, f"m{each}", value=b"%d" % each) for each in range(200)]
    cache.keep(*rows)
    parts = [[one for some in cache.everything(part, 7) for one in some] for part in range(7)]
    assert sorted(int(one.value) for part in parts for one in part) == list(range(200))
    assert all(parts)
