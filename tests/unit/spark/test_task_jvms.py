"""Metrics of producers: when one holds no record."""

import pytest

from duetime.spark.task_jvms import AVAILABLE, BUFFER, ProducerMetrics


class Held(ProducerMetrics):
    """A producer whose buffer has `held` bytes, one number a check; the last one is repeated."""

    def __init__(self, *held):
        self._held = list(held)

    def _read(self, _pattern):
        held = self._held.pop(0) if len(self._held) > 1 else self._held[0]
        return [({}, {BUFFER: 100, AVAILABLE: 100 - held})]


@pytest.mark.parametrize(
    ("held", "timeout_s", "is_quiet"),
    [
        ((0,), 30, True),
        # A task that is being stopped hands over one more record.
        ((7, 0, 0, 7, 0), 30, True),
        ((0, 0, 7), 0.3, False),
        ((0,), -1, False),
    ],
    ids=["empty", "filled once more", "never empty for long", "too late"],
)
def test_producer_is_quiet_after_several_checks_in_a_row(held, timeout_s, is_quiet):
    assert Held(*held).await_quiet("d.release-0", timeout_s) is is_quiet
