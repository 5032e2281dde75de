"""The Aerospike store's and the post-processor's logic, on a server in memory."""

import base64
import json
from itertools import count

import aerospike
import pytest
from aerospike.exception import IndexFoundError
from tests.conftest import SetClock
from tests.stores.aerospike_in_memory import InMemory
from tests.stores.saved import NOW_MS, row

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import StoreError
from duetime.message import MessageId
from duetime.metrics import UNREADABLE
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


#: What the published service keeps of a message: no name, no place, a value that is an object.
PUBLISHED = {
    "id": "3f0e-order-17",
    "topic": "orders",
    "key": "k1",
    "value": {"a": 1.5, "b": [1, "é", None], "c": {"d": True}},
    "headers": {"trace": "abc", "tries": 3, "none": None, "due-at-ms": "1"},
    "postTime": NOW_MS,
    "failureUrl": "https://example.com/failed",
    "tries": 1,
}


@pytest.fixture
def publish(server):
    """Puts records into the set as the published service does."""
    keys = count()

    def put(**bins):
        key = ("test", "kafka_message_cache", f"foreign-{next(keys)}")
        given = {name: value for name, value in (PUBLISHED | bins).items() if value is not None}
        server.put(key, given, {"ttl": aerospike.TTL_NEVER_EXPIRE}, {})
        return key

    return put


def records_of(cache, claims):
    return [record for each in claims for some in cache.records(each) for record in some]


def test_a_record_of_the_published_service_is_delivered_as_intake_would_and_removed(
    store, cache, publish, server
):
    publish()
    claims = store.overdue(NOW_MS + 1)
    (record,) = records_of(cache, claims)
    # Compact JSON in UTF-8, as the published service writes an object to Kafka.
    assert record.value == '{"a":1.5,"b":[1,"é",null],"c":{"d":true}}'.encode()
    assert record.key == b"k1"
    due = f"{NOW_MS:012x}"
    assert record.headers == [
        ("due-topic", b"orders"),
        ("due-partition", None),
        ("due-state", b"0"),
        ("due-at-ms", str(NOW_MS).encode()),
        ("due-id", f"{due}-3f0e-order-17".encode()),
        ("trace", b"abc"),
        ("tries", b"3"),
        ("none", None),
        ("due-callback", b"https://example.com/failed"),
    ]
    store.begin(claims, NOW_MS)
    store.settle(claims)
    assert not [key for key in server.records if key[1] == "kafka_message_cache"]


@pytest.mark.parametrize(
    ("value", "delivered"),
    [
        ("hello", b"hello"),
        ('{"a": 1.10}', b'{"a": 1.10}'),
        ("", b""),
        (None, None),
        (17, b"17"),
        ([], b"[]"),
        (b"\xff", b"\xff"),
        ({"big": 2**62, "text": '"\\'}, rb'{"big":4611686018427387904,"text":"\"\\"}'),
    ],
)
def test_a_published_value_is_the_bytes_that_the_service_writes_to_kafka(
    store, cache, publish, value, delivered
):
    publish(value=value)
    (record,) = records_of(cache, store.overdue(NOW_MS + 1))
    assert record.value == delivered


def test_a_published_record_without_an_id_that_may_be_one_has_its_digest_for_it(
    store, cache, publish
):
    key = publish(id="two words")
    (record,) = records_of(cache, store.overdue(NOW_MS + 1))
    digest = bytes(aerospike.calc_digest(*key)).hex()
    assert dict(record.headers)["due-id"] == f"{NOW_MS:012x}-{digest}".encode()


@pytest.mark.parametrize(
    "broken",
    [
        {"topic": None},
        {"topic": 7},
        {"topic": "no topic"},
        {"topic": "duetime.wheel.0"},
        {"value": {"a": b"\xff"}},
        {"value": float("nan")},
        {"headers": ["trace"]},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_understood_is_passed_over_and_stops_no_other(
    store, cache, publish, caplog, broken
):
    kept = publish(id="broken", **broken)
    publish()
    cache.keep(row(NOW_MS))
    counted = UNREADABLE._value.get()
    claims = store.overdue(NOW_MS + 1)
    assert len(records_of(cache, claims)) == 2
    store.settle(claims)
    # What stays is not claimed, logged or counted again.
    assert store.overdue(NOW_MS + 1) == []
    digest = bytes(aerospike.calc_digest(*kept)).hex()
    assert [each.name for each in cache.due(0, NOW_MS + 1)] == [f"#{digest}"]
    (said,) = [each.getMessage() for each in caplog.records if "unreadable" in each.getMessage()]
    assert "id='broken'" in said
    assert digest in said
    assert "trace" not in said
    assert UNREADABLE._value.get() == counted + 1


def test_however_many_cannot_be_understood_the_others_are_found(publish, settings):
    few = AerospikeStore(settings.model_copy(update={"job_messages": 10}))
    for _ in range(300):
        publish(topic=None)
    few.overdue(NOW_MS + 1)
    publish()
    assert sum(each.count for _ in range(3) for each in few.overdue(NOW_MS + 1)) == 1
    few.close()


def test_published_records_are_found_listed_and_cancelled_by_their_ids(
    store, cache, publish, settings
):
    publish(id="one")
    publish(id="two")
    publish(id="none", topic=None)
    reader = AerospikeReader(settings)
    listed = list(reader.messages(NOW_MS))
    assert [each.id.unique for each in listed] == ["one", "two"]
    assert list(reader.messages(NOW_MS, after=listed[0].position)) == listed[1:]
    assert reader.find(listed[0].id, NOW_MS) == listed[0]
    assert reader.find(MessageId(due_ms=NOW_MS, unique="none"), NOW_MS) is None
    cache.keep(row(NOW_MS, "one", is_cancel=True))
    assert reader.find(listed[0].id, NOW_MS).cancelled
    assert list(reader.messages(NOW_MS)) == listed[1:]
    parts = [one for part in range(3) for some in cache.everything(part, 3) for one in some]
    assert len(parts) == 3
    assert sum(each.count for each in store.overdue(NOW_MS + 1)) == 3


def test_a_notice_of_the_published_service_and_rescue_take_a_record_up_once(store, publish, clock):
    key = publish()
    by_notice = store.noticed([key[2]], [], NOW_MS + 1)
    assert sum(each.count for each in by_notice) == 1
    clock.ms = NOW_MS + 1
    assert store.overdue(NOW_MS + 1) == []


def test_an_index_that_is_there_by_another_name_is_taken(settings, server, monkeypatch):
    def found(*_index):
        raise IndexFoundError

    monkeypatch.setattr(server, "index_single_value_create", found)
    AerospikeStore(settings).close()
