"""What is accepted for one Kafka is sent to no other, whichever is given the spool's file later."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
from tests.api.conftest import NOWHERE, Running, alike, problem_of
from tests.api.test_dispatcher import kafka as listed
from tests.api.test_dispatcher import post
from tests.api.test_spool import MIB, everything_taken_in, of, record, spool
from tests.conftest import eventually

from duetime.api.address import url
from duetime.api.serve import check, check_spool
from duetime.api.spool.claim import Cluster
from duetime.api.spool.errors import SpoolForeign
from duetime.api.spool.file import Spool
from duetime.api.spool.owner import Owner, is_one, owner_of
from duetime.errors import SetupError
from duetime.reach import require_kafka

__all__ = ["listed", "spool"]

HERE = Owner(bootstrap="here:1", namespace="n")
HERE_AS_A = Owner(bootstrap="here:1", namespace="n", cluster_id="a")
HERE_AS_B = Owner(bootstrap="here:1", namespace="n", cluster_id="b")
THERE = Owner(bootstrap="there:1", namespace="n")
THERE_AS_A = Owner(bootstrap="there:1", namespace="n", cluster_id="a")
THERE_AS_B = Owner(bootstrap="there:1", namespace="n", cluster_id="b")
OTHERS = Owner(bootstrap="here:1", namespace="m", cluster_id="a")


@pytest.mark.parametrize(
    ("noted", "asking", "told"),
    [
        (HERE_AS_A, HERE_AS_A, True),
        (HERE_AS_A, THERE_AS_A, True),
        (HERE_AS_A, HERE_AS_B, False),
        (HERE_AS_A, THERE_AS_B, False),
        (HERE_AS_A, HERE, True),
        (HERE_AS_A, THERE, None),
        (HERE, HERE_AS_A, True),
        (HERE, HERE, True),
        (HERE, THERE, False),
        (HERE, THERE_AS_A, False),
        (HERE_AS_A, OTHERS, False),
    ],
)
def test_whose_a_spool_is_is_told_by_the_cluster_and_else_by_the_address(noted, asking, told):
    assert is_one(noted, asking) is told


def test_an_empty_spool_is_whose_it_is_that_comes(spool):
    spool.claim(HERE_AS_A)
    spool.claim(THERE_AS_B)
    spool.put([record(1)])
    with pytest.raises(SpoolForeign, match=r"1 messages for Kafka at there:1 \(cluster b,"):
        spool.claim(HERE_AS_A)
    (taken,) = spool.take(9, now_ms=7)
    spool.remove([taken.number])
    spool.claim(HERE_AS_A)


def test_which_cluster_it_is_is_noted_with_its_first_answer_and_kept_while_there_is_none(spool):
    spool.claim(HERE)
    spool.put([record(1)])
    spool.claim(HERE_AS_A)
    spool.claim(HERE)
    with pytest.raises(SpoolForeign) as refused:
        spool.claim(THERE)
    assert not refused.value.is_certain
    spool.claim(THERE_AS_A)
    with pytest.raises(SpoolForeign) as refused:
        spool.claim(HERE_AS_B)
    assert refused.value.is_certain


def test_a_file_that_notes_nobody_is_whose_it_is_that_comes(tmp_path):
    before = Spool(tmp_path / "spool.db", MIB)
    before.put([record(1)])
    before.close()
    with sqlite3.connect(tmp_path / "spool.db") as file:
        file.execute("DROP TABLE owner")
    file.close()

    spool = Spool(tmp_path / "spool.db", MIB)
    spool.claim(HERE_AS_A)
    with pytest.raises(SpoolForeign):
        spool.claim(HERE_AS_B)
    spool.close()


@contextmanager
def served(settings):
    running = Running(settings)
    with httpx.Client(base_url=url(settings), timeout=30) as client:
        yield client
    running.stop()


def elsewhere(settings):
    return settings.model_copy(update={"bootstrap": "127.0.0.1:2"})


@pytest.fixture
def left(tmp_path, listed):
    """The settings under which a message was accepted, and its process ended."""
    settings = alike(NOWHERE, tmp_path)
    with served(settings) as client:
        assert post(client, "left").status_code == 202
    listed._waiting.clear()
    return settings


def test_what_is_spooled_waits_for_its_own_cluster_and_nothing_is_put_to_it(left, listed):
    listed.is_open.set()
    listed.cluster = "another"
    with served(left) as client:
        eventually(lambda: client.get("/readyz").status_code == 503)
        answer = post(client, "new")
        assert problem_of(answer) == (503, "spool-failed")
        assert "DUETIME_API_SPOOL" in answer.json()["detail"]
        assert listed.arrived == []
        listed.cluster = "made"
        eventually(lambda: listed.arrived == ["left"])
        eventually(lambda: post(client, "new").status_code == 201)


def test_a_cluster_that_was_made_anew_while_nothing_was_spooled_has_the_spool(
    tmp_path, listed, monkeypatch
):
    monkeypatch.setattr("duetime.api.spool.claim.EVERY_S", 0)
    asked = []
    monkeypatch.setattr(Spool, "claim", lambda _, owner: asked.append(owner.cluster_id))
    with served(alike(NOWHERE, tmp_path)):
        eventually(lambda: "made" in asked)
        listed.cluster = "anew"
        eventually(lambda: "anew" in asked)


def test_at_another_address_nothing_is_accepted_until_that_answers(left, listed):
    moved = elsewhere(left)
    check(moved)
    listed.cluster = None
    with served(moved) as client:
        assert problem_of(post(client, "new")) == (503, "spool-failed")
        eventually(lambda: client.get("/readyz").status_code == 503)
        assert problem_of(client.get("/readyz")) == (503, "spool-failed")
        listed.is_open.set()
        listed.cluster = "made"
        eventually(lambda: listed.arrived == ["left"])
        eventually(lambda: post(client, "new").status_code == 201)


def test_messages_in_anothers_spool_are_unknown(left, listed):
    listed.cluster = "another"
    with served(left) as client:
        eventually(lambda: client.get("/readyz").status_code == 503)
        (kept,) = kept_in(left)
        # Kafka is asked for it, which is not there.
        assert client.get(f"/v1/messages/{kept}").status_code == 503
    assert kept_in(left) == [kept]


def kept_in(settings):
    """The ids of the file, also while a server has it."""
    with sqlite3.connect(f"file:{settings.api_spool}?immutable=1", uri=True) as file:
        rows = file.execute("SELECT id FROM spool").fetchall()
    file.close()
    return [each for (each,) in rows]


def test_another_namespace_is_refused_at_the_start(left):
    other = left.model_copy(update={"namespace": "other"})
    with pytest.raises(SetupError, match=r"namespace duetime.* DUETIME_API_SPOOL="):
        check(other)


@pytest.mark.system
def test_a_real_cluster_that_is_another_gets_nothing_until_the_note_is_taken_out(
    settings,
    topics,  # noqa: ARG001 (they must be there)
    tmp_path,
):
    named = alike(settings, tmp_path)
    cluster = require_kafka(settings).cluster_id
    assert asyncio.run(Cluster(settings).id()) == cluster
    kept = Spool(named.api_spool, MIB)
    kept.claim(owner_of(settings, "deleted"))
    kept.put([of(settings, 1, "v")])
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

    with served(named) as client:
        eventually(lambda: client.get("/readyz").status_code == 503)
        assert problem_of(client.post("/v1/messages", json={"topic": "t", "in": "1h"}))[0] == 503
    assert everything_taken_in(settings) == []

    with sqlite3.connect(named.api_spool) as file:
        file.execute("DELETE FROM owner")
    file.close()
    with served(named):
        eventually(lambda: everything_taken_in(settings) == ["m1"])
