"""Pipeline: when a leader gives way. Nothing is delivered."""

import time
from dataclasses import fields
from types import SimpleNamespace

import pytest

from duetime.core.errors import KafkaError, LeaderStuck
from duetime.core.settings import Settings
from duetime.pipeline import service
from duetime.pipeline.leader import PipelineContext
from duetime.pipeline.service import Pipeline
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S


@pytest.fixture
def pipeline():
    """One that leads, beside a standby that is warm."""
    found = Pipeline(Settings(checkpoint="file:///nowhere", probe_timeout_seconds=90))
    found._leader = SimpleNamespace(stuck_path=None)
    found._election = SimpleNamespace(has_standby=True)
    return found


def test_a_leader_that_delivers_goes_on(pipeline):
    pipeline._require_delivery()


def test_a_leader_that_does_not_deliver_gives_way_and_says_where_to_look(pipeline):
    pipeline._leader.stuck_path = "lanes"
    with pytest.raises(LeaderStuck, match=r"through the lanes .* for 90 s.* disk.* broker"):
        pipeline._require_delivery()


def test_a_leader_that_does_not_deliver_goes_on_without_a_standby(pipeline):
    pipeline._leader.stuck_path, pipeline._election.has_standby = "store", False
    pipeline._require_delivery()


def test_a_standby_gives_way_to_none(pipeline):
    pipeline._leader = None
    pipeline._require_delivery()


def test_a_leader_of_a_later_term_has_its_lease(pipeline, monkeypatch):
    monkeypatch.setattr(service, "ReleaseJob", lambda *_: None)
    pipeline._election.holds_lease_of = lambda term: term == 2
    nothing = dict.fromkeys(each.name for each in fields(PipelineContext))
    known = {"settings": pipeline._settings.in_term(1), "delivery_logs": {None: None}}
    pipeline._context = PipelineContext(**nothing | known)
    pipeline._plan_for(2)
    assert pipeline._context.holds_lease()
    pipeline._plan_for(3)
    assert not pipeline._context.holds_lease()


def test_a_start_that_fails_leaves_no_job_to_the_next_one(pipeline, monkeypatch):
    """An overdue job of the first would send what the next one claims."""
    ended = []

    class FailingLeader(SimpleNamespace):
        has_jobs = True

        def start(self, *_):
            raise KafkaError("no answer")

    leader = FailingLeader(join=lambda: ended.append("joined"))
    monkeypatch.setattr(service, "Leader", lambda _: leader)
    monkeypatch.setattr(pipeline, "_plan_for", lambda _: None)
    spark_context = SimpleNamespace(cancelAllJobs=lambda: ended.append("cancelled"))
    pipeline._context = SimpleNamespace(spark=SimpleNamespace(sparkContext=spark_context))
    pipeline._leader, pipeline._election.term = None, 1
    with pytest.raises(KafkaError):
        pipeline._try_to_lead()
    assert ended == ["cancelled", "joined"]
    # What their producers hold may still arrive.
    assert pipeline._lead_s > time.monotonic() + DELIVERY_TIMEOUT_S
