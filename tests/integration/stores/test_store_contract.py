"""The contract of every store: the wheel in Kafka, Redis, and Aerospike."""

import os
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count

import pytest
from confluent_kafka import Producer
from redis import Redis
from tests.support.servers import aerospike_url, local_redis
from tests.support.topics import small_settings

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.errors import StoreError
from duetime.core.messages import MessageId, SortKey
from duetime.core.topics import TopicNames
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties
from duetime.local.broker import LocalBroker
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.job import ReleaseJob, read_claims
from duetime.stores.aerospike import schema
from duetime.stores.aerospike.messages import MessageSet
from duetime.stores.aerospike.schema import CACHE, LeaseTable
from duetime.stores.factory import open_reader, open_store
from duetime.stores.redis.scripts import Shards
from duetime.stores.row_store import Record, Row, pack, record_name
from duetime.stores.wheel_store import KafkaStore

SECOND, MINUTE, DAY = 1_000, 60_000, 86_400_000
YEAR = 366 * DAY

numbers = count()


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message, or the cancel of one, as intake routes it to the store."""

    due_ms: int
    unique: str = field(default_factory=lambda: f"m{next(numbers)}")
    key: bytes | None = b"k"
    value: bytes | None = b"v"
    headers: tuple = ()
    topic: str | None = "orders"
    #: The first due time of a message that failed three times.
    first_ms: int | None = None

    @property
    def id(self):
        return MessageId(due_ms=self.first_ms or self.due_ms, unique=self.unique)

    @property
    def all_headers(self):
        at_ms, state = self.due_ms, "1"
        if self.first_ms and self.topic:
            at_ms, state = self.first_ms, f"1::{self.due_ms}:3:{self.first_ms + 1}"
        values = (self.topic, None, state, str(at_ms), str(self.id))
        own = [
            (name, value and value.encode())
            for name, value in zip(H.SCHEDULED, values, strict=True)
        ]
        return [*own, *self.headers]


def cancel_of(message):
    return replace(message, topic=None, value=None, headers=())


class OnWheel:
    """Messages wait in Kafka."""

    def __init__(self, broker, **settings):
        self.settings = small_settings(broker.bootstrap, **settings)
        create_topics(self.settings)
        self._producer = Producer(librdkafka_properties(self.settings) | {"linger.ms": 5})

    def open(self):
        return KafkaStore(self.settings)

    def forget(self):
        """Remove what another test has left."""
        with closing(self.open()) as store:
            store.settle(store.acquire_overdue(SystemClock().now_ms() + 40 * DAY))

    def close(self):
        # Here and now: librdkafka aborts if the collector does it in one of its own threads.
        del self._producer

    def save(self, *messages):
        wheel, names = self.settings.wheel, TopicNames(self.settings)
        now_ms = SystemClock().now_ms()
        for each in messages:
            slot = wheel.place(each.due_ms, now_ms)
            place = names.wheel(slot.level), wheel.partitions_of(slot)[0]
            self._producer.produce(
                place[0], each.value, each.key, partition=place[1], headers=each.all_headers
            )
            self._producer.poll(0)
        self._producer.flush()


class OnRedis:
    """Messages wait in Redis."""

    def __init__(self, broker, server, **settings):
        self.settings = small_settings(broker.bootstrap, store=server.url, **settings)
        # Readers read the wheel as well.
        create_topics(self.settings)
        self._offsets = count()

    def open(self):
        return open_store(self.settings)

    def forget(self):
        """Remove what another test has left."""
        with Redis.from_url(self.settings.store.get_secret_value()) as client:
            client.flushdb()

    def save(self, *messages):
        shards = Shards(self.settings)
        shards.save(self.rows(messages), shards.begin_term())

    def rows(self, messages):
        for each in messages:
            place = (0, next(self._offsets), 1)
            record = Record(*place, each.key, each.value, each.all_headers)
            name = record_name(str(each.id), each.due_ms, is_cancel=each.topic is None)
            yield Row(name, str(each.id), each.due_ms, pack(record))


class OnAerospike(OnRedis):
    """Messages wait in Aerospike."""

    def __init__(self, broker, url, **settings):
        self.settings = small_settings(broker.bootstrap, store=url, **settings)
        create_topics(self.settings)
        self._offsets = count()

    def forget(self):
        with closing(self.open()) as store:
            cache = store._set
            with schema.aerospike_errors(cache._at):
                schema.client(cache._at).truncate(cache._at.namespace, cache._set(CACHE), 0)
            cache.leases.change(lambda _: (LeaseTable(), None))

    def save(self, *messages):
        cache = MessageSet(self.settings)
        cache.save(self.rows(messages), cache.begin_term())


STORES = ["kafka", "redis", "aerospike"]


@contextmanager
def place_for_messages(request, broker, **settings):
    """Open the store that the fixture's parameter names."""
    if request.param == "aerospike":
        yield OnAerospike(broker, aerospike_url(), **settings)
    elif request.param == "redis":
        yield OnRedis(broker, request.getfixturevalue("redis_server"), **settings)
    else:
        with closing(OnWheel(broker, **settings)) as found:
            yield found


