"""The dashboard beside a pipeline that delivers: its tiles show what happens."""

import os
import re
import socket
from datetime import timedelta

import pytest
from playwright.sync_api import expect
from tests.support.api import RunningServer, alike
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S
from tests.support.page import live as opened
from tests.support.page import tile, whole

from duetime.client.status import status
from duetime.core.clock import SystemClock
from duetime.pipeline.faults import Point, armed

#: Many more than the other messages meanwhile: synthetic ones, and a retry.
MESSAGES = 300
FEW = 5


@pytest.fixture
def page(live, look, tmp_path):
    running = RunningServer(alike(live.settings, tmp_path))
    yield opened(look(running.settings))
    running.stop()


def numbers(page, name):
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", whole(page, name).inner_text())
    return [float(each.replace(",", "")) for each in found]


def so_far(page, name):
    """The sum in a tile; none of a look that could not count, as on a busy machine."""
    return next(iter(numbers(page, name)[1:]), 0.0)


@pytest.mark.slow
def test_the_tiles_show_a_pipeline_that_delivers(live, sender, page):
    topic = live.topic()
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
    eventually(lambda: numbers(page, "Pending")[0] >= MESSAGES)
    live.inbox(topic).take(MESSAGES)
    eventually(lambda: abs(so_far(page, "Left the wheel") - released - MESSAGES) <= FEW)
    assert MESSAGES / 13 < numbers(page, "Left the wheel")[0] <= MESSAGES
    eventually(lambda: numbers(page, "Pending")[0] <= FEW)

    with armed(Point.RETRIES_SENT):
        sender.produce(topic, "x", partition=99, in_=timedelta(0))
        sender.flush()
        expect(tile(page, "Queries")).to_have_text(f"1 of {len(names)} fail")
        expect(whole(page, "Queries")).to_contain_text("retries failed")
    expect(tile(page, "Queries")).to_have_text(f"all {len(names)} run", timeout=PATIENCE_S * 1_000)
