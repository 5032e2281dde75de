"""The Aerospike store and its expiry notifications, on a fake server."""

import base64
import json
from itertools import count

import aerospike
import pytest
from aerospike.exception import IndexFoundError
from tests.support.aerospike_in_memory import InMemory
from tests.support.clocks import SetClock
from tests.support.saved import NOW_MS, row

from duetime.core.clock import SystemClock
from duetime.core.errors import StoreError
from duetime.core.messages import MessageId
from duetime.core.metrics import UNREADABLE
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.pipeline.store_queries import expiration_handler
from duetime.stores.aerospike import AerospikeReader, AerospikeStore
from duetime.stores.aerospike.messages import MessageSet
from duetime.stores.row_store import LEASE_MS

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000

numbers = count()


def with_notices(test):
    """Mark a test that needs Spark: notifications come in its batches."""
    return pytest.mark.system(pytest.mark.parametrize("settings", [True], indirect=True)(test))


@pytest.fixture
def server(monkeypatch):
    """The fake server to which every client connects."""
    found = InMemory()
    monkeypatch.setattr(aerospike, "client", lambda _config: found)
    return found


@pytest.fixture(params=[True, False], ids=["notices", "windows"])
def settings(request, server):  # noqa: ARG001 (nobody connects before it is there)
    # Clients are cached by address for the life of the process.
    url = f"aerospike://in-memory-{next(numbers)}/test"
    return Settings(store=url, aerospike_expiry_notifications=request.param)


@pytest.fixture
def clock():
    return SetClock(NOW_MS)


@pytest.fixture
def opened(settings, clock):
    """Open stores, and close them after the test."""
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
def reader(settings):
    return AerospikeReader(settings)


@pytest.fixture
def cache(settings):
    found = MessageSet(settings)
    term = found.begin_term()
    found.keep = lambda *rows: found.save(rows, term)
    return found


@pytest.fixture
def told(spark, settings, store, clock):
    """Notify the store that the ids of rows have expired; return its claims."""

    def tell(*rows, msg="delete", by_digest=False):
        taken = []
        records = [
            (b"{}", notice(settings, each, msg=msg, by_digest=by_digest).encode()) for each in rows
        ]
        batch = spark.createDataFrame(records, "key binary, value binary")
        expiration_handler(settings, store, taken.extend, clock)(batch, 0)
        return taken

    return tell


def notice(settings, about, *, msg, by_digest):
    where = {"namespace": "test", "set": "kafka_message_id"}
    digest = bytes(aerospike.calc_digest("test", "kafka_message_id", about.name))
    named = {} if by_digest else {"userKey": about.name}
    assert settings.aerospike_expiry_notifications
    return json.dumps(
        {"metadata": {"msg": msg, "digest": base64.b64encode(digest).decode(), **where, **named}}
    )


def names_of(claims):
    return sorted(name for each in claims for name in each.names)


@with_notices
@pytest.mark.parametrize("by_digest", [False, True], ids=["by key", "by digest"])
def test_expired_messages_are_claimed_and_removed_when_settled(
    told, cache, store, server, by_digest
):
    rows = [row(NOW_MS - each, f"m{each}") for each in range(3)]
    cache.keep(*rows)
    claims = told(*rows[:2], by_digest=by_digest)
    assert names_of(claims) == sorted(each.name for each in rows[:2])
    store.mark_started(claims, NOW_MS)
    # Not before the send is acknowledged.
    assert len(cache.waiting([each.name for each in rows])) == 3
    store.settle(claims)
    assert cache.waiting([each.name for each in rows]) == cache.waiting([rows[2].name])
    assert {key[2] for key in server.records if "claim" not in key[1]} == {rows[2].name}


@with_notices
def test_a_write_notification_is_ignored(told, cache):
    cache.keep(row(NOW_MS))
    assert told(row(NOW_MS), msg="write") == []


@with_notices
def test_a_repeated_notification_claims_nothing(told, cache, store):
    cache.keep(row(NOW_MS))
    claims = told(row(NOW_MS), row(NOW_MS))
    assert names_of(claims) == [row(NOW_MS).name]
    # While it is claimed, and after it is settled.
    assert told(row(NOW_MS)) == []
    store.settle(claims)
    assert told(row(NOW_MS)) == []


