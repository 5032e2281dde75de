import os
import select
import shutil
import socket
import subprocess
import sys

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from duetime.core.errors import SetupError
from duetime.local.broker import LocalBroker, render
from duetime.local.process import free_port

#: A program that starts a broker, tells its pid, and waits to be killed.
PROGRAM = """
import sys
from pathlib import Path
from duetime.local.broker import LocalBroker

broker = LocalBroker(Path(sys.argv[1]))
broker.start()
print(broker.pid, flush=True)
sys.stdin.read()
"""

#: Seconds; only a test that fails waits as long.
PATIENCE = 30


@pytest.fixture
def new_broker(tmp_path):
    """Makes a broker that is stopped after the test."""
    made = []

    def make(name="data", **options):
        made.append(LocalBroker(tmp_path / name, **options))
        return made[-1]

    yield make
    for broker in made:
        broker.kill()


def send(broker: LocalBroker, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    producer.produce("letters", value)
    assert producer.flush(PATIENCE) == 0


def values(broker: LocalBroker, count: int) -> list[bytes]:
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": "reader", "log_level": 0}
    )
    consumer.assign([TopicPartition("letters", 0, 0)])
    records = consumer.consume(count, timeout=PATIENCE)
    consumer.close()
    return [record.value() for record in records]


def cluster_id(broker: LocalBroker) -> str:
    client = AdminClient({"bootstrap.servers": broker.bootstrap})
    return client.list_topics(timeout=PATIENCE).cluster_id


@pytest.mark.slow
def test_a_stopped_broker_comes_back_as_the_same_cluster_with_its_messages(new_broker):
    broker = new_broker()
    broker.start()
    cluster = cluster_id(broker)
    send(broker, b"before")
    broker.stop()
    assert not broker.running

    broker.start()
    send(broker, b"after")
    assert cluster_id(broker) == cluster
    assert values(broker, 2) == [b"before", b"after"]


@pytest.mark.slow
def test_a_killed_broker_comes_back_with_its_messages(new_broker):
    broker = new_broker()
    broker.start()
    send(broker, b"before")
    broker.kill()

    broker.start()
    send(broker, b"after")
    assert values(broker, 2) == [b"before", b"after"]


def test_a_second_broker_on_the_same_directory_is_refused(new_broker):
    first = new_broker()
    first.start()
    with pytest.raises(SetupError, match=r"another broker runs on .*--data"):
        new_broker().start()
    send(first, b"undisturbed")


@pytest.mark.slow
def test_broker_ends_with_its_killed_program_and_the_next_waits(new_broker, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "data"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as program:
        orphan = os.pidfd_open(int(program.stdout.readline()))
        program.kill()
    new_broker().start()
    # Readable when the process has ended.
    assert select.select([orphan], [], [], PATIENCE)[0]
    os.close(orphan)


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_does_not_reach_the_broker(new_broker):
    with new_broker() as broker:
        assert os.getpgid(broker.pid) == broker.pid
        assert os.getsid(broker.pid) != os.getsid(0)


def test_a_broker_that_ends_at_its_start_says_why_and_where_its_log_is(new_broker, tmp_path):
    broker = new_broker(properties={"num.partitions": "none"})
    with pytest.raises(SetupError, match=r"Invalid value none for .* num\.partitions") as raised:
        broker.start()
    assert str(tmp_path / "data" / "broker.log") in str(raised.value)
    assert not broker.running


def test_a_port_in_use_is_named(new_broker):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} is in use .*--port"):
            new_broker(port=port).start()


def test_a_port_that_cannot_be_is_refused(new_broker):
    with pytest.raises(SetupError, match="port 99999 cannot be listened on"):
        new_broker(port=99_999).start()


def test_a_directory_that_cannot_be_written_to_is_named(new_broker, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file/data cannot be written to"):
        new_broker("file/data").start()


def test_a_disk_without_room_is_told_before_the_start(new_broker, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=499 * 1024 * 1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SetupError, match=r"only 499 MiB are free .* 500 MiB are needed"):
        new_broker().start()


def test_a_broker_that_is_not_started_can_be_stopped_and_has_no_process(new_broker):
    broker = new_broker()
    broker.stop()
    broker.kill()
    assert not broker.running
    with pytest.raises(RuntimeError):
        _ = broker.pid


def test_free_ports_are_below_those_of_outgoing_connections():
    assert all(20_000 <= free_port() < 32_000 for _ in range(20))


def test_settings_survive_javas_properties_format():
    assert render({"b": "C:\\new", "a": "für 💡"}) == "a=f\\u00fcr \\ud83d\\udca1\nb=C:\\\\new\n"
