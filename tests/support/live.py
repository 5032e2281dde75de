"""A real broker, a real pipeline, and readers of what it delivers."""

import threading
import time
import uuid
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import httpx
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client.parser import text_string_to_metric_families
from tests.support.clocks import eventually
from tests.support.topics import small_settings

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.topics import TopicNames, required_topics
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties
from duetime.local.jars import pipeline_jars
from duetime.local.process import HOST
from duetime.pipeline.service import Pipeline
from duetime.spark.session import jvm

#: How long an event may take on a busy machine, in seconds. Nothing waits for it in vain.
PATIENCE_S = 400.0

#: How late a message may come on a machine that stands still now and then, in ms. The benchmarks
#: measure lateness; a test only tells a message that is held up from one that is not.
LATE_MS = 60_000


def now_ms():
    return SystemClock().now_ms()


class Arrived:
    """A delivered record: what a test asks about."""

    def __init__(self, record):
        self.key, self.value, self.headers = record.key(), record.value(), record.headers() or []
        self.topic, self.partition = record.topic(), record.partition()
        self.appended_ms = record.timestamp()[1]
        self.by_name = dict(self.headers)

    @property
    def id(self):
        return self.by_name[H.DUE_ID].decode()

    @property
    def due_ms(self):
        return int(self.by_name[H.DUE_AT_MS])

    @property
    def late_ms(self):
        return self.appended_ms - self.due_ms


class Inbox:
    """Reads topics from their beginning; `arrived` is everything read so far."""

    def __init__(self, settings, topics):
        self.arrived = []
        properties = {"group.id": f"inbox-{uuid.uuid4().hex}", "enable.auto.commit": False}
        self._consumer = Consumer(librdkafka_properties(settings) | properties)
        self._consumer.assign([place for name in topics for place in self._places(name)])

    def _places(self, topic):
        """From the beginning of each partition; a broker hears of a new topic a moment later."""

        def partitions():
            return self._consumer.list_topics(topic, PATIENCE_S).topics[topic].partitions

        found = eventually(partitions, topic, PATIENCE_S)
        return [TopicPartition(topic, each, 0) for each in found]

    def take(self, count):
        """Wait until `count` records are there in all; returns them."""
        self.until(lambda: len(self.arrived) >= count, f"{count} records")
        assert len(self.arrived) == count
        return self.arrived

    def until(self, enough, what):
        """Wait until what was read so far is enough."""
        until_s = time.monotonic() + PATIENCE_S
        while not enough():
            assert time.monotonic() < until_s, f"{what}: only {len(self.arrived)} came"
            records = self._consumer.consume(1_000, timeout=0.1)
            self.arrived += [Arrived(each) for each in records if not each.error()]

    def until_id(self, identity):
        """Wait until this message is there; returns everything read so far."""
        self.until(lambda: any(each.id == identity for each in self.arrived), identity)
        return self.arrived

    def close(self):
        self._consumer.close()


def sources(rejected):
    """Where the rejected records of an inbox were."""
    return {each.by_name["due-error-source"] for each in rejected.arrived}


class Live:
    """A pipeline that runs, or whose process does, and everything to try it with."""

    def __init__(self, settings):
        self.settings = settings
        #: The pipeline, where it runs in this process.
        self.pipeline = None
        self.names = TopicNames(settings)
        #: Where what was sent is, as a rejected record's `due-error-source` has it.
        self.sources = set()
        self._inboxes = []
        self.admin = AdminClient(librdkafka_properties(settings))
        larger = {"linger.ms": 5, "message.max.bytes": 2_000_000}
        self._producer = Producer(librdkafka_properties(settings) | larger)

    def topic(self, partitions=1, config=()):
        """A destination of its own for one test."""
        return self.topics(1, partitions, config)[0]

    def topics(self, count, partitions=1, config=()):
        return self.create([f"to_{uuid.uuid4().hex[:8]}" for _ in range(count)], partitions, config)

    def create(self, names, partitions=1, config=()):
        """Destinations of these names, which the pipeline knows when this returns."""
        stamped = {"message.timestamp.type": "LogAppendTime"} | dict(config)
        wanted = [NewTopic(name, num_partitions=partitions, config=stamped) for name in names]
        for created in self.admin.create_topics(wanted).values():
            created.result()
        if self.pipeline:
            self._await_known(names)
        return names

    def _await_known(self, topics):
        """A message for a topic that has just been created goes the way of failures, and waits."""
        properties = jvm(self.pipeline.spark).java.lang.System
        for topic in topics:
            name = f"{self.settings.namespace}.to.{topic}"
            eventually(partial(properties.getProperty, name), topic, PATIENCE_S)

    def inbox(self, *topics):
        self._inboxes.append(Inbox(self.settings, topics))
        return self._inboxes[-1]

    def inbox_when_there(self, topic, partitions=1):
        """Open an inbox once the topic has this number of partitions: others create it."""
        eventually(partial(self._is_there, topic, partitions), topic, PATIENCE_S)
        return self.inbox(topic)

    def _is_there(self, topic, partitions):
        found = self.admin.list_topics(timeout=PATIENCE_S).topics.get(topic)
        return found and len(found.partitions) >= partitions

    def rejected(self):
        return self.inbox(self.names.rejected)

    def send(self, topic, value=None, key=None, headers=(), partition=-1):
        """A record as any sender may write it; where it is, is in `sources` after `flush`."""
        self._producer.produce(
            topic, value, key, headers=list(headers), partition=partition, on_delivery=self._sent
        )
        self._producer.poll(0)

    def _sent(self, error, record):
        assert error is None
        self.sources.add(f"{record.topic()}/{record.partition()}/{record.offset()}".encode())

    def flush(self):
        assert self._producer.flush(PATIENCE_S) == 0

    def close(self):
        for each in self._inboxes:
            each.close()
        self.flush()
        # A broker for a whole session's partitions would run out of files.
        names = [topic.name for topic in required_topics(self.settings)]
        for deleted in self.admin.delete_topics(names).values():
            deleted.result()


