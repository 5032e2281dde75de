"""Messages that became overdue while no pipeline ran, and those that are due soon."""

import pytest
from tests.support.live import with_topics
from tests.support.processes import running

from duetime.bench.delivery import pending_load
from duetime.bench.loadgen import run_load

pytestmark = pytest.mark.timeout(1_200)

#: Messages that are due by the time the pipeline runs: their release takes some ten seconds.
OVERDUE, DUE_MS = 600_000, (1_000, 10_000)

#: How late others may be meanwhile, in ms: both cores are busy.
LATE_MS = 5_000

#: The others, due once the pipeline leads, from slots of the level above.
OTHERS, OTHERS_DUE_MS = 600, (35_000, 65_000)


def test_overdue_messages_do_not_hold_up_a_cascade(down, tmp_path):
    """Others are due from a level above, whose slots are emptied while these are released."""
    live = down(tmp_path)
    with with_topics(live):
        overdue = pending_load(live.settings, "overdue", OVERDUE, 100, delay_ms=DUE_MS)
        others = pending_load(live.settings, "others", OTHERS, 100, delay_ms=OTHERS_DUE_MS)
        released, inbox = (live.inbox(*each.destinations) for each in (overdue, others))
        run_load(live.settings, overdue)
        run_load(live.settings, others)
        with running(live, tmp_path):
            inbox.until(lambda: len(inbox.arrived) >= OTHERS, "the others")
            released.until(lambda: len(released.arrived) >= OVERDUE, "the overdue")
        assert len({each.id for each in inbox.arrived}) == len(inbox.arrived) == OTHERS
        assert max(each.late_ms for each in inbox.arrived) < LATE_MS
        assert len(released.arrived) == OVERDUE
