"""Probes to clusters that do not answer."""

import time

import pytest
from prometheus_client import REGISTRY
from tests.support.clocks import eventually

from duetime.core.clock import SystemClock
from duetime.core.setting_types import Cluster
from duetime.pipeline.monitoring.prober import CLOSE_TIMEOUT_S, PATHS, Prober, ProberSet

#: Other clusters that do not answer.
AWAY = {name: Cluster(bootstrap="127.0.0.1:1", probe_topic="probes") for name in ("a", "b", "c")}


def sent_to(cluster):
    """Return how many probes were sent to a cluster, by path."""
    labels = ({"cluster": cluster, "path": path} for path in PATHS)
    return [REGISTRY.get_sample_value("duetime_probes_total", each) or 0 for each in labels]


@pytest.mark.usefixtures("topics")
def test_probes_are_sent_to_a_cluster_that_does_not_answer(settings, monkeypatch):
    monkeypatch.setattr("duetime.pipeline.monitoring.synthetic_messages.END_TIMEOUT_S", 0.2)
    prober = Prober(settings.model_copy(update={"clusters": AWAY}), SystemClock(), "a")
    prober.start()
    eventually(lambda: min(sent_to("a")))
    prober.close()


@pytest.mark.usefixtures("topics")
def test_probers_of_clusters_that_do_not_answer_close_together(settings):
    probers = ProberSet(
        settings.model_copy(update={"clusters": AWAY}), SystemClock(), lambda: False
    )
    probers.start()
    started_s = time.monotonic()
    probers.close()
    # One after the other they would take three times as long.
    assert time.monotonic() - started_s < 2 * CLOSE_TIMEOUT_S
