from contextlib import closing

import pytest
from confluent_kafka import Producer
from tests.conftest import eventually

from duetime.connection import librdkafka_properties
from duetime.message import WAITING_HEADERS, MessageId
from duetime.stores.kafka import KafkaStore
from duetime.stores.reader import WheelReader
from duetime.stores.records import RangeReader

pytestmark = pytest.mark.system

MINUTE = 60_000


@pytest.fixture
def reader(settings):
    with closing(WheelReader(settings)) as opened:
        yield opened


@pytest.fixture
def read(monkeypatch):
    """How many records each look read."""
    counts, records = [], RangeReader.records

    def counted(self, ranges):
        counts.append(sum(each.count for each in ranges))
        return records(self, ranges)

    monkeypatch.setattr(RangeReader, "records", counted)
    return counts


def test_a_search_reads_each_record_once_and_sees_what_comes_later(reader, wheel, now_ms, read):
    due_ms = now_ms + MINUTE
    with wheel.at_once():
        for _ in range(20):
            wheel.message("orders", due_ms)
    search = reader.search(MessageId(due_ms=due_ms, unique="wanted"))
    assert search.find(now_ms) is None
    assert search.find(now_ms) is None
    wanted = wheel.message("orders", due_ms, unique="wanted")
    assert search.find(now_ms).id == wanted
    # On another level than its message, too.
    wheel.cancel(wanted, level=2)
    assert search.find(now_ms).cancelled
    assert read == [20, 1, 1]


def test_a_search_forgets_what_is_settled(reader, wheel, settings, now_ms):
    due_ms = now_ms + MINUTE
    wanted = wheel.message("orders", due_ms)
    search = reader.search(wanted)
    assert search.find(now_ms).id == wanted
    with closing(KafkaStore(settings)) as store:
        store.settle(store.due(settings.wheel.place(due_ms, now_ms)))
    assert search.find(now_ms) is None


def test_a_search_reads_a_transaction_that_was_open_once_it_has_ended(
    reader, wheel, settings, now_ms
):
    wanted = MessageId(due_ms=now_ms + MINUTE, unique="wanted")
    place = wheel._slot(wanted.due_ms, None)
    producer = Producer(librdkafka_properties(settings) | {"transactional.id": settings.namespace})
    producer.init_transactions()
    producer.begin_transaction()
    values = ("orders", None, None, str(wanted.due_ms), str(wanted))
    headers = list(zip(WAITING_HEADERS, values, strict=True))
    producer.produce(place[0], b"v", partition=place[1], headers=headers)
    assert producer.flush(30) == 0
    # Behind the open transaction.
    wheel.message("orders", wanted.due_ms)
    search = reader.search(wanted)
    assert search.find(now_ms) is None
    producer.commit_transaction()
    # It is answered before the partition's leader has been told.
    assert eventually(lambda: search.find(now_ms)).id == wanted
