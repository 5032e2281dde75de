"""What Prometheus gets."""

import httpx
import pytest

from duetime.core import metrics
from duetime.core.errors import SetupError
from duetime.core.settings import Settings
from duetime.local.process import free_port


def test_prometheus_is_answered_where_the_settings_say():
    settings = Settings(metrics_port=free_port())

    metrics.OVERDUE_RELEASED.inc(3)
    metrics.serve(settings)

    text = httpx.get(f"http://127.0.0.1:{settings.metrics_port}/metrics").text
    released = next(
        line
        for line in text.splitlines()
        if line.startswith("duetime_overdue_released_messages_total")
    )
    assert float(released.split()[1]) >= 3


def test_a_port_that_is_taken_is_told_in_a_sentence():
    settings = Settings(metrics_port=free_port())
    metrics.serve(settings)

    with pytest.raises(SetupError, match="choose another metrics_port"):
        metrics.serve(settings)


def test_without_a_port_nothing_is_served():
    metrics.serve(Settings())