def fresh_settings(bootstrap, directory, **others):
    """Settings with a namespace of its own, a small wheel, and frequent scans for overdue ones."""
    return small_settings(
        bootstrap,
        overdue_scan_interval_ms=2_000,
        max_delivery_attempts=2,
        retry_backoff_ms=200,
        checkpoint=directory.as_uri(),
        delayed_topics={f"shown_{uuid.uuid4().hex[:8]}.delayed": {}},
        **others,
    )


#: A queue's topics have the same names in all namespaces.
JOBS, PATIENT, KMQ, EXAMPLE = (f"queue_{uuid.uuid4().hex[:8]}" for _ in range(4))

#: Queues that deliver again at once, after a while in the wheel, to kmq's own, to the example's.
QUEUES = {
    JOBS: {"partitions": 32, "redeliveries": 2},
    PATIENT: {"partitions": 1, "backoff_ms": 6_000},
    KMQ: {"partitions": 2},
    EXAMPLE: {"partitions": 2, "redeliveries": 100},
}

#: A destination whose messages are tried once more than others.
STUBBORN = f"to_{uuid.uuid4().hex[:8]}"
#: One whose messages are tried until what they wait for is there, on a busy machine too.
GROWING = f"to_{uuid.uuid4().hex[:8]}"
#: And one whose messages wait for it in the wheel.
LONG_WAITED = f"to_{uuid.uuid4().hex[:8]}"
RETRY_TOPICS = {
    STUBBORN: {"attempts": 3, "backoff_ms": 1_000},
    GROWING: {"attempts": 10, "backoff_ms": 500},
    LONG_WAITED: {"attempts": 2, "backoff_ms": 60_000},
}


@pytest.fixture(scope="session")
def down(broker):
    """Makes everything but the pipeline, whose checkpoint is the directory given."""
    return lambda directory, **others: Live(fresh_settings(broker.bootstrap, directory, **others))


@contextmanager
def with_topics(live):
    """Create duetime's topics while the block runs; yield `live`."""
    create_topics(live.settings)
    try:
        yield live
    finally:
        live.close()


@contextmanager
def led(live):
    """Run a pipeline in this process, as `duetime run` does, while the block runs; yield `live`."""
    pipeline = Pipeline(live.settings, jars=pipeline_jars())
    pipeline.start()
    watch = threading.Thread(target=pipeline.watch)
    watch.start()
    live.pipeline = pipeline
    try:
        yield live
    finally:
        # Also where nothing came: a thread that goes on would keep the tests from ending.
        pipeline.ask_to_stop()
        watch.join()
        pipeline.stop()


def await_first_messages(live, delays_s=(0,)):
    """Wait until the pipeline that was started delivers."""
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    topic = live.topic()
    with Client(live.settings) as client:
        for delay_s in delays_s:
            client.produce(topic, "first", in_=timedelta(seconds=delay_s))
    live.inbox(topic).take(len(delays_s))


def scraped(port):
    """What a process on this machine tells Prometheus, by name, or by name and labels."""
    text = httpx.get(f"http://{HOST}:{port}/metrics").text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {
        (each.name, *each.labels.values()) if each.labels else each.name: each.value
        for each in samples
    }