@with_notices
def test_a_notification_of_a_missing_message_is_harmless(told, cache):
    cache.keep(row(NOW_MS, "there"))
    assert told(row(NOW_MS, "gone")) == []
    assert told(row(NOW_MS, "gone"), by_digest=True) == []


@with_notices
def test_an_early_notification_is_left_to_the_overdue_scan(told, cache, store, clock, settings):
    soon = row(NOW_MS + settings.short_delay_threshold_ms - 1, "soon")
    later = row(NOW_MS + settings.short_delay_threshold_ms, "later")
    cache.keep(soon, later)
    # A release job waits for what is due within the short-delay threshold.
    assert names_of(told(soon, later)) == [soon.name]
    clock.ms = later.due_ms + 1
    assert names_of(store.acquire_overdue(clock.ms)) == [later.name]


@with_notices
def test_a_message_is_claimed_with_its_cancel(told, cache, store):
    message, cancel = row(NOW_MS), row(NOW_MS, offset=1, is_cancel=True)
    for one in (message, cancel):
        cache.keep(message, cancel)
        claims = told(one)
        assert names_of(claims) == sorted([message.name, cancel.name])
        store.settle(claims)


def test_messages_never_expire_and_ids_expire_when_due(cache, server, settings):
    due_ms = SystemClock().now_ms() + HOUR
    cache.keep(row(due_ms))
    lives = {key[1]: ttl for key, ttl in server.ttl.items()}
    ids_s = lives.pop("kafka_message_id", None)
    assert lives == dict.fromkeys(
        ["kafka_message_cache", "kafka_message_claim"], aerospike.TTL_NEVER_EXPIRE
    )
    if settings.aerospike_expiry_notifications:
        assert HOUR / SECOND - 60 < ids_s <= HOUR / SECOND


@pytest.mark.parametrize("ago_ms", [5 * SECOND, MINUTE, 5 * MINUTE, HOUR, 48 * HOUR])
def test_the_overdue_scan_finds_messages_of_any_age(store, cache, ago_ms):
    # The published service's polls cover 10 s to 2 min, and 2 h or more: between them is a gap.
    cache.keep(row(NOW_MS - ago_ms), row(NOW_MS + MINUTE, "later"))
    (claim,) = store.acquire_overdue(NOW_MS)
    assert claim.names == (row(NOW_MS - ago_ms).name,)
    assert claim.due == (NOW_MS - ago_ms, NOW_MS - ago_ms + 1)
    assert store.acquire_overdue(NOW_MS) == []


def test_claims_of_a_dead_scheduler_are_taken_over_as_started(opened, cache, clock):
    cache.keep(row(NOW_MS, "begun"), row(NOW_MS + SECOND, "claimed"))
    dead, alive = opened(), opened()
    dead.mark_started(dead.acquire_overdue(NOW_MS + 1), 17)
    dead.acquire_overdue(NOW_MS + MINUTE)
    dead.close()
    assert alive.acquire_overdue(NOW_MS + MINUTE) == []
    clock.ms += LEASE_MS
    taken = alive.acquire_overdue(NOW_MS + MINUTE)
    assert sorted((each.count, each.started_ms or 0) for each in taken) == [(1, 0), (1, 17)]


def test_a_scheduler_without_its_lease_removes_nothing(opened, cache, clock):
    cache.keep(row(NOW_MS))
    slow, quick = opened(), opened()
    claims = slow.acquire_overdue(NOW_MS + 1)
    clock.ms += LEASE_MS
    assert names_of(quick.acquire_overdue(NOW_MS + 1)) == [row(NOW_MS).name]
    with pytest.raises(StoreError, match="another scheduler"):
        slow.mark_started(claims, NOW_MS)
    slow.release(claims)
    slow.settle(claims)
    assert cache.waiting([row(NOW_MS).name])


