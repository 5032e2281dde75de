"""What a pipeline says of its lead, and no more when that is over. What delivers is left out."""

from types import SimpleNamespace

from prometheus_client import REGISTRY
from tests.conftest import SetClock

from duetime.config import Settings
from duetime.metrics import RECOVERY_SECONDS
from duetime.pipeline.leader import Leader

NOTHING = SimpleNamespace(start=int, close=int)


def recovered(query):
    return REGISTRY.get_sample_value("duetime_recovery_seconds", {"query": query})


def test_how_long_queries_recovered_is_told_while_it_leads_alone(monkeypatch):
    def tell(query):
        return lambda *_: RECOVERY_SECONDS.labels(query).set(3)

    # One of them is begun while all are stopped.
    queries = SimpleNamespace(start=tell("intake"), stop=tell("lanes"))
    nothing = SimpleNamespace(start=id, stop=dict, rescue_once=list)
    monkeypatch.setattr(Leader, "_stores", lambda _: [None])
    monkeypatch.setattr(Leader, "_release", lambda *_: nothing)
    monkeypatch.setattr(Leader, "_begun_by", lambda *_: queries)
    monkeypatch.setattr(Leader, "_transactional", lambda _: NOTHING)
    monkeypatch.setattr(Leader, "_beside", lambda _: [])
    leader = Leader(SimpleNamespace(settings=Settings(), fence=None, clock=SetClock(0)))

    leader.start(lambda: True)
    assert recovered("intake") == 3
    leader.stop()
    assert (recovered("intake"), recovered("lanes")) == (None, None)


def test_a_store_that_cannot_be_read_at_start_does_not_keep_it_from_leading(monkeypatch, caplog):
    def fail():
        raise KeyError("name")

    started = []
    broken, other = (
        SimpleNamespace(start=lambda _: started.append(1), stop=dict, rescue_once=rescue)
        for rescue in (fail, list)
    )
    releases = iter([broken, other])
    monkeypatch.setattr(Leader, "_stores", lambda _: [None, None])
    monkeypatch.setattr(Leader, "_release", lambda *_: next(releases))
    queries = SimpleNamespace(start=lambda *_: None, stop=dict)
    monkeypatch.setattr(Leader, "_begun_by", lambda *_: queries)
    monkeypatch.setattr(Leader, "_transactional", lambda _: NOTHING)
    monkeypatch.setattr(Leader, "_beside", lambda _: [])
    leader = Leader(SimpleNamespace(settings=Settings(), fence=None, clock=SetClock(0)))

    leader.start(lambda: True)
    leader.stop()
    assert started == [1, 1]
    assert "could not rescue at start" in caplog.text
