"""Where a crash is at its worst: between two steps. Each message goes on from there, once."""

from datetime import timedelta

from prometheus_client import REGISTRY
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S

from duetime.pipeline.faults import Point, armed


def test_a_failed_release_job_is_repeated_without_what_it_has_sent(live, sender):
    topic = live.topic()
    inbox = live.inbox(topic)
    with armed(Point.JOB_STARTED) as begun, armed(Point.JOB_SENT) as sent:
        step = timedelta(milliseconds=200)
        delays = [timedelta(seconds=6) + number * step for number in range(20)]
        ids = [sender.produce(topic, "x", in_=delay) for delay in delays]
        sender.flush()
        assert begun.wait(PATIENCE_S)
        assert sent.wait(PATIENCE_S)
    inbox.until(lambda: {each.id for each in inbox.arrived} >= set(ids), "all")
    # Whatever is repeated is repeated in one turn: a later one comes behind it.
    last = sender.produce(topic, "x", in_=timedelta(seconds=5))
    arrived = inbox.until_id(last)
    assert sorted(each.id for each in arrived) == sorted([*ids, last])


def test_what_became_of_failures_is_not_done_again(live, sender):
    dead = live.inbox(live.names.dead_letter)
    topic, before = live.topic(), failures_counted()
    with armed(Point.RETRIES_SENT) as failed:
        first = sender.produce(topic, "x", partition=99, in_=timedelta(0))
        sender.flush()
        assert failed.wait(PATIENCE_S)
    dead.until_id(first)
    eventually(lambda: failures_counted() == before + 1, failures_counted)
    second = sender.produce(topic, "x", partition=99, in_=timedelta(0))
    arrived = [each.id for each in dead.until_id(second)]
    assert arrived.count(first) == 1


def failures_counted():
    """Return how often the retries query has failed."""
    name = "duetime_query_failures_total"
    return REGISTRY.get_sample_value(name, {"query": "retries"}) or 0
