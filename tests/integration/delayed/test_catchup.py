"""Reading old records: 2,000 a second, each due within a minute."""

from itertools import pairwise

import pytest
from tests.support.delayed_topics import PATIENCE_S, send_shuffled

#: A million takes a minute or two; fewer meet the same code.
MARKS = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(900)]
COUNTS = [20_000, pytest.param(1_000_000, marks=MARKS)]


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_old_records_are_returned_in_order(topic, now_ms, count):
    send_shuffled(topic, now_ms, count)
    # Room for a tenth of them.
    with topic.reader(delayed_kept_bytes=count * 40, enable_auto_commit=False) as consumer:
        messages = (consumer.poll(PATIENCE_S) for _ in range(count))
        found = [(each.deliver_after_ms, each.offset()) for each in messages]
        consumer.commit(asynchronous=False)
        assert consumer.poll(0) is None
        assert consumer.metrics().read_again > count // 2
    assert all(one < next_ for one, next_ in pairwise(found))
    assert len(found) == count
