"""Messages that the store writer writes again where it reads its topic again."""

from contextlib import closing

import pytest
from confluent_kafka import Producer
from redis import Redis
from tests.support.topics import created_topics, small_settings

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.store_queries import store_handler
from duetime.spark.kafka_io import read_ranges
from duetime.stores.factory import open_reader

MINUTE_MS = 60_000


@pytest.fixture
def settings(broker, redis_server):
    with Redis.from_url(redis_server.url) as client:
        client.flushdb()
    found = small_settings(broker.bootstrap, store=redis_server.url)
    with created_topics(found):
        yield found


@pytest.fixture
def on_its_way(settings):
    """Writes a message, or a cancel, as intake routes it; returns where it is."""
    producer, topic = Producer(librdkafka_properties(settings)), TopicNames(settings).store_inbox
    places = []

    def write(due_ms, unique, *, is_cancel=False, retry_ms=None):
        identity = str(MessageId(due_ms=due_ms, unique=unique))
        to, state = ("orders", "1") if not is_cancel else (None, None)
        values = to, None, state, str(retry_ms or due_ms), identity
        headers = list(zip(H.SCHEDULED, values, strict=True))
        producer.produce(topic, b"v", partition=0, headers=headers)
        assert producer.flush(30) == 0
        places.append(OffsetRange(topic, 0, len(places), len(places) + 1))
        return places[-1]

    return write


def test_a_cancelled_message_is_not_written_again_before_its_cancel(
    spark, settings, on_its_way, now_ms
):
    """As without a checkpoint: both are read again, in different batches."""
    was_ms = now_ms - MINUTE_MS
    first, *_ = [
        on_its_way(was_ms, "cancelled"),
        on_its_way(was_ms, "late"),
        on_its_way(was_ms, "tried"),
    ]
    cancel = on_its_way(was_ms, "cancelled", is_cancel=True)
    on_its_way(was_ms, "tried", is_cancel=True, retry_ms=was_ms + 1_000)
    batch = OffsetRange(first.topic, 0, first.start, cancel.start)

    with closing(DeliveryLog(spark, settings)) as written, closing(open_reader(settings)) as reader:
        handle = store_handler(spark, settings, written, started_ms=now_ms + MINUTE_MS)
        handle(read_ranges(spark, settings, [batch]), 0)

        def is_saved(unique):
            return reader.find(MessageId(due_ms=was_ms, unique=unique), now_ms) is not None

        assert [is_saved(each) for each in ("cancelled", "late", "tried")] == [False, True, True]
        # A message that is cancelled while the rest is read is left out, too.
        late = on_its_way(was_ms, "later")
        on_its_way(was_ms, "later", is_cancel=True)
        handle(read_ranges(spark, settings, [late]), 1)
        assert not is_saved("later")
