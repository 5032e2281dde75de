"""A pipeline whose tasks run in executors, the JVMs of a Spark cluster, of which one is killed."""

import json
import os
import signal
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S, now_ms, scraped
from tests.support.processes import complete, logs, running, schedule

from duetime.bench.scale import SLOTS, SPARK, spark_cluster
from duetime.local.process import free_port

pytestmark = pytest.mark.timeout(1_200)

#: How long messages may stand still after a kill, in ms, on a busy machine.
STANDSTILL_MS = 300_000


@contextmanager
def local_cluster():
    """Two workers in the driver's own JVM, which start an executor each."""
    yield {
        "spark_master": f"local-cluster[2,{SLOTS},1024]",
        "spark_properties": {"spark.executor.memory": "900m"},
    }


@contextmanager
def standalone():
    """A master and two workers, in processes of their own."""
    with spark_cluster(2) as (found, _):
        yield found


def executors():
    """Return the process ids of all executors on this machine."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = each.read_bytes()
        except OSError:
            continue
        if b"CoarseGrainedExecutorBackend" in command:
            found.append(int(each.parent.name))
    return found


@pytest.mark.parametrize("cluster", [local_cluster, standalone])
def test_executor_that_is_killed_loses_and_repeats_nothing(live, tmp_path, cluster):
    """In windows, lanes and intake at once."""
    topic, new, port = live.topic(), f"to_{uuid.uuid4().hex[:8]}", free_port()
    inbox = live.inbox(topic)
    before = set(executors())
    with cluster() as found:
        environment = {
            "SPARK_HOME": str(SPARK),
            "DUETIME_METRICS_PORT": str(port),
            "DUETIME_SPARK_MASTER": found["spark_master"],
            "DUETIME_SPARK_PROPERTIES": json.dumps(found["spark_properties"]),
        }
        with running(live, tmp_path, **environment):
            inbox.until_id(*schedule(live, topic, 1, over_s=0))
            ids = schedule(live, topic, 300, over_s=3) | schedule(live, topic, 1_200, over_s=60)
            ids |= {each.id for each in inbox.arrived}
            # Rows in executors know the destinations, and ask for one that they do not know.
            schedule(live, new, 1, over_s=0)
            live.inbox_when_there(new).take(1)

            first, _ = set(executors()) - before
            ids |= schedule(live, topic, 300, over_s=3)
            killed_ms = now_ms()
            os.kill(first, signal.SIGKILL)
            ids |= schedule(live, topic, 300, over_s=3)
            arrived = complete(live, topic, inbox, ids)
            gone = "an executor in its place"
            eventually(lambda: len(set(executors()) - before) == 2, gone, PATIENCE_S)
            metrics = scraped(port)
    assert max(each.late_ms for each in arrived if each.due_ms > killed_ms) < STANDSTILL_MS
    # Not those that the killed executor has sent since its last exchange.
    assert len(ids) / 2 < metrics["duetime_delivered_records_total", ""] <= len(ids) + 100
    assert "executor is gone" in logs(tmp_path)
