"""What is open in a partition of a queue, and what comes out."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.errors import DuetimeError
from duetime.pipeline.unacknowledged import (
    ENDED,
    GRACE_MS,
    INT64,
    TIMED_OUT,
    VERSION,
    Due,
    Marker,
    Unacknowledged,
)

INT64_BYTES = 8

NUMBERS = st.integers(min_value=0, max_value=2**61)


def follow(*markers):
    """Each is (appended_ms, offset, timeout_ms, given_back); returns what is open, and came out."""
    unacknowledged, came = Unacknowledged(), []
    for at, (appended_ms, offset, timeout_ms, *given_back) in enumerate(markers):
        came.append(unacknowledged.follow(Marker(at, appended_ms, offset, timeout_ms, *given_back)))
    return unacknowledged, [each for each in came if each]


def out(unacknowledged, now_ms):
    return list(unacknowledged.overdue(now_ms + GRACE_MS))


def test_what_is_not_acknowledged_by_its_deadline_comes_out_once():
    unacknowledged, _ = follow((100, 7, 50))
    assert out(unacknowledged, 149) == []
    assert out(unacknowledged, 150) == [Due(7, 150, 150, TIMED_OUT)]
    assert out(unacknowledged, 1_000) == []


def test_what_is_acknowledged_does_not_come_out_however_late_that_was():
    unacknowledged, _ = follow((100, 7, 50), (900, 7, ENDED))
    assert out(unacknowledged, 1_000) == []


@pytest.mark.parametrize("timeout_ms", [10, 90])
def test_a_later_start_marker_replaces_the_timeout(timeout_ms):
    unacknowledged, _ = follow((100, 7, 50), (120, 7, timeout_ms))
    assert out(unacknowledged, 119 + timeout_ms) == []
    until_ms = 120 + timeout_ms
    assert out(unacknowledged, until_ms) == [Due(7, until_ms, until_ms, TIMED_OUT)]


def test_what_is_given_back_comes_out_at_once_with_its_time():
    unacknowledged, came = follow((100, 7, 50), (120, 7, 600_000, "retry"))
    assert came == [Due(7, 120, 600_120, "retry")]
    assert len(unacknowledged) == 0


def test_what_is_given_back_after_it_was_delivered_again_comes_out_no_second_time():
    _, came = follow((100, 7, 50), (160, 7, ENDED), (170, 7, 0, "failed"))
    assert came == []


def test_the_first_marker_that_counts_is_where_to_begin_to_read():
    unacknowledged, _ = follow((100, 7, 50), (101, 8, 50), (102, 7, ENDED), (103, 9, 5))
    assert (unacknowledged.first_marker(), unacknowledged.oldest_ms()) == (1, 101)
    assert unacknowledged.wait_ms(100) == 8 + GRACE_MS


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=20))
def test_it_is_remembered_as_it_was(starts):
    unacknowledged, _ = follow(*starts)
    again = Unacknowledged.decoded(unacknowledged.encoded())
    latest_ms = 2**63
    assert out(again, latest_ms) == out(unacknowledged, latest_ms)


def test_what_was_remembered_before_there_were_versions_is_read():
    unacknowledged, _ = follow((100, 7, 50), (101, 8, 50))
    without_version = unacknowledged.encoded()[INT64_BYTES:]
    assert out(Unacknowledged.decoded(without_version), 2**62) == out(unacknowledged, 2**62)
    assert len(Unacknowledged.decoded(b"")) == 0


def test_what_another_release_remembered_is_refused_and_not_misread():
    later = array(INT64, [-(VERSION + 1), 7, 0, 100, 150, 1]).tobytes()
    with pytest.raises(DuetimeError, match="saved by another release"):
        Unacknowledged.decoded(later)
