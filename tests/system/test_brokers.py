"""Brokers in trouble: a disk that is full for a while, and one of three that goes away."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import pytest
from tests.conftest import small_settings
from tests.system.conftest import Live
from tests.system.test_restart import complete

from duetime.admin import create_topics
from duetime.bench.crash import pipeline_process, send_signal
from duetime.client import Producer
from duetime.local.broker import LocalBroker
from duetime.local.ports import free_port
from duetime.local.storage import ROOM_MIB, new_cluster_id
from duetime.message import MessageId

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.hostile, pytest.mark.timeout(600)]

PATIENCE_S = 120.0

#: Longer than the trouble lasts: what is sent twice meanwhile is found while it waits.
FAR = timedelta(seconds=40)

BROKERS = 3

#: What three brokers keep three times, and can do without one of.
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
}


@contextmanager
def cluster(bootstrap, directory, **others):
    """Topics on these brokers, and no pipeline yet."""
    checkpoint = directory / "checkpoint"
    found = Live(
        small_settings(bootstrap, rescue_every_ms=2_000, checkpoint=checkpoint.as_uri(), **others)
    )
    create_topics(found.settings)
    yield found
    found.close()


@contextmanager
def small_disk(directory):
    """A file system of its own with little more room than a broker asks for."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={ROOM_MIB + 50}m", "tmpfs", str(directory)]
    subprocess.run(["/bin/mount", *options], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(directory)], check=True)


def fill(path):
    """Write until there is no room at all."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def schedule(client, topic, count, over_s):
    step = timedelta(seconds=over_s) / count
    return {client.produce(topic, "x", in_=number * step) for number in range(count)}


def noted(refused):
    """Adds to these ids that of a message that was not acknowledged."""
    return lambda error, id_: error and refused.append(id_)


def test_a_disk_that_is_full_for_a_while_loses_and_doubles_nothing(tmp_path):
    with (
        small_disk(tmp_path / "disk") as disk,
        LocalBroker(disk / "broker") as broker,
        cluster(broker.bootstrap, disk) as live,
        pipeline_process(live.settings),
        Producer(live.settings) as client,
    ):
        topic = live.topic()
        inbox = live.inbox(topic)
        ids = schedule(client, topic, 600, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 50, "the first")
        ballast = disk / "ballast"
        fill(ballast)
        waiting, refused = {}, []
        # Kafka gives up a disk that it cannot write to, and ends.
        until_s = time.monotonic() + PATIENCE_S
        while broker.running:
            assert time.monotonic() < until_s
            at = datetime.now(UTC) + FAR
            waiting[client.produce(topic, "x", at=at, on_delivery=noted(refused))] = at
            time.sleep(0.1)
        ballast.unlink()
        broker.start()
        client.flush()
        # As the sender is told to: it may have arrived all the same.
        for each in refused:
            unique = MessageId.parse(each).unique
            assert client.produce(topic, "x", at=waiting[each], id=unique) == each
        ids |= waiting.keys()
        complete(live, topic, inbox, ids)


@contextmanager
def three_brokers(directory, properties=MappingProxyType({})):
    """Three nodes of one cluster, each broker and controller."""
    names = range(1, BROKERS + 1)
    ports = {name: (free_port(), free_port()) for name in names}
    voters = ",".join(f"{name}@127.0.0.1:{ports[name][1]}" for name in names)
    cluster_id = new_cluster_id()
    brokers = [
        LocalBroker(
            directory / f"broker-{name}",
            port,
            REPLICATED
            | dict(properties)
            | {
                "node.id": str(name),
                "controller.quorum.voters": voters,
                "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{to_others}",
            },
            cluster_id,
        )
        for name, (port, to_others) in ports.items()
    ]
    with ExitStack() as stopped:
        for each in brokers:
            stopped.callback(each.kill)
        # None answers before there is a majority.
        with ThreadPoolExecutor() as pool:
            list(pool.map(LocalBroker.start, brokers))
        yield brokers


def test_when_one_of_three_brokers_goes_away_each_message_comes_once(tmp_path):
    with three_brokers(tmp_path) as brokers, ExitStack() as closed:
        bootstrap = ",".join(each.bootstrap for each in brokers)
        live = closed.enter_context(cluster(bootstrap, tmp_path, replication_factor=BROKERS))
        closed.enter_context(pipeline_process(live.settings))
        client = closed.enter_context(Producer(live.settings))
        topic = live.topic(partitions=3)
        # Not every broker hears of it at once.
        inbox = live.inbox_when_there(topic, partitions=3)
        ids = schedule(client, topic, 900, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 50, "the first")
        brokers[0].kill()
        ids |= schedule(client, topic, 300, over_s=10)
        before = len(inbox.arrived)
        inbox.until(lambda: len(inbox.arrived) > before + 100, "some while it is away")
        brokers[0].start()
        complete(live, topic, inbox, ids)


#: A replica that stands still stays registered for longer than it does so.
PATIENT = {"broker.session.timeout.ms": "60000"}

#: How long it stands still, in seconds: longer than records are tried to be sent, and than what
#: failed rests; shorter than until it is in sync no more.
STALL_S = 40.0


def test_when_a_replica_stalls_each_message_comes_once(tmp_path):
    """Leaders append what is sent meanwhile, and neither acknowledge nor show it.

    What is read back then must wait until it is shown. If it did not, it would send again what
    comes to light when the replica goes on.
    """
    with three_brokers(tmp_path, PATIENT) as brokers, ExitStack() as closed:
        bootstrap = ",".join(each.bootstrap for each in brokers)
        live = closed.enter_context(cluster(bootstrap, tmp_path, replication_factor=BROKERS))
        closed.enter_context(pipeline_process(live.settings))
        client = closed.enter_context(Producer(live.settings))
        topic = live.topic(partitions=3)
        inbox = live.inbox_when_there(topic, partitions=3)
        ids = schedule(client, topic, 2_000, over_s=60)
        inbox.until(lambda: len(inbox.arrived) > 50, "the first")
        client.flush()
        send_signal(brokers[0].pid, signal.SIGSTOP)
        closed.callback(send_signal, brokers[0].pid, signal.SIGCONT)
        time.sleep(STALL_S)
        send_signal(brokers[0].pid, signal.SIGCONT)
        complete(live, topic, inbox, ids)
