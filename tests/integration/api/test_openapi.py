"""Every operation on a real broker is answered as the OpenAPI document says."""

from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from schemathesis.checks import not_a_server_error
from tests.support.api import RunningServer, alike
from tests.support.openapi import CONFORM, schema, tried
from tests.support.page import reject
from tests.support.topics import created_topics, dead_letters_of, small_settings
from tests.support.wheel import WheelWriter

from duetime.core.clock import SystemClock
from duetime.core.schedules import Schedule, ScheduleEntry
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties

MINUTE_MS = 60_000

#: Events have no end, which schemathesis would wait for: test_events.py reads them.
ending = schema.exclude(path="/v1/events")


def define(of, name):
    """Write a schedule as the pipeline does."""
    schedule = Schedule(name=name, since="1-first", topic="orders", cron="@weekly")
    producer = Producer(librdkafka_properties(of))
    producer.produce(TopicNames(of).schedules, ScheduleEntry(schedule).encoded(), name)
    assert producer.flush(30) == 0


@pytest.fixture(scope="module")
def full(broker, tmp_path_factory):
    """An API on a real broker where there is one of everything."""
    own = small_settings(broker.bootstrap)
    with created_topics(own), pytest.MonkeyPatch.context() as patched:
        # What is unknown is not waited for.
        patched.setattr("duetime.client.cancellation.ARRIVAL_MS", 100)
        now_ms = SystemClock().now_ms()
        WheelWriter(own, now_ms).message("orders", now_ms + 30 * MINUTE_MS, key=b"\xff", value="v")
        dead_letters_of(own)()
        reject(own)
        define(own, "weekly")
        running = RunningServer(alike(own, tmp_path_factory.mktemp("api")))
        yield SimpleNamespace(url=running.settings.api_url)
        running.stop()


@pytest.mark.slow
@ending.parametrize()
@tried(5)
def test_whatever_is_asked_is_answered_as_documented(case, full):
    case.call_and_validate(base_url=full.url, checks=(not_a_server_error, *CONFORM))
