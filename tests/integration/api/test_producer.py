"""A producer whose Kafka is down for a while, and one that has failed for good."""

from datetime import timedelta

import httpx
import pytest
from confluent_kafka.admin import AdminClient
from tests.support.api import NOWHERE, RunningServer, with_room
from tests.support.clocks import eventually
from tests.support.made_kafka import post
from tests.support.spooling import await_drained, everything_taken_in, own_broker
from tests.support.topics import configure

from duetime.client.producer import Producer
from duetime.core.errors import ClientFailed
from duetime.kafka.connection import librdkafka_properties


@pytest.mark.slow
def test_messages_of_a_small_client_come_in_order_when_the_broker_is_back(tmp_path):
    with own_broker(tmp_path, with_room(NOWHERE)) as (broker, settings):
        running = RunningServer(settings)
        with httpx.Client(base_url=settings.api_url, timeout=30) as client:
            broker.stop()
            # All of one key, and so of one partition.
            assert post(client, *[f"m{each}" for each in range(20)], key="k").status_code == 202
            assert post(client, "last", key="k").status_code == 202
            broker.start()
            await_drained(settings)
        running.stop()
        arrived = everything_taken_in(settings)
    assert arrived == [*(f"m{each}" for each in range(20)), "last"]


def test_a_real_client_says_that_it_has_failed_for_good(settings, topics):  # noqa: ARG001
    intake = f"{settings.namespace}.in"
    configure(AdminClient(librdkafka_properties(settings)), intake, "max.message.bytes", "2000")
    # It fails where a record is missing among others: the same error as that of a lost sequence.
    producer = Producer(settings, **{"enable.gapless.guarantee": True})
    producer.produce("t", "x" * 5_000, in_=timedelta(hours=1))
    eventually(lambda: has_failed(producer))
    with pytest.raises(ClientFailed):
        producer.produce("t", "x", in_=timedelta(hours=1))


def has_failed(producer):
    try:
        producer.poll(0.05)
    except ClientFailed:
        return True
    return False
