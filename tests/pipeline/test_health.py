"""What Prometheus is told of a wheel that is filled by hand."""

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY

from duetime.clock import SystemClock
from duetime.connection import librdkafka_properties
from duetime.pipeline.health import Health

pytestmark = pytest.mark.system

MINUTE_MS = 60_000


def told(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


@pytest.mark.usefixtures("topics")
def test_what_waits_is_told_by_level_and_what_came_is_counted(settings, wheel, now_ms):
    before = told("duetime_rejected_records_total")
    health = Health(settings, SystemClock(), None)
    for delay_ms in (10_000, 10_000, 3 * MINUTE_MS, -3_000):
        wheel.message("orders", now_ms + delay_ms)
    producer = Producer(librdkafka_properties(settings))
    for topic in (f"{settings.namespace}.rejected", f"{settings.namespace}.control"):
        producer.produce(topic, b"x")
    producer.flush()
    cancels = told("duetime_intake_records_total", contract="control")

    health.look()

    levels = [told("duetime_pending_records", level=str(each)) for each in range(3)]
    assert levels == [3, 1, 0]
    assert told("duetime_overdue_records") == 1
    assert 0 < told("duetime_oldest_overdue_seconds") < 60
    assert told("duetime_rejected_records_total") == before + 1
    assert told("duetime_intake_records_total", contract="control") == cancels + 1
    health.start()
    health.close()
    assert told("duetime_pending_records", level="0") is None
