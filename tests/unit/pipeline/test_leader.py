"""Leader: its start and stop, and the metrics while it leads. Nothing is delivered."""

from types import SimpleNamespace

from prometheus_client import REGISTRY
from tests.support.clocks import SetClock

from duetime.core.metrics import RECOVERY_SECONDS
from duetime.core.settings import Settings
from duetime.pipeline.leader import DELETION_INTERVAL_S, Leader

NOTHING = SimpleNamespace(start=int, close=int)

#: The context of a process that leads.
LEADS = SimpleNamespace(
    settings=Settings(), watchdog=None, clock=SetClock(0), holds_lease=lambda: True
)


def recovered(query):
    return REGISTRY.get_sample_value("duetime_recovery_seconds", {"query": query})


def test_recovery_seconds_are_published_only_while_leading(monkeypatch):
    def tell(query):
        return lambda *_: RECOVERY_SECONDS.labels(query).set(3)

    # One of them is begun while all are stopped.
    queries = SimpleNamespace(start=tell("intake"), stop=tell("lanes"))
    nothing = SimpleNamespace(start=id, stop=dict, release_overdue=list)
    monkeypatch.setattr(Leader, "_open_stores", lambda _: [None])
    monkeypatch.setattr(Leader, "_scheduler", lambda *_: nothing)
    monkeypatch.setattr(Leader, "_build_queries", lambda *_: queries)
    monkeypatch.setattr(Leader, "_transactional_delivery", lambda _: NOTHING)
    monkeypatch.setattr(Leader, "_background_services", lambda _: [])
    leader = Leader(LEADS)

    leader.start(lambda: True)
    assert recovered("intake") == 3
    leader.stop()
    assert (recovered("intake"), recovered("lanes")) == (None, None)


def test_store_that_cannot_be_read_at_start_does_not_stop_the_leader(monkeypatch, caplog):
    def fail():
        raise KeyError("name")

    started = []
    broken, other = (
        SimpleNamespace(start=lambda _: started.append(1), stop=dict, release_overdue=release)
        for release in (fail, list)
    )
    releases = iter([broken, other])
    monkeypatch.setattr(Leader, "_open_stores", lambda _: [None, None])
    monkeypatch.setattr(Leader, "_scheduler", lambda *_: next(releases))
    queries = SimpleNamespace(start=lambda *_: None, stop=dict)
    monkeypatch.setattr(Leader, "_build_queries", lambda *_: queries)
    monkeypatch.setattr(Leader, "_transactional_delivery", lambda _: NOTHING)
    monkeypatch.setattr(Leader, "_background_services", lambda _: [])
    leader = Leader(LEADS)

    leader.start(lambda: True)
    leader.stop()
    assert started == [1, 1]
    assert "could not release overdue messages at start" in caplog.text


def test_records_that_a_query_has_read_are_deleted_each_ten_seconds(monkeypatch):
    deleted, now_s = [], [100.0]
    monkeypatch.setattr("duetime.pipeline.leader.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("duetime.pipeline.leader.note_batch", lambda *_: None)
    monkeypatch.setattr(Leader, "_delete_read", lambda _, name, __: deleted.append(name))
    leader = Leader(LEADS)

    def check(*names):
        deleted.clear()
        for each in names:
            leader._on_healthy(each, None)
        return deleted

    assert check("lanes") == ["lanes"]
    now_s[0] += DELETION_INTERVAL_S - 1
    assert check("lanes", "retries") == ["retries"]
    now_s[0] += 1
    assert check("lanes", "retries") == ["lanes"]
