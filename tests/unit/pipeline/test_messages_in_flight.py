"""The messages in flight in a partition of a queue, and those that return."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core.errors import DuetimeError
from duetime.pipeline.tracker import (
    ENDED,
    GRACE_MS,
    INT64,
    TIMED_OUT,
    VERSION,
    InFlightMessages,
    Marker,
    Returned,
)

INT64_BYTES = 8

NUMBERS = st.integers(min_value=0, max_value=2**61)


def applied(*markers):
    """Apply markers of (appended_ms, offset, timeout_ms, given_back).

    Return the messages in flight, and those that returned.
    """
    in_flight, came = InFlightMessages(), []
    for at, (appended_ms, offset, timeout_ms, *given_back) in enumerate(markers):
        came.append(in_flight.apply(Marker(at, appended_ms, offset, timeout_ms, *given_back)))
    return in_flight, [each for each in came if each]


def overdue(in_flight, now_ms):
    return in_flight.take_overdue(now_ms + GRACE_MS)


def test_an_unacknowledged_message_returns_once():
    in_flight, _ = applied((100, 7, 50))
    assert overdue(in_flight, 149) == []
    assert overdue(in_flight, 150) == [Returned(7, 150, 150, TIMED_OUT)]
    assert overdue(in_flight, 1_000) == []


def test_an_acknowledged_message_does_not_return_however_late_that_was():
    in_flight, _ = applied((100, 7, 50), (900, 7, ENDED))
    assert overdue(in_flight, 1_000) == []


@pytest.mark.parametrize("timeout_ms", [10, 90])
def test_a_later_start_marker_replaces_the_timeout(timeout_ms):
    in_flight, _ = applied((100, 7, 50), (120, 7, timeout_ms))
    assert overdue(in_flight, 119 + timeout_ms) == []
    until_ms = 120 + timeout_ms
    assert overdue(in_flight, until_ms) == [Returned(7, until_ms, until_ms, TIMED_OUT)]


def test_a_message_given_back_returns_at_once_with_its_time():
    in_flight, came = applied((100, 7, 50), (120, 7, 600_000, "retry"))
    assert came == [Returned(7, 120, 600_120, "retry")]
    assert len(in_flight) == 0


def test_a_message_given_back_after_its_redelivery_does_not_return():
    _, came = applied((100, 7, 50), (160, 7, ENDED), (170, 7, 0, "failed"))
    assert came == []


def test_the_first_marker_is_that_of_a_message_in_flight():
    in_flight, _ = applied((100, 7, 50), (101, 8, 50), (102, 7, ENDED), (103, 9, 5))
    assert (in_flight.first_marker(), in_flight.oldest_ms()) == (1, 101)
    assert in_flight.wait_ms(100) == 8 + GRACE_MS


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=20))
def test_the_state_is_read_as_it_was_written(starts):
    in_flight, _ = applied(*starts)
    again = InFlightMessages.decoded(in_flight.encoded())
    latest_ms = 2**63
    assert overdue(again, latest_ms) == overdue(in_flight, latest_ms)


def test_a_state_without_a_version_is_read():
    in_flight, _ = applied((100, 7, 50), (101, 8, 50))
    without_version = in_flight.encoded()[INT64_BYTES:]
    assert overdue(InFlightMessages.decoded(without_version), 2**62) == overdue(in_flight, 2**62)
    assert len(InFlightMessages.decoded(b"")) == 0


def test_a_state_of_another_release_is_refused():
    later = array(INT64, [-(VERSION + 1), 7, 0, 100, 150, 1]).tobytes()
    with pytest.raises(DuetimeError, match="saved by another release"):
        InFlightMessages.decoded(later)
