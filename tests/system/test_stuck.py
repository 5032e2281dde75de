"""A destination that refuses what is sent to it, and what that does to others: nothing."""

import threading
from datetime import timedelta

import pytest
from tests.conftest import configure, eventually
from tests.system.conftest import await_first_messages

from duetime.admin import create_topics
from duetime.client import Producer
from duetime.local.jars import pipeline_jars
from duetime.pipeline import details
from duetime.pipeline.runner import Pipeline

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

#: Due at once, in lanes, and in the wheel.
WAYS_S = (0, 1.5, 8)

#: Settings under which a broker refuses every timestamp that is not of its own millisecond.
REFUSING = {"message.timestamp.type": "CreateTime", "message.timestamp.before.max.ms": "0"}


@pytest.fixture(scope="module")
def live(down, tmp_path_factory, _jvm_ends_well):
    """A pipeline of its own: what is refused here makes its queries begin again."""
    found = down(tmp_path_factory.mktemp("checkpoint"))
    create_topics(found.settings)
    patch = pytest.MonkeyPatch()
    # What is changed once a topic is known is found out by being refused.
    patch.setattr(details, "EVERY_S", 3_600.0)
    pipeline = Pipeline(found.settings, jars=pipeline_jars())
    pipeline.start()
    watch = threading.Thread(target=pipeline.watch)
    watch.start()
    found.pipeline = pipeline
    try:
        await_first_messages(found, WAYS_S)
        yield found
    finally:
        patch.undo()
        pipeline.ask_to_stop()
        watch.join()
        pipeline.stop()
        found.close()


def send_beside_others(live, bad):
    """One message each way to a topic that refuses it, among 300 others; their ids, and where."""
    good = live.topic()
    with Producer(live.settings) as client:
        others = [client.produce(good, "x", in_=timedelta(seconds=n / 30)) for n in range(150)]
        refused = [client.produce(bad, "x", in_=timedelta(seconds=each)) for each in WAYS_S]
        others += [client.produce(good, "x", in_=timedelta(seconds=n / 10)) for n in range(150)]
    return good, others, refused


def assert_all_came(live, topic, ids):
    """Each of them came to the topic, once, and nothing else did."""
    assert sorted(each.id for each in live.inbox(topic).take(len(ids))) == sorted(ids)


def letters(live, refused):
    """Their dead letters, by id."""
    dead = live.inbox(live.names.dead)

    def found():
        return {each.id: each for each in dead.arrived if each.id in refused}

    dead.until(lambda: len(found()) == len(refused), f"{refused} dead")
    return found()


def failures(live):
    """How often queries have failed; wait until all of them run."""
    leader = live.pipeline._leader
    eventually(lambda: set(leader.told()["queries"].values()) == {"runs"}, leader.told)
    return sum(each.failures for each in leader._queries._running)


def test_topic_that_refuses_timestamps_is_known_and_holds_up_nobody(live):
    bad, before = live.topic(config=REFUSING), failures(live)
    good, others, refused = send_beside_others(live, bad)

    assert_all_came(live, good, others)
    # One that comes within its millisecond is taken.
    ends = live.inbox(bad, live.names.dead)
    ends.until(lambda: {each.id for each in ends.arrived} >= set(refused), refused)
    for letter in (each for each in ends.arrived if each.topic != bad and each.id in refused):
        assert letter.by_name["due-error"] == b"refused-by-broker"
        assert b"imestamp" in letter.by_name["due-error-detail"]
        assert letter.by_name["due-topic"] == bad.encode()
    # No sink has failed.
    assert failures(live) == before


def test_topic_that_comes_to_refuse_fails_others_once_and_ends_in_dead_letters(live):
    """Its settings are known from before: no table says that it takes no message without a key."""
    bad = live.topic()
    configure(live.admin, bad, "cleanup.policy", "compact")
    good, others, refused = send_beside_others(live, bad)

    assert_all_came(live, good, others)
    for letter in letters(live, refused).values():
        assert letter.by_name["due-error"] == b"refused-by-broker"
        assert letter.by_name["due-attempts"] == b"2"

    # Each record is sent by itself now: a refusal fails no sink.
    before = failures(live)
    good, others, refused = send_beside_others(live, bad)
    with Producer(live.settings) as client:
        taken = [client.produce(bad, "x", key="k", in_=timedelta(seconds=s)) for s in WAYS_S]
    assert_all_came(live, good, others)
    assert_all_came(live, bad, taken)
    letters(live, refused)
    assert failures(live) == before
