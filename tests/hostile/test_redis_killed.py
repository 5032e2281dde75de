"""`duetime run` with messages that wait in Redis: killed, and without Redis for a while."""

import time
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, await_first_messages
from tests.support.processes import complete, kill, logs, running, schedule

pytestmark = pytest.mark.timeout(1_200)


@pytest.fixture(scope="module")
def live(redis_live):
    return redis_live


@pytest.mark.usefixtures("redis_environment")
def test_a_kill_and_an_outage_of_redis_lose_nothing_and_send_nothing_twice(
    live, own_redis, tmp_path
):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path) as process:
        await_first_messages(live)
        ids = schedule(live, topic, 300, over_s=9)
        inbox.until(lambda: len(inbox.arrived) > 120, "those of the lanes, and the first windows")
        kill(process)
    forget_last_commit(Path(live.settings.checkpoint.removeprefix("file://")) / "saving")
    with running(live, tmp_path):
        # Where Redis does not answer at the start, it does not start.
        await_first_messages(live)
        inbox.until(lambda: len(inbox.arrived) > 290, "what was saved, and is overdue by now")
        ids |= schedule(live, topic, 100, over_s=8)
        own_redis.kill()
        # What is due soon goes through the lanes, and taking it in may last seconds: one is saved.
        ids |= schedule(live, topic, 50, over_s=6, after_s=10)
        ids |= schedule(live, topic, 1, over_s=0, after_s=45)
        # Longer than its client tries: a batch is begun again, and windows are past by then.
        said = partial(logs, tmp_path)
        eventually(lambda: "query failed query=saving" in said(), said, PATIENCE_S)
        eventually(lambda: time.time() * 1_000 > max(int(each[:12], 16) for each in ids))
        own_redis.start()
        complete(live, topic, inbox, ids)
        inbox.until(lambda: not waiting(own_redis), "everything to be settled")


def forget_last_commit(checkpoint):
    """As if it was killed when it had saved a batch and not committed it yet."""
    numbers = [int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdigit()]
    for each in (str(max(numbers)), f".{max(numbers)}.crc"):
        (checkpoint / "commits" / each).unlink(missing_ok=True)


def waiting(server):
    with Redis.from_url(server.url) as client:
        return [key for key in client.scan_iter() if b":m:" in key]
