"""`duetime run` with messages that wait in Redis, and the commands and the example beside it."""

import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from tests.conftest import FROM_OUTSIDE, eventually, local_redis
from tests.system.conftest import PATIENCE_S, Live, await_first_messages, fresh_settings
from tests.system.test_recurring import MINUTE, every_minute
from tests.system.test_restart import running

from duetime.admin import create_topics
from duetime.cli import main
from duetime.client import Producer
from duetime.errors import ConfigError
from duetime.pipeline.runner import Pipeline

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "blackbox" / "caller.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with local_redis(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(scope="module")
def live(broker, server, tmp_path_factory):
    """Everything but the pipeline."""
    settings = fresh_settings(broker.bootstrap, tmp_path_factory.mktemp("checkpoint"))
    found = Live(settings.model_copy(update={"store": SecretStr(server.url)}))
    create_topics(found.settings)
    yield found
    found.close()


@pytest.fixture(scope="module", autouse=True)
def environment(live, server):
    """The same settings for every command; the store's URL may hold a password."""
    given = live.settings.model_dump(
        mode="json", exclude_defaults=True, exclude=FROM_OUTSIDE | {"store"}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value)
            patch.setenv(f"DUETIME_{name.upper()}", text)
        patch.setenv("DUETIME_STORE", server.url)
        yield


@pytest.fixture(scope="module")
def pipeline(live, environment, tmp_path_factory):  # noqa: ARG001 (what it sets)
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
def series(live, pipeline):  # noqa: ARG001 (it must run)
    """Where a series comes, and the ids of its runs: the last is due when others were tested."""
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
    with local_redis(tmp_path, {"maxmemory-policy": "allkeys-lru"}) as server:
        settings = live.settings.model_copy(update={"store": SecretStr(server.url)})
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


def test_a_series_waits_in_redis_for_its_next_run(live, series):
    topic, ids = series
    arrived = live.inbox(topic).take(len(ids))
    assert {each.id for each in arrived} == ids
    assert min(each.late_ms for each in arrived) >= 0
