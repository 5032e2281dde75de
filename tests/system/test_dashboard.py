"""The dashboard beside a pipeline that delivers: what its tiles say is so."""

import os
import re
import socket
from datetime import timedelta
from statistics import median

import pytest
from playwright.sync_api import expect
from tests.api.conftest import Running, alike
from tests.api.page import live as opened
from tests.api.page import tile
from tests.conftest import eventually
from tests.system.conftest import PATIENCE_S

from duetime.api.punctuality import KEPT_MS
from duetime.clock import SystemClock
from duetime.pipeline.faults import Point, armed
from duetime.status import status

pytestmark = pytest.mark.system

#: So many that what else goes on meanwhile is little beside them: own messages, a retry.
MESSAGES = 300
FEW = 5


@pytest.fixture
def page(live, look, tmp_path):
    running = Running(alike(live.settings, tmp_path))
    yield opened(look(running.settings))
    running.stop()


def whole(page, name):
    """All that a tile says."""
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator("dd")


def numbers(page, name):
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", whole(page, name).inner_text())
    return [float(each.replace(",", "")) for each in found]


def so_far(page, name):
    """The sum in a tile; none of a look that could not count, as on a busy machine."""
    return next(iter(numbers(page, name)[1:]), 0.0)


def test_the_tiles_tell_of_a_pipeline_that_delivers(live, sender, now_ms, page):
    # `now_ms` is before the page was opened.
    topic = live.topic()
    own = live.inbox(live.names.warmup)
    expect(tile(page, "Leader")).to_have_text(f"{socket.gethostname()}:{os.getpid()}")
    names = status(live.settings, SystemClock()).queries
    expect(whole(page, "Queries")).to_contain_text(", ".join(names))
    expect(tile(page, "Taken in")).to_have_text("0/s")
    (_, taken_in), (_, released) = numbers(page, "Taken in"), numbers(page, "Left the wheel")

    for _ in range(MESSAGES):
        sender.produce(topic, "x", in_=timedelta(seconds=7))
    sender.flush()

    expect(whole(page, "Taken in")).to_contain_text(f"{taken_in + MESSAGES:,.0f} so far")
    # On the average of 10 seconds at most, of which some have passed.
    assert MESSAGES / 13 < numbers(page, "Taken in")[0] <= MESSAGES
    eventually(lambda: numbers(page, "Waiting")[0] >= MESSAGES)
    live.inbox(topic).take(MESSAGES)
    eventually(lambda: abs(so_far(page, "Left the wheel") - released - MESSAGES) <= FEW)
    assert MESSAGES / 13 < numbers(page, "Left the wheel")[0] <= MESSAGES
    eventually(lambda: numbers(page, "Waiting")[0] <= FEW)

    def is_told_truly():
        """What the tile says of the page's own messages, against the broker's stamps."""
        since_ms = max(now_ms, SystemClock().now_ms() - KEPT_MS)
        looks = [each for each in own.arrived if "-look-" in each.id]
        late_ms = [each.late_ms for each in looks if each.due_ms > since_ms]
        found = numbers(page, "Lateness")
        if len(late_ms) < FEW or len(found) < 4:
            return False
        # The second is that of "p99".
        p99_ms, _, p50_ms, most_ms = found
        assert p50_ms <= p99_ms <= most_ms
        return (p50_ms, most_ms) == (round(median(late_ms)), max(late_ms))

    own.until(is_told_truly, "its own messages")
    with armed(Point.FAILURES_SENT):
        sender.produce(topic, "x", partition=99, in_=timedelta(0))
        sender.flush()
        expect(tile(page, "Queries")).to_have_text(f"1 of {len(names)} in trouble")
        expect(whole(page, "Queries")).to_contain_text("failures failed")
    expect(tile(page, "Queries")).to_have_text(f"all {len(names)} run", timeout=PATIENCE_S * 1_000)
