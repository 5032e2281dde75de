"""The throughput benchmarks with few messages: all of them arrive, and the figures are there."""

import pytest
from tests.conftest import small_settings

from duetime.bench.bulk import bulk
from duetime.bench.catchup import catchup
from duetime.bench.intake import run_intake

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.usefixtures("topics", "_jvm_ends_well"),
]


@pytest.fixture
def settings(broker):
    """With a wheel that reaches the days for which the intake's messages wait."""
    return small_settings(broker.bootstrap, wheel_slots=64, wheel_levels=4)


# The first waits until all are overdue, over a minute.
@pytest.mark.parametrize("measured", [pytest.param(catchup, marks=pytest.mark.hostile), run_intake])
def test_all_messages_come_and_their_pace_is_told_beside_that_of_a_copy(settings, measured):
    # It raises where not all of them come.
    (pace,) = measured(settings, messages=2_000, value_bytes=200, runs=1)
    figures = pace.figures()
    assert figures.keys() == {"messages_per_s", "copy_messages_per_s", "ratio"}
    assert figures["ratio"] == round(figures["messages_per_s"] / figures["copy_messages_per_s"], 3)
    assert figures["ratio"] > 0


def test_all_rows_arrive_and_none_passes_through_this_process(settings):
    # It raises where not all of them arrive.
    rows, value_bytes = 100_000, 500
    figures = bulk(settings, rows, value_bytes).figures()
    assert figures["ratio"] > 0
    assert figures["seconds"] > 0
    rows_mb = rows * value_bytes // 1_000_000
    assert figures["python_mb_after"] - figures["python_mb_before"] < rows_mb
