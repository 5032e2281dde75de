"""`duetime run` with messages that wait in Redis: killed, and without Redis for a while."""

import time
from functools import partial
from pathlib import Path

import pytest
from redis import Redis
from tests.conftest import eventually
from tests.system.conftest import PATIENCE_S, await_first_messages
from tests.system.test_redis import environment, live, server  # noqa: F401 (fixtures, here too)
from tests.system.test_restart import complete, kill, running, schedule

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.hostile,
    pytest.mark.timeout(600),
]


def test_a_kill_and_an_outage_of_redis_lose_nothing_and_send_nothing_twice(
    live,  # noqa: F811 (the fixture)
    server,  # noqa: F811 (the same)
    tmp_path,
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
        server.kill()
        # What is due soon goes through the lanes, and taking it in may last seconds: one is saved.
        ids |= schedule(live, topic, 50, over_s=6, after_s=10)
        ids |= schedule(live, topic, 1, over_s=0, after_s=45)
        # Longer than its client tries: a batch is begun again, and windows are past by then.
        said = partial(said_in, tmp_path)
        eventually(lambda: "query failed query=saving" in said(), said, PATIENCE_S)
        eventually(lambda: time.time() * 1_000 > max(int(each[:12], 16) for each in ids))
        server.start()
        complete(live, topic, inbox, ids)
        inbox.until(lambda: not waiting(server), "everything to be settled")


def forget_last_commit(checkpoint):
    """As if it was killed when it had saved a batch and not committed it yet."""
    numbers = [int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdigit()]
    for each in (str(max(numbers)), f".{max(numbers)}.crc"):
        (checkpoint / "commits" / each).unlink(missing_ok=True)


def said_in(directory):
    return "".join(path.read_text() for path in directory.glob("log-*"))


def waiting(server):  # noqa: F811 (not the fixture)
    with Redis.from_url(server.url) as client:
        return [key for key in client.scan_iter() if b":m:" in key]
