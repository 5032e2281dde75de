"""A spool before a real Kafka: nothing is lost, doubled or held up."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime

import httpx
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from tests.support.api import RunningServer, alike, client_of, problem_of
from tests.support.clocks import eventually
from tests.support.spooling import (
    MIB,
    Load,
    api_process,
    await_drained,
    everything_taken_in,
    message,
    of,
    own_broker,
    put,
)
from tests.support.topics import configure

from duetime.api.producer import find_arrived
from duetime.api.server import check_spool
from duetime.api.spool import AsyncSpool, Owner, Spool
from duetime.client import Producer as Client
from duetime.core.errors import SetupError
from duetime.kafka.connection import ensure_reachable, librdkafka_properties


@pytest.mark.slow
def test_a_record_that_the_topic_does_not_take_holds_up_no_other(settings, topics, tmp_path):  # noqa: ARG001
    intake = f"{settings.namespace}.in"
    configure(AdminClient(librdkafka_properties(settings)), intake, "max.message.bytes", "20000")
    named = alike(settings, tmp_path)
    kept = Spool(named.api_spool, MIB)
    put(kept, [of(settings, each, "x" * (30_000 if each == 3 else 3_000)) for each in range(9)])
    kept.close()

    running = RunningServer(named)
    with httpx.Client(base_url=named.api_url, timeout=30) as client:
        eventually(lambda: len(everything_taken_in(settings)) == 8)
        large = {"topic": "orders", "in": "1h", "value": "x" * 30_000}
        assert problem_of(client.post("/v1/messages", json=large)) == (422, "refused")
        assert client.post("/v1/messages", json=message(9)).status_code == 201
    running.stop()

    assert sorted(everything_taken_in(settings)) == [f"m{each}" for each in range(10) if each != 3]


@pytest.mark.slow
def test_no_accepted_message_is_lost_or_doubled_by_killed_processes(tmp_path):
    """Under load: the broker is stopped, the API killed twice, and both started again."""
    with own_broker(tmp_path) as (broker, settings):
        load = Load(settings)
        with api_process(settings) as api, load:
            load.await_more(200)
            broker.stop()
            load.await_more(200)
            api.send_signal(signal.SIGKILL)
        with api_process(settings) as api, load:
            load.await_more(200)
            broker.start()
            load.await_more(200)
            api.send_signal(signal.SIGKILL)
        with api_process(settings), load:
            load.await_more(200)
            await_drained(settings)
        arrived = everything_taken_in(settings)
    accepted = load.accepted
    assert not set(accepted) - set(arrived)
    # What was not answered may have come, and was never sent a second time.
    assert len(arrived) == len(set(arrived))


def test_what_has_arrived_behind_an_open_transaction_is_found(settings, topics, now_ms):  # noqa: ARG001
    intake = f"{settings.namespace}.in"
    other = Producer(librdkafka_properties(settings) | {"transactional.id": settings.namespace})
    other.init_transactions()
    other.begin_transaction()
    for partition in range(settings.intake_partitions):
        other.produce(intake, b"not committed yet", partition=partition)
    assert other.flush(30) == 0
    with Client(settings) as client:
        sent = client.produce("orders", "v", at=datetime.now(UTC), id="m0")

    assert find_arrived(settings, {sent: now_ms, "000000000001-m1": now_ms}) == {sent}
    other.abort_transaction()


def test_another_real_cluster_gets_nothing_until_the_note_is_removed(
    settings,
    topics,  # noqa: ARG001 (they must be there)
    tmp_path,
):
    named = alike(settings, tmp_path)
    cluster = ensure_reachable(settings).cluster_id
    kept = Spool(named.api_spool, MIB)
    assert asyncio.run(AsyncSpool(settings, kept)._cluster_id()) == cluster
    kept.claim(Owner(settings.bootstrap, settings.namespace, "deleted"))
    put(kept, [of(settings, 1, "v")])
    kept.close()
    with pytest.raises(SetupError, match="cluster deleted"):
        check_spool(named, cluster)
    own = {"DUETIME_API_SPOOL": str(named.api_spool), "DUETIME_NAMESPACE": settings.namespace}
    command = [sys.executable, "-m", "duetime", "api", "--kafka", settings.bootstrap]
    command += ["--port", str(named.api_port)]
    env = os.environ | own
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cluster deleted" in done.stderr.splitlines()[-1]

    with client_of(named) as client:
        eventually(lambda: client.get("/readyz").status_code == 503)
        assert problem_of(client.post("/v1/messages", json={"topic": "t", "in": "1h"}))[0] == 503
    assert everything_taken_in(settings) == []

    with sqlite3.connect(named.api_spool) as file:
        file.execute("DELETE FROM owner")
    file.close()
    with client_of(named):
        eventually(lambda: everything_taken_in(settings) == ["m1"])
