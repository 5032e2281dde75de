"""The worker of the queue benchmark on a real broker."""

import pytest
from confluent_kafka import Producer
from tests.support.topics import created_topics, small_settings

from duetime.bench import clients
from duetime.bench.clients import Task, work
from duetime.bench.loadgen import LoadPlan
from duetime.core.setting_types import QueueSettings
from duetime.kafka.connection import librdkafka_properties


@pytest.mark.slow
def test_a_message_never_redelivered_is_not_counted(broker, monkeypatch):
    settings = small_settings(broker.bootstrap, queues={"jobs": QueueSettings(partitions=1)})
    with created_topics(settings):
        producer = Producer(librdkafka_properties(settings))
        for number in range(3):
            producer.produce("jobs", str(number))
        assert producer.flush(30) == 0
        task = Task(LoadPlan(messages=3, destinations=("jobs",)), drop_every=3, timeout_ms=1_000)
        # There is no tracker: dropped messages are lost.
        monkeypatch.setattr(clients, "LOST_S", 14)
        _, acknowledged = work(settings, task)
        assert acknowledged == 2
