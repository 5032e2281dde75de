from contextlib import closing

from confluent_kafka import Producer
from tests.support.clocks import eventually

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.kafka.connection import librdkafka_properties
from duetime.stores.wheel_store import KafkaStore

MINUTE = 60_000


def test_a_search_reads_each_record_once(wheel_reader, wheel, now_ms, reads):
    due_ms = now_ms + MINUTE
    with wheel.at_once():
        for _ in range(20):
            wheel.message("orders", due_ms)
    search = wheel_reader.search(MessageId(due_ms=due_ms, unique="wanted"))
    assert search(now_ms) is None
    assert search(now_ms) is None
    wanted = wheel.message("orders", due_ms, unique="wanted")
    assert search(now_ms).id == wanted
    # Also on another level than its message.
    wheel.cancel(wanted, level=2)
    assert search(now_ms).cancelled
    assert reads == [20, 1, 1]


def test_a_search_forgets_settled_records(wheel_reader, wheel, settings, now_ms):
    due_ms = now_ms + MINUTE
    wanted = wheel.message("orders", due_ms)
    search = wheel_reader.search(wanted)
    assert search(now_ms).id == wanted
    with closing(KafkaStore(settings)) as store:
        store.settle(store.acquire(settings.wheel.place(due_ms, now_ms)))
    assert search(now_ms) is None


def test_a_search_reads_a_transaction_after_its_commit(wheel_reader, wheel, settings, now_ms):
    wanted = MessageId(due_ms=now_ms + MINUTE, unique="wanted")
    place = wheel.partition(wanted.due_ms)
    producer = Producer(librdkafka_properties(settings) | {"transactional.id": settings.namespace})
    producer.init_transactions()
    producer.begin_transaction()
    values = ("orders", None, None, str(wanted.due_ms), str(wanted))
    headers = list(zip(H.SCHEDULED, values, strict=True))
    producer.produce(place[0], b"v", partition=place[1], headers=headers)
    assert producer.flush(30) == 0
    # Behind the open transaction.
    wheel.message("orders", wanted.due_ms)
    search = wheel_reader.search(wanted)
    assert search(now_ms) is None
    producer.commit_transaction()
    # The commit is acknowledged before the partition's leader has it.
    assert eventually(lambda: search(now_ms)).id == wanted
