"""A running pipeline's punctuality is measured, and its deliveries are counted."""

import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from prometheus_client import REGISTRY
from tests.support.clocks import eventually
from tests.support.schedules import every_minute

from duetime.core.clock import SystemClock
from duetime.pipeline.monitoring.exporter import MetricsExporter
from duetime.pipeline.monitoring.prober import Prober
from duetime.spark.task_jvms import DriverJvm

pytestmark = pytest.mark.slow

#: How long the probes may take on a busy machine, in seconds. They need some five.
PATIENCE_S = 120.0

HERE = {"cluster": ""}


def arrived(path):
    return REGISTRY.get_sample_value("duetime_lateness_seconds_count", HERE | {"path": path}) or 0


def test_probes_come_back_through_the_lanes_and_through_the_store(live):
    prober = Prober(live.settings, SystemClock())
    prober.start()
    both, patience = threading.Event(), PATIENCE_S
    while not (arrived("lanes") and arrived("store")):
        assert patience > 0
        both.wait(0.1)
        patience -= 0.1
    prober.close()

    assert REGISTRY.get_sample_value("duetime_probes_total", HERE | {"path": "store"}) >= 1
    # One machine has one clock.
    assert abs(REGISTRY.get_sample_value("duetime_clock_offset_seconds")) < 1
    early = HERE | {"path": "store", "le": "0.001"}
    assert REGISTRY.get_sample_value("duetime_lateness_seconds_bucket", early) <= arrived("store")


def test_what_is_delivered_is_counted_without_what_stays_within(live, sender):
    topic = live.topic()
    with counting(live) as counted:
        for _ in range(3):
            sender.produce(topic, "x", in_=timedelta(seconds=1))
        live.inbox(topic).take(3)
        # The last one may be read before its acknowledgement is counted.
        eventually(lambda: counted() >= 3)
        assert counted() == 3


def test_the_runs_of_a_schedule_are_counted_and_its_own_way_is_not(live):
    topic = live.topic()
    with counting(live) as counted:
        runs = every_minute(live, topic, topic, ago=5)
        live.inbox(topic).take(len(runs))
        eventually(lambda: counted() >= len(runs))
        assert counted() == len(runs)


@contextmanager
def counting(live):
    """Gives what says how many deliveries were counted since."""
    health = MetricsExporter(live.settings, SystemClock(), DriverJvm(live.pipeline.spark).producers)
    health.update()
    before = delivered()

    def counted():
        health.update()
        return delivered() - before

    yield counted
    health.start()
    health.close()


def delivered():
    return REGISTRY.get_sample_value("duetime_delivered_records_total", HERE)