@pytest.fixture(params=STORES, scope="module")
def kept(request, broker):
    """A store shared by all tests of the module."""
    with place_for_messages(request, broker) as found:
        yield found


@pytest.fixture(params=STORES)
def wide(request, broker):
    """A store with the default wheel."""
    with place_for_messages(request, broker, wheel_slots=64, wheel_levels=5) as found:
        found.forget()
        yield found


@pytest.fixture(params=STORES)
def mortal(request, broker, tmp_path):
    """A store on a server that the test may kill, and that server."""
    if request.param == "aerospike":
        pytest.skip("the server that DUETIME_AEROSPIKE names is not ours to kill")
    if request.param == "redis":
        # By default, it writes what it has acknowledged up to 2 s later, while the disk is slow.
        with local_redis(tmp_path, {"appendfsync": "always"}) as server:
            yield OnRedis(broker, server), server
    else:
        with LocalBroker(tmp_path) as server, closing(OnWheel(server)) as found:
            yield found, server


@pytest.fixture
def store(kept):
    kept.forget()
    opened = kept.open()
    yield opened
    opened.close()


@pytest.fixture
def reader(kept):
    opened = open_reader(kept.settings)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def read(spark, kept):
    """Read the records of claims, as a release job does."""
    return lambda claims: read_claims(spark, kept.settings, claims).collect() if claims else []


@pytest.fixture(scope="module")
def turned(spark, kept):
    """Return the rows that a release job makes of claims."""
    return turn_of(spark, kept.settings)


def turn_of(spark, settings):
    turn = ReleaseJob(spark, settings, DeliveryLog(spark, settings))
    return lambda claims: turn.rows(read_claims(spark, settings, claims)).collect()


def values_of(rows):
    return sorted(row.value for row in rows)


@pytest.fixture
def claim(kept, store):
    """Acquire the windows in which messages are due."""
    return lambda *messages: claims_of(store, kept.settings.wheel, messages)


def claims_of(store, wheel, messages):
    slots = sorted({wheel.place(each.due_ms, each.due_ms) for each in messages})
    return [*chain.from_iterable(store.acquire(slot) for slot in slots)]


