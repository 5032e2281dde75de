"""What is accepted for one Kafka is sent to no other, whichever is given the spool's file later."""

import sqlite3

import pytest
from tests.support.api import NOWHERE, alike, client_of, problem_of
from tests.support.clocks import eventually
from tests.support.made_kafka import post
from tests.support.spooling import MIB, put, record

from duetime.api.errors import SpoolForeign
from duetime.api.server import check
from duetime.api.spool import Owner, Spool
from duetime.core.errors import SetupError

HERE = Owner(bootstrap="here:1", namespace="n")
HERE_AS_A = Owner(bootstrap="here:1", namespace="n", cluster_id="a")
HERE_AS_B = Owner(bootstrap="here:1", namespace="n", cluster_id="b")
THERE = Owner(bootstrap="there:1", namespace="n")
THERE_AS_A = Owner(bootstrap="there:1", namespace="n", cluster_id="a")
THERE_AS_B = Owner(bootstrap="there:1", namespace="n", cluster_id="b")
OTHERS = Owner(bootstrap="here:1", namespace="m", cluster_id="a")


@pytest.mark.parametrize(
    ("noted", "asking", "expected"),
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
def test_the_owner_of_a_spool_is_its_cluster_or_else_its_address(noted, asking, expected):
    assert noted.matches(asking) is expected


def test_an_empty_spool_is_claimed_by_any_owner(spool):
    spool.claim(HERE_AS_A)
    spool.claim(THERE_AS_B)
    put(spool, [record(1)])
    with pytest.raises(SpoolForeign, match=r"1 messages for Kafka at there:1 \(cluster b,"):
        spool.claim(HERE_AS_A)
    (taken,) = spool.take(9, now_ms=7)
    spool.remove([taken.number])
    spool.claim(HERE_AS_A)


def test_the_cluster_id_is_noted_once_known_and_kept_without_an_answer(spool):
    spool.claim(HERE)
    put(spool, [record(1)])
    spool.claim(HERE_AS_A)
    spool.claim(HERE)
    with pytest.raises(SpoolForeign) as refused:
        spool.claim(THERE)
    assert not refused.value.is_certain
    spool.claim(THERE_AS_A)
    with pytest.raises(SpoolForeign) as refused:
        spool.claim(HERE_AS_B)
    assert refused.value.is_certain


def test_a_file_without_an_owner_is_claimed_by_any(tmp_path):
    before = Spool(tmp_path / "spool.db", MIB)
    put(before, [record(1)])
    before.close()
    with sqlite3.connect(tmp_path / "spool.db") as file:
        file.execute("DROP TABLE owner")
    file.close()

    spool = Spool(tmp_path / "spool.db", MIB)
    spool.claim(HERE_AS_A)
    with pytest.raises(SpoolForeign):
        spool.claim(HERE_AS_B)
    spool.close()


def elsewhere(settings):
    return settings.model_copy(update={"bootstrap": "127.0.0.1:2"})


@pytest.fixture
def left(tmp_path, listed):
    """The settings under which a message was accepted, and its process ended."""
    settings = alike(NOWHERE, tmp_path)
    with client_of(settings) as client:
        assert post(client, "left").status_code == 202
    listed._waiting.clear()
    return settings


def test_a_spool_waits_for_its_cluster_and_accepts_nothing_for_another(left, listed):
    listed.is_open.set()
    listed.cluster = "another"
    with client_of(left) as client:
        eventually(lambda: client.get("/readyz").status_code == 503)
        answer = post(client, "new")
        assert problem_of(answer) == (503, "spool-failed")
        assert "DUETIME_API_SPOOL" in answer.json()["detail"]
        assert listed.arrived == []
        listed.cluster = "made"
        eventually(lambda: listed.arrived == ["left"])
        eventually(lambda: post(client, "new").status_code == 201)


def test_a_recreated_cluster_owns_an_empty_spool(tmp_path, listed, monkeypatch):
    monkeypatch.setattr("duetime.api.spool.CLUSTER_ID_INTERVAL_S", 0)
    asked = []
    monkeypatch.setattr(Spool, "claim", lambda _, owner: asked.append(owner.cluster_id))
    with client_of(alike(NOWHERE, tmp_path)):
        eventually(lambda: "made" in asked)
        listed.cluster = "anew"
        eventually(lambda: "anew" in asked)


def test_at_another_address_nothing_is_accepted_until_that_answers(left, listed):
    moved = elsewhere(left)
    check(moved)
    listed.cluster = None
    with client_of(moved) as client:
        assert problem_of(post(client, "new")) == (503, "spool-failed")
        eventually(lambda: client.get("/readyz").status_code == 503)
        assert problem_of(client.get("/readyz")) == (503, "spool-failed")
        listed.is_open.set()
        listed.cluster = "made"
        eventually(lambda: listed.arrived == ["left"])
        eventually(lambda: post(client, "new").status_code == 201)


def test_messages_in_anothers_spool_are_unknown(left, listed):
    listed.cluster = "another"
    with client_of(left) as client:
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
