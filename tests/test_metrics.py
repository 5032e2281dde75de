"""What Prometheus gets."""

import httpx
import pytest

from duetime import metrics
from duetime.config import Settings
from duetime.errors import SetupError
from duetime.local.ports import free_port


def test_prometheus_is_answered_where_the_settings_say():
    settings = Settings(metrics_port=free_port())

    metrics.RESCUED.inc(3)
    metrics.serve(settings)

    text = httpx.get(f"http://127.0.0.1:{settings.metrics_port}/metrics").text
    rescued = next(
        line for line in text.splitlines() if line.startswith("duetime_rescued_messages_total")
    )
    assert float(rescued.split()[1]) >= 3


def test_a_port_that_is_taken_is_told_in_a_sentence():
    settings = Settings(metrics_port=free_port())
    metrics.serve(settings)

    with pytest.raises(SetupError, match="choose another metrics_port"):
        metrics.serve(settings)


def test_without_a_port_nothing_is_served():
    metrics.serve(Settings())
