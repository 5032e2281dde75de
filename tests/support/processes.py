"""`duetime run` as a process of its own, and messages for it."""

import os
import signal
import sys
import uuid
from contextlib import contextmanager
from datetime import timedelta

from tests.support.topics import FROM_OUTSIDE

from duetime.bench.chaos import send_signal
from duetime.local.process import GuardedProcess

#: What was in flight is finished in more than one batch.
IN_BATCHES = {"DUETIME_RECOVERY_BATCH_RECORDS": "300", "PYSPARK_PYTHON": sys.executable}


@contextmanager
def running(live, directory, program=(sys.executable, "-m", "duetime"), **environment):
    """A started `duetime run`, ended hard unless it has ended before; or when these tests are."""
    command = [*program, "run", "--config", written(live, directory)]
    output = directory / f"log-{uuid.uuid4().hex[:8]}"
    process = GuardedProcess.start(
        command, cwd=directory, env=os.environ | IN_BATCHES | environment, output=output
    )
    try:
        yield process
    finally:
        kill(process)


def written(live, directory):
    """The settings as a file."""
    path = directory / "duetime.toml"
    # Queues and delayed topics are tables, and given in the environment.
    outside = FROM_OUTSIDE | {"queues", "delayed_topics"}
    given = live.settings.model_dump(mode="json", exclude_unset=True, exclude=outside)
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()))
    return path


def kill(process):
    """End Python and its JVM at once, as the kernel or a power cut would."""
    if process.running:
        send_signal(process.pid, signal.SIGKILL)
    process.kill()


def schedule(live, topic, count, over_s, after_s=0):
    """Messages due one after another, the first at once or later; returns their ids."""
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    with Client(live.settings) as client:
        first, step = timedelta(seconds=after_s), timedelta(seconds=over_s) / count
        return {client.produce(topic, "x", in_=first + each * step) for each in range(count)}


def complete(live, topic, inbox, ids):
    """Wait for every id; each has come once, and none early."""
    inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, f"all of {len(ids)}")
    # Whatever comes twice comes with what is overdue, before one that has yet to wait.
    last = schedule(live, topic, 1, over_s=0, after_s=6)
    inbox.until_id(*last)
    assert sorted(each.id for each in inbox.arrived) == sorted(ids | last)
    assert min(each.late_ms for each in inbox.arrived) >= 0
    return inbox.arrived


def logs(directory):
    return "".join(path.read_text() for path in directory.glob("log-*"))
