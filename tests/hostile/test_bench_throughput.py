"""The throughput benchmarks with few messages: all of them arrive, and all figures exist."""

import pytest
from tests.support.topics import created_topics, small_settings

from duetime.bench.throughput import bulk, catchup, intake

pytestmark = pytest.mark.usefixtures("_jvm_ends_well")


@pytest.fixture
def settings(broker):
    """Settings with a wheel that covers the delays of the intake benchmark."""
    found = small_settings(broker.bootstrap, wheel_slots=64, wheel_levels=4)
    with created_topics(found):
        yield found


# Catch-up waits until all are overdue, over a minute.
@pytest.mark.parametrize("measured", [catchup, intake])
def test_all_messages_arrive_and_the_pace_is_that_of_a_copy(settings, measured):
    # It raises unless all of them arrive.
    (figures,) = measured(settings, messages=2_000, value_bytes=200, runs=1)
    assert figures.keys() == {"messages_per_s", "copy_messages_per_s", "ratio"}
    assert figures["ratio"] == round(figures["messages_per_s"] / figures["copy_messages_per_s"], 3)
    assert figures["ratio"] > 0


def test_all_rows_arrive_without_passing_through_this_process(settings):
    # It raises unless all of them arrive.
    rows, value_bytes = 100_000, 500
    figures = bulk(settings, rows, value_bytes)
    assert figures["ratio"] > 0
    assert figures["seconds"] > 0
    rows_mb = rows * value_bytes // 1_000_000
    assert figures["python_mb_after"] - figures["python_mb_before"] < rows_mb
