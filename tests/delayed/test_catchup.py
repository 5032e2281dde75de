"""Reading what was written long ago: 2,000 records a second, each due within a minute."""

from itertools import pairwise

import pytest
from tests.delayed.conftest import PATIENCE_S

pytestmark = pytest.mark.system

#: A million takes a minute or two; fewer meet the same code.
MARKS = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(900)]
COUNTS = [20_000, pytest.param(1_000_000, marks=MARKS)]


def send_old(topic, now_ms, count):
    begun_ms = now_ms - 60_000 - count // 2
    for number in range(count):
        topic.send(begun_ms + number // 2 + number * 7919 % 60_000, b"v")
    topic.flush()


@pytest.mark.parametrize("count", COUNTS)
def test_old_records_are_caught_up_with_in_their_order(topic, now_ms, count):
    send_old(topic, now_ms, count)
    # Room for a tenth of them.
    with topic.reader(delayed_kept_bytes=count * 40, enable_auto_commit=False) as consumer:
        messages = (consumer.poll(PATIENCE_S) for _ in range(count))
        found = [(each.deliver_after_ms, each.offset()) for each in messages]
        consumer.commit(asynchronous=False)
        assert consumer.poll(0) is None
        assert consumer.metrics().read_again > count // 2
    assert all(one < next_ for one, next_ in pairwise(found))
    assert len(found) == count