def test_a_writer_of_an_earlier_term_is_rejected(settings):
    paused, leader = MessageSet(settings), MessageSet(settings)
    before = paused.begin_term()
    leader.save([row(NOW_MS)], leader.begin_term())
    with pytest.raises(StoreError, match="another writer has begun"):
        paused.save([row(NOW_MS, "late")], before)


def test_a_save_repeated_after_an_outage_stores_each_row_once(cache, server, store, reader):
    rows = [row(NOW_MS - each, f"m{each}") for each in range(30)]
    server.left = 17
    with pytest.raises(StoreError, match="does not answer"):
        cache.keep(*rows)
    server.left = None
    cache.keep(*rows)
    assert sum(each.count for each in reader.pending(NOW_MS)) == 30
    assert names_of(store.acquire_overdue(NOW_MS + 1)) == sorted(each.name for each in rows)


def test_a_record_the_server_refuses_is_an_error(cache):
    with pytest.raises(StoreError, match="refused a record"):
        cache.keep(row(NOW_MS, value=bytes(1024 * 1024)))


def test_the_id_of_a_far_message_has_the_longest_ttl(cache, server, settings):
    cache.keep(row(NOW_MS + 20 * 365 * 24 * HOUR))
    assert (
        "kafka_message_id" in {key[1] for key in server.ttl}
    ) == settings.aerospike_expiry_notifications


def test_a_second_record_with_one_id_is_saved_under_another_name(cache, reader):
    cache.keep(row(NOW_MS))
    cache.keep(row(NOW_MS))
    assert sum(each.count for each in reader.pending(NOW_MS)) == 1
    cache.keep(row(NOW_MS, offset=1))
    assert sum(each.count for each in reader.pending(NOW_MS)) == 2


def test_messages_due_at_once_are_listed_by_name_and_paged(cache, settings):
    uniques = ["b", "a-b", "a", "B", "gone", "b~1"]
    cache.keep(*(row(NOW_MS, each) for each in uniques), row(NOW_MS, "gone", is_cancel=True))
    # A second record for each id.
    cache.keep(*(row(NOW_MS, each, offset=1) for each in uniques))
    reader = AerospikeReader(settings)
    listed = list(reader.messages(NOW_MS))
    assert [each.id.unique for each in listed] == ["B", "a", "a-b", "b", "b~1"]
    for number, each in enumerate(listed, 1):
        assert list(reader.messages(NOW_MS, after=each.sort_key)) == listed[number:]
    assert list(reader.messages(NOW_MS, allows=lambda topic: topic != "orders")) == []


def test_a_partial_claim_has_messages_with_their_cancels(cache, settings):
    few = AerospikeStore(settings.model_copy(update={"max_messages_per_job": 10}))
    messages = [row(NOW_MS, f"m{each}") for each in range(20)]
    cancels = [row(NOW_MS, f"m{each}", offset=1, is_cancel=True) for each in range(20)]
    cache.keep(*messages, *cancels)
    taken = names_of(few.acquire_overdue(NOW_MS + 1))
    few.close()
    assert 10 <= len(taken) <= 20
    assert {name.removeprefix("!") for name in taken} & set(taken) == {
        name for name in taken if f"!{name}" in taken
    }


@pytest.mark.parametrize("settings", [False], indirect=True)
def test_a_message_late_for_its_window_is_in_a_later_one(store, cache, settings):
    slot = settings.wheel.place(NOW_MS, NOW_MS)
    cache.keep(row(NOW_MS, "in time"))
    first = store.acquire(slot)
    cache.keep(row(NOW_MS, "late"), row(NOW_MS + SECOND, "next"))
    assert names_of(store.acquire(Slot(0, slot.number + 1))) == [row(NOW_MS + SECOND, "next").name]
    store.settle(first)
    assert names_of(store.acquire(Slot(0, slot.number + 2))) == [row(NOW_MS, "late").name]


def test_all_parts_together_have_each_record(cache):
    rows = [row(NOW_MS + each, f"m{each}", value=b"%d" % each) for each in range(200)]
    cache.keep(*rows)
    parts = [[one for some in cache.all_records(part, 7) for one in some] for part in range(7)]
    assert sorted(int(one.value) for part in parts for one in part) == list(range(200))
    assert all(parts)


