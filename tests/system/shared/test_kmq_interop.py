"""kmq's own client with our tracker, and its own tracker with our client."""

import hashlib
import os
import subprocess
import uuid
from contextlib import contextmanager
from datetime import timedelta

import pytest
from confluent_kafka.admin import NewTopic
from tests.support import SUPPORT
from tests.support.clocks import eventually
from tests.support.live import KMQ, PATIENCE_S

from duetime.core.setting_types import QueueSettings
from duetime.local import jars
from duetime.local.jars import find_java
from duetime.local.process import GuardedProcess
from duetime.queue import Queue

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = SUPPORT / "kmq"


@pytest.fixture(scope="module")
def kmq():
    """The class path of kmq's artifact, fetched once like all jars."""
    wanted = (HERE / "ivy.xml").read_bytes()
    place = jars.jars_dir().parent / f"kmq-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not any(place.glob("*.jar")):
        place.mkdir(parents=True, exist_ok=True)
        pattern = "[artifact]-[revision].[ext]"
        what = ["-ivy", HERE / "ivy.xml", "-confs", "kmq", "-types", "jar", "bundle"]
        command = [find_java(), "-jar", jars._ivy_jar(), *what, "-retrieve", pattern]
        done = subprocess.run(command, cwd=place, check=False, stdout=subprocess.DEVNULL)
        if done.returncode and not os.environ.get("CI"):
            pytest.skip("kmq's artifact cannot be fetched")
        done.check_returncode()
    return place / "*"


@contextmanager
def running(kmq, tmp_path, *arguments):
    """A program of kmq's own classes; gives the file with what it prints."""
    output = tmp_path / "output"
    command = [find_java(), "-cp", kmq, HERE / "Interop.java", *arguments]
    process = GuardedProcess.start(
        [str(each) for each in command], cwd=tmp_path, env=dict(os.environ), output=output
    )
    try:
        yield output
    finally:
        process.kill()


def test_what_kmqs_client_forgets_our_tracker_delivers_again(live, kmq, tmp_path):
    wanted = [f"{'drop' if each % 10 == 0 else 'keep'}-{each}" for each in range(40)]
    for number, value in enumerate(wanted):
        live.send(KMQ, value, partition=number % 2)
    live.flush()
    dropped = [each for each in wanted if each.startswith("drop")]
    with running(kmq, tmp_path, "client", live.settings.bootstrap, KMQ) as output:

        def seen():
            lines = output.read_text().splitlines() if output.exists() else []
            words = [line.split() for line in lines]
            return [each[0] for each in words if len(each) == 3]

        eventually(lambda: sorted(seen()) == sorted(wanted + dropped), output.read_text, PATIENCE_S)


def test_what_our_client_forgets_kmqs_tracker_delivers_again(live, kmq, tmp_path):
    topic = f"java_{uuid.uuid4().hex[:8]}"
    wanted = [NewTopic(name, num_partitions=2) for name in (topic, f"{topic}__markers")]
    for created in live.admin.create_topics(wanted).values():
        created.result()
    settings = live.settings.model_copy(update={"queues": {topic: QueueSettings(partitions=2)}})
    for number in range(20):
        live.send(topic, str(number), partition=number % 2)
    live.flush()
    queue = Queue(topic, settings=settings, group="workers", timeout=timedelta(seconds=2))
    seen = []
    with running(kmq, tmp_path, "tracker", live.settings.bootstrap, topic), queue:
        for message in queue:
            seen.append(int(message.value))
            if seen.count(7) == 2:
                break
            if seen[-1] != 7:
                message.ack()
    assert sorted(seen) == sorted([*range(20), 7])
