"""Messages that became overdue while no pipeline ran, and those that are due soon."""

import pytest
from tests.support.live import with_topics
from tests.support.processes import complete, running, schedule

from duetime.bench.delivery import pending_load
from duetime.bench.loadgen import run_load

pytestmark = pytest.mark.timeout(1_200)

#: Messages that are due by the time the pipeline runs: their release takes some ten seconds.
OVERDUE, DUE_MS = 600_000, (1_000, 10_000)

#: How late others may be meanwhile, in ms: both cores are busy.
LATE_MS = 5_000


def test_overdue_messages_do_not_hold_up_a_cascade(down, tmp_path):
    """Others are due from a level above, whose slots are emptied while these are released."""
    live = down(tmp_path)
    with with_topics(live):
        topic = live.topic()
        inbox = live.inbox(topic)
        load = pending_load(live.settings, "overdue", OVERDUE, 100, delay_ms=DUE_MS)
        released = live.inbox(*load.destinations)
        run_load(live.settings, load)
        ids = schedule(live, topic, 600, over_s=30, after_s=35)
        with running(live, tmp_path):
            arrived = complete(live, topic, inbox, ids)
            released.until(lambda: len(released.arrived) >= OVERDUE, "the overdue")
        assert max(each.late_ms for each in arrived) < LATE_MS
        assert len(released.arrived) == OVERDUE