#: A record of the published service: no name, no place, and a value that is an object.
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
    """Put records into the set as the published service does."""
    keys = count()

    def put(**bins):
        key = ("test", "kafka_message_cache", f"foreign-{next(keys)}")
        given = {name: value for name, value in (PUBLISHED | bins).items() if value is not None}
        server.put(key, given, {"ttl": aerospike.TTL_NEVER_EXPIRE}, {})
        return key

    return put


def records_of(cache, claims):
    return [record for each in claims for some in cache.records(each) for record in some]


def test_a_foreign_record_is_delivered_as_by_intake(store, cache, publish, server):
    publish()
    claims = store.acquire_overdue(NOW_MS + 1)
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
    store.mark_started(claims, NOW_MS)
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
def test_a_foreign_value_becomes_the_published_bytes(store, cache, publish, value, delivered):
    publish(value=value)
    (record,) = records_of(cache, store.acquire_overdue(NOW_MS + 1))
    assert record.value == delivered


def test_a_foreign_record_with_an_invalid_id_gets_its_digest(store, cache, publish):
    key = publish(id="two words")
    (record,) = records_of(cache, store.acquire_overdue(NOW_MS + 1))
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
def test_an_unreadable_record_is_skipped_and_logged_once(store, cache, publish, caplog, broken):
    kept = publish(id="broken", **broken)
    publish()
    cache.keep(row(NOW_MS))
    counted = UNREADABLE._value.get()
    claims = store.acquire_overdue(NOW_MS + 1)
    assert len(records_of(cache, claims)) == 2
    store.settle(claims)
    # The unreadable record is not claimed, logged or counted again.
    assert store.acquire_overdue(NOW_MS + 1) == []
    digest = bytes(aerospike.calc_digest(*kept)).hex()
    assert [each.name for each in cache.due(0, NOW_MS + 1)] == [f"#{digest}"]
    (said,) = [each.getMessage() for each in caplog.records if "malformed" in each.getMessage()]
    assert "id='broken'" in said
    assert digest in said
    assert "trace" not in said
    assert UNREADABLE._value.get() == counted + 1


def test_many_unreadable_records_hide_no_readable_one(publish, settings):
    few = AerospikeStore(settings.model_copy(update={"max_messages_per_job": 10}))
    for _ in range(300):
        publish(topic=None)
    few.acquire_overdue(NOW_MS + 1)
    publish()
    assert sum(each.count for _ in range(3) for each in few.acquire_overdue(NOW_MS + 1)) == 1
    few.close()


def test_foreign_records_are_found_listed_and_cancelled_by_id(store, cache, publish, settings):
    publish(id="one")
    publish(id="two")
    publish(id="none", topic=None)
    reader = AerospikeReader(settings)
    listed = list(reader.messages(NOW_MS))
    assert [each.id.unique for each in listed] == ["one", "two"]
    assert list(reader.messages(NOW_MS, after=listed[0].sort_key)) == listed[1:]
    assert reader.find(listed[0].id, NOW_MS) == listed[0]
    assert reader.find(MessageId(due_ms=NOW_MS, unique="none"), NOW_MS) is None
    cache.keep(row(NOW_MS, "one", is_cancel=True))
    assert reader.find(listed[0].id, NOW_MS).cancelled
    assert list(reader.messages(NOW_MS)) == listed[1:]
    parts = [one for part in range(3) for some in cache.all_records(part, 3) for one in some]
    assert len(parts) == 3
    assert sum(each.count for each in store.acquire_overdue(NOW_MS + 1)) == 3


def test_notification_and_overdue_scan_claim_a_record_once(store, publish, clock):
    key = publish()
    by_notice = store.acquire_expired([key[2]], [], NOW_MS + 1)
    assert sum(each.count for each in by_notice) == 1
    clock.ms = NOW_MS + 1
    assert store.acquire_overdue(NOW_MS + 1) == []


def test_an_existing_index_with_another_name_is_accepted(settings, server, monkeypatch):
    def found(*_index):
        raise IndexFoundError

    monkeypatch.setattr(server, "index_single_value_create", found)
    AerospikeStore(settings).close()