@pytest.fixture
def soon_ms(now_ms):
    """The beginning of a window that is not planned yet."""
    return (now_ms // SECOND + 10) * SECOND


BINARY = [
    Sent(due_ms=0, key=None, value=None),
    Sent(due_ms=0, key=b"", value=b""),
    Sent(due_ms=0, key=b"\x00\xff", value=bytes(range(256)) * 40),
    Sent(due_ms=0, headers=(("a", None), ("a", b"\xff\x00"), ("", b""))),
    Sent(due_ms=0, topic="t" * 249, value="käse".encode()),
    Sent(due_ms=0, value=os.urandom(900_000)),
]


@pytest.mark.slow
def test_key_value_and_headers_round_trip(kept, claim, read, soon_ms):
    messages = [
        Sent(due_ms=soon_ms + at, key=one.key, value=one.value, headers=one.headers)
        for at, one in enumerate(BINARY)
    ]
    kept.save(*messages)
    rows = sorted(read(claim(*messages)), key=lambda row: row.headers[4].value)
    assert [(row.key, row.value) for row in rows] == [(one.key, one.value) for one in messages]
    assert [[tuple(pair) for pair in row.headers] for row in rows] == [
        one.all_headers for one in messages
    ]


def test_a_window_has_only_what_is_due_in_it(kept, claim, read, soon_ms):
    first, last, next_one = (
        Sent(due_ms=soon_ms + ms, value=b"%d" % ms) for ms in (0, SECOND - 1, SECOND)
    )
    kept.save(next_one, last, first)
    assert values_of(read(claim(first))) == [b"0", b"999"]
    assert values_of(read(claim(next_one))) == [b"1000"]


@pytest.mark.slow
def test_a_message_saved_twice_is_sent_once(kept, claim, turned, now_ms):
    messages = [Sent(due_ms=now_ms - SECOND, value=b"%d" % each) for each in range(5)]
    kept.save(*messages)
    kept.save(*messages)
    assert values_of(turned(claim(*messages))) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_cancel_works_before_or_after_its_message(kept, claim, turned, now_ms):
    before, after, other = (Sent(due_ms=now_ms - SECOND, value=b"%d" % each) for each in range(3))
    kept.save(cancel_of(before), before, after, cancel_of(after), other)
    assert values_of(turned(claim(before))) == [b"2"]


@pytest.mark.slow
def test_a_cancel_works_before_or_after_its_retry(kept, claim, turned, now_ms):
    before, after, other = (
        Sent(due_ms=now_ms - SECOND, first_ms=now_ms - MINUTE, value=b"%d" % each)
        for each in range(3)
    )
    kept.save(cancel_of(before), before, after, cancel_of(after), other)
    assert values_of(turned(claim(before))) == [b"2"]


def test_messages_due_in_one_ms_keep_their_order(kept, claim, turned, now_ms):
    messages = [Sent(due_ms=now_ms - SECOND, value=b"%d" % each) for each in (3, 1, 4, 1, 5, 9, 2)]
    kept.save(*messages)
    assert [row.value for row in turned(claim(*messages))] == [one.value for one in messages]


def test_settle_is_idempotent(kept, store, reader, claim, soon_ms):
    settled, waits = Sent(due_ms=soon_ms), Sent(due_ms=soon_ms + SECOND)
    kept.save(settled, waits)
    claims = claim(settled)
    store.mark_started(claims, soon_ms)
    store.settle(claims)
    store.settle(claims)
    assert reader.find(settled.id, soon_ms) is None
    assert reader.find(waits.id, soon_ms).id == waits.id
    assert list(store.acquire_overdue(soon_ms - SECOND)) == []


def test_a_released_claim_is_overdue_and_started(kept, store, claim, read, now_ms):
    message = Sent(due_ms=now_ms - 2 * SECOND, value=b"again")
    kept.save(message)
    claims = claim(message)
    store.mark_started(claims, now_ms)
    store.release(claims)
    again = store.acquire_overdue(now_ms + 5 * SECOND)
    assert [each.started_ms for each in again] == [now_ms]
    assert values_of(read(again)) == [b"again"]


def test_an_overdue_claim_has_due_times(kept, store, soon_ms):
    due = [soon_ms + each for each in (500, 999, 1_700)]
    kept.save(*(Sent(due_ms=each) for each in due))
    claims = store.acquire_overdue(soon_ms + 5 * SECOND)
    assert soon_ms <= min(each.due.from_ms for each in claims) <= due[0]
    assert due[-1] < max(each.due.to_ms for each in claims) <= soon_ms + 2 * SECOND


def test_a_claimed_message_is_not_claimed_again(kept, store, claim, soon_ms):
    message = Sent(due_ms=soon_ms)
    kept.save(message)
    assert sum(each.count for each in claim(message)) == 1
    assert claim(message) == []
    assert list(store.acquire_overdue(soon_ms + MINUTE)) == []


def test_a_message_is_found_and_a_cancel_is_shown(kept, reader, now_ms):
    near, far, cancelled = (
        Sent(due_ms=now_ms + ms, key=b"\xff", value=b"x", headers=(("a", b"1"),))
        for ms in (20 * SECOND, 50 * MINUTE, 30 * MINUTE)
    )
    kept.save(near, far, cancelled, cancel_of(cancelled))
    for one, is_cancelled in ((near, False), (far, False), (cancelled, True)):
        found = reader.find(one.id, now_ms)
        assert (found.id, found.topic, found.cancelled) == (one.id, "orders", is_cancelled)
        assert (found.key, found.value, list(found.headers)) == (b"\xff", b"x", [("a", b"1")])
    never = MessageId(due_ms=now_ms + MINUTE, unique="never")
    assert reader.find(never, now_ms) is None


def test_a_retry_is_found_by_its_instant_and_a_cancel_is_shown(kept, reader, now_ms):
    near, cancelled = (
        Sent(due_ms=now_ms + ms, first_ms=now_ms - MINUTE) for ms in (20 * SECOND, 30 * MINUTE)
    )
    kept.save(near, cancelled, cancel_of(cancelled))
    for one, is_cancelled in ((near, False), (cancelled, True)):
        found = reader.find(one.id, now_ms, retry_ms=one.due_ms)
        assert (found.id, found.cancelled) == (one.id, is_cancelled)
    assert reader.find(near.id, now_ms, retry_ms=near.due_ms + 1 + MINUTE) is None


def test_pending_messages_are_counted_by_slot_and_listed_in_order(kept, reader, now_ms):
    kept.forget()
    delays_ms = [50 * MINUTE, 15 * SECOND, 5 * MINUTE, 15 * SECOND + 1, 16 * SECOND]
    messages = [Sent(due_ms=now_ms + ms, topic=f"t{ms}") for ms in delays_ms]
    cancelled = Sent(due_ms=now_ms + 6 * MINUTE)
    kept.save(*messages, cancelled, cancel_of(cancelled))
    slots = reader.pending(now_ms)
    assert [(slot.start_ms, slot.end_ms) for slot in slots] == sorted(
        (slot.start_ms, slot.end_ms) for slot in slots
    )
    for one in messages:
        assert any(slot.start_ms <= one.due_ms < slot.end_ms for slot in slots)
    # The cancel and its message count until they are due.
    assert sum(slot.count for slot in slots) == len(messages) + 2
    listed = [found.id for found in reader.messages(now_ms)]
    assert listed == sorted((one.id for one in messages), key=lambda id_: id_.due_ms)
    (third,) = reader.messages(now_ms, topic=f"t{5 * MINUTE}")
    assert third.id == messages[2].id
    between = reader.messages(now_ms, from_ms=messages[4].due_ms, to_ms=messages[0].due_ms)
    assert [found.id for found in between] == [messages[4].id, messages[2].id]
    assert len(list(reader.messages(now_ms, limit=2))) == 2


def test_a_retry_is_listed_by_its_instant(kept, reader, now_ms):
    kept.forget()
    failed = Sent(due_ms=now_ms + 5 * MINUTE, first_ms=now_ms - MINUTE)
    sooner, later = (Sent(due_ms=now_ms + each * MINUTE) for each in (4, 6))
    kept.save(later, failed, sooner)
    listed = list(reader.messages(now_ms, from_ms=now_ms))
    assert [each.id for each in listed] == [sooner.id, failed.id, later.id]
    found = reader.find(failed.id, now_ms, retry_ms=failed.due_ms)
    assert found == listed[1]
    assert found.retry == (failed.due_ms, 3, now_ms - MINUTE + 1)
    assert reader.find(failed.id, now_ms) is None
    assert reader.find(later.id, now_ms, retry_ms=failed.due_ms) is None


def test_every_store_lists_and_pages_in_the_same_order(kept, reader, now_ms):
    kept.forget()
    due_ms = now_ms + 5 * MINUTE
    # Ordered by name, which is not the order of arrival.
    retried = [
        Sent(due_ms=due_ms, first_ms=now_ms - ms, unique=unique)
        for ms, unique in ((2, "z"), (1, "a-b"), (1, "a"), (1, "a~1"))
    ]
    first = [Sent(due_ms=due_ms, unique=unique) for unique in ("B", "a", "a-b", "a.b", "b", "b~1")]
    ordered = [*retried, *first]
    kept.save(*ordered[::2], *ordered[:4], *reversed(ordered))
    within = {"from_ms": due_ms, "to_ms": due_ms + 1}
    listed = list(reader.messages(now_ms, **within))
    assert [each.id for each in listed] == [each.id for each in ordered]
    for number, each in enumerate(listed, 1):
        behind = reader.messages(now_ms, after=each.sort_key, to_ms=due_ms + 1)
        assert list(behind) == listed[number:]
        assert SortKey.parse(each.sort_key.name) == each.sort_key


def test_only_messages_for_allowed_topics_are_listed(kept, reader, now_ms):
    kept.forget()
    mine, others = (Sent(due_ms=now_ms + 5 * MINUTE, topic=topic) for topic in ("mine", "others"))
    kept.save(mine, others)
    asked = []

    def allows(topic):
        asked.append(topic)
        return topic == "mine"

    assert [each.id for each in reader.messages(now_ms, allows=allows)] == [mine.id]
    assert sorted(asked) == ["mine", "others"]
    assert list(reader.messages(now_ms, allows=allows, topic="others")) == []


@pytest.mark.slow
def test_100_000_messages_are_claimed_once_each(kept, store, reader, claim, read, soon_ms):  # noqa: PLR0913, PLR0917 (fixtures)
    messages = [Sent(due_ms=soon_ms + each % 3_000, value=b"%d" % each) for each in range(100_000)]
    kept.save(*messages)
    assert sum(slot.count for slot in reader.pending(soon_ms - 5 * SECOND)) == 100_000
    claims = claim(*messages)
    assert sum(each.count for each in claims) == 100_000
    assert {row.value for row in read(claims)} == {one.value for one in messages}
    store.mark_started(claims, soon_ms)
    store.settle(claims)
    assert reader.pending(soon_ms) == []


@pytest.mark.slow
def test_a_message_due_in_30_years_is_found_and_counted(wide, now_ms):
    # One for each of the wheel's levels.
    far = [Sent(due_ms=now_ms + 30 * YEAR // 64**level) for level in range(5)]
    wide.save(*far)
    with closing(wide.open()) as store, closing(open_reader(wide.settings)) as reader:
        for one in far:
            assert reader.find(one.id, now_ms).id == one.id
        slots = reader.pending(now_ms)
        for one in far:
            assert sum(slot.start_ms <= one.due_ms < slot.end_ms for slot in slots) == 1
        assert sum(slot.count for slot in slots) == len(far)
        assert list(store.acquire_overdue(now_ms)) == []


@pytest.mark.slow
def test_a_server_killed_during_a_save_has_each_message_once(mortal, spark, soon_ms):
    place, server = mortal
    messages = [Sent(due_ms=soon_ms, value=b"%d" % each) for each in range(20_000)]
    some_are_there = threading.Event()

    def save():
        for at in range(0, len(messages), 1_000):
            while True:
                try:
                    place.save(*messages[at : at + 1_000])
                    break
                except StoreError:
                    # As the restarted query does.
                    continue
            some_are_there.set()

    saving = threading.Thread(target=save)
    saving.start()
    some_are_there.wait()
    server.kill()
    # The save is not complete.
    assert saving.is_alive()
    server.start()
    saving.join()
    with closing(place.open()) as store:
        claims = claims_of(store, place.settings.wheel, messages)
        rows = turn_of(spark, place.settings)(claims)
    assert values_of(rows) == sorted(one.value for one in messages)


# The wheel has one scheduler: the leader's.
@pytest.mark.slow
@pytest.mark.parametrize("kept", ["redis", "aerospike"], indirect=True)
def test_two_schedulers_never_claim_one_message(kept, store, read, now_ms):
    messages = [Sent(due_ms=now_ms - each, value=b"%d" % each) for each in range(20_000)]
    kept.save(*messages)
    stores = [store, kept.open()]
    claims = [[], []]

    def take(number):
        # Windows from the oldest on, as two pipelines that both believe they lead.
        for ms in range(20_000, -1, -250):
            claims[number] += stores[number].acquire_overdue(now_ms - ms + 1)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[1].close()
    assert all(claims)
    assert values_of(read([*claims[0], *claims[1]])) == sorted(one.value for one in messages)
