"""The tracker's states of partitions."""

from duetime.queue.stats import TrackerState


def test_partition_states_add_up_to_a_queue():
    notes = [
        TrackerState(in_flight=1, oldest_ms=200, redelivered_total=3),
        TrackerState(redelivered_total=4),
        TrackerState(in_flight=2, oldest_ms=100),
    ]
    assert sum(notes, TrackerState()) == TrackerState(
        in_flight=3, oldest_ms=100, redelivered_total=7
    )


def test_a_tracker_state_round_trips():
    note = TrackerState(in_flight=1, oldest_ms=200, redelivered_total=3)
    assert TrackerState.of(note.text()) == note
    assert TrackerState.of(None) == TrackerState()
