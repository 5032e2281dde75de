"""`duetime run` with messages that wait in Redis, and the commands and the example beside it."""

import json
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from pydantic import SecretStr
from tests.support import ROOT
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, await_first_messages
from tests.support.processes import running
from tests.support.schedules import MINUTE, every_minute
from tests.support.servers import local_redis

from duetime.cli import main
from duetime.client.producer import Producer
from duetime.core.errors import ConfigError
from duetime.pipeline.service import Pipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]

EXAMPLE = ROOT / "examples" / "blackbox" / "caller.py"


@pytest.fixture(scope="module")
def live(redis_live):
    return redis_live


@pytest.fixture(scope="module")
def pipeline(live, redis_environment, tmp_path_factory):  # noqa: ARG001 (what it sets)
    with running(live, tmp_path_factory.mktemp("run")) as process:
        # Where Redis does not answer at the start, it does not start.
        await_first_messages(live)
        yield process


@pytest.fixture(scope="module")
def example(live, pipeline):  # noqa: ARG001 (it must run)
    """The example as it runs, while others are tested."""
    arguments = live.settings.bootstrap, live.names.countdown, live.topic()
    command = [sys.executable, EXAMPLE, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        # Where nobody has waited for its end.
        process.kill()


@pytest.fixture(scope="module", autouse=True)
def schedule(live, pipeline):  # noqa: ARG001 (it must run)
    """Where a schedule comes, and the ids of its runs: the last is due when others were tested."""
    topic = live.topic()
    return topic, every_minute(live, topic, "saved", ago=3, for_ms=MINUTE)


@pytest.fixture
def duetime(capsys, pipeline):  # noqa: ARG001 (it must run)
    def run(*arguments):
        code = main([*arguments])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_a_pipeline_does_not_start_over_a_server_that_would_evict(live, tmp_path):
    with local_redis(tmp_path, {"maxmemory-policy": "allkeys-lru"}) as own_redis:
        settings = live.settings.model_copy(update={"store": SecretStr(own_redis.url)})
        with pytest.raises(ConfigError, match="maxmemory-policy allkeys-lru"):
            Pipeline(settings).start()


@pytest.mark.usefixtures("example")
def test_the_commands_look_into_redis(live, duetime):
    topic = live.topic()
    inbox = live.inbox(topic)
    with Producer(live.settings) as client:
        cancelled, moved, comes = (
            client.produce(topic, b"x", key=b"k", in_=timedelta(seconds=each))
            for each in (600, 900, 6)
        )
    inbox.until_id(comes)
    # What another of the intake's partitions has is saved with the next batch, perhaps.
    until_s = time.monotonic() + PATIENCE_S
    while (told := duetime("pending", "--json", "--topic", topic))[1].count(topic) < 2:
        assert time.monotonic() < until_s, told
    assert told[0] == 0
    code, out = duetime("show", moved)
    assert f"topic  {topic}" in out
    assert duetime("cancel", cancelled) == (0, f"cancelled: {cancelled} will not be delivered\n")
    code, out = duetime("reschedule", moved, "--in", "5s")
    assert code == 0, out
    assert out.strip() in [each.id for each in inbox.take(2)]
    # Two cancels, and what they have cancelled.
    assert json.loads(duetime("status", "--json")[1])["waiting"] >= 4
    # On a busy machine, what is due just now may be late for a moment.
    eventually(lambda: json.loads(duetime("status", "--json")[1])["late"] == 0)
    assert "store: Redis " in duetime("doctor")[1]


def test_the_black_box_example_is_told_in_time(example):
    told, _ = example.communicate()
    # Without a key each may be in another partition of intake, which is read when it is read.
    assert {line.partition(" came ")[0] for line in told.splitlines()[1:]} == {
        f'billing  {{"invoice": {each}}}' for each in (1, 2, 3)
    }
    assert len(told.splitlines()) == 4


def test_a_schedule_waits_in_redis_for_its_next_run(live, schedule):
    topic, ids = schedule
    arrived = live.inbox(topic).take(len(ids))
    assert {each.id for each in arrived} == ids
    assert min(each.late_ms for each in arrived) >= 0
