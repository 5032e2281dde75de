"""Progress: what the real-time queries have handled is committed while their batch goes on."""

from datetime import timedelta

import pytest
from tests.support.clocks import eventually
from tests.support.live import now_ms

from duetime.kafka.offsets import Offsets


@pytest.mark.slow
def test_all_that_was_taken_in_is_reached_while_the_batch_goes_on(live, sender):
    """Also the last record of each partition."""
    topic, since_ms = live.topic(), now_ms()
    for delay_ms in (0, 200, 700, 1_500):
        sender.produce(topic, "x", in_=timedelta(milliseconds=delay_ms))
    live.inbox(topic).take(4)

    offsets = Offsets(live.settings, live.names.progress_group)
    appended = [
        each
        for name in (live.names.native, live.names.lanes)
        for each in offsets.ranges_since(name, since_ms)
    ]
    assert {each.topic for each in appended} == {live.names.native, live.names.lanes}
    ends = {each.place: each.end for each in appended}
    reached = {}

    def are_reached():
        reached.update(offsets.committed(ends))
        return all(reached.get(place, 0) >= end for place, end in ends.items())

    eventually(are_reached, lambda: f"{reached} of {ends}")
    offsets.close()
