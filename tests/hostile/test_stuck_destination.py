"""A destination that refuses what is sent to it, and what that does to others: nothing."""

from datetime import timedelta

import pytest
from tests.support.clocks import eventually
from tests.support.live import await_first_messages, led, now_ms, with_topics
from tests.support.topics import configure

from duetime.client.producer import Producer
from duetime.core.messages import MessageId
from duetime.kafka import descriptions

pytestmark = pytest.mark.timeout(1_200)

#: Due at once, in lanes, and in the wheel.
WAYS_S = (0, 1.5, 8)

#: Settings under which a broker refuses every timestamp that is not of its own millisecond.
REFUSING = {"message.timestamp.type": "CreateTime", "message.timestamp.before.max.ms": "0"}

#: How late others may be, in ms: a query that rests after a failure does not start again sooner.
LATE_MS = 10_000

#: Longer than a broker takes records of a topic that it was told to delete.
SEEN_MS = 1_000


@pytest.fixture(scope="module")
def live(down, tmp_path_factory, _jvm_ends_well):
    """A pipeline of its own: what is refused here makes its queries begin again."""
    found = down(tmp_path_factory.mktemp("checkpoint"))
    with pytest.MonkeyPatch.context() as patch, with_topics(found):
        # What is changed once a topic is known is found out by being refused.
        patch.setattr(descriptions, "SETTINGS_INTERVAL_S", 3_600.0)
        with led(found):
            await_first_messages(found, WAYS_S)
            # The first load on a cold JVM is late by itself.
            good, others, _ = send_beside_others(found, found.topic())
            assert_all_came(found, good, others)
            yield found


def send_beside_others(live, bad):
    """One message each way to a topic that refuses it, among 300 others; their ids, and where."""
    good = live.topic()
    with Producer(live.settings) as client:
        others = [client.produce(good, "x", in_=timedelta(seconds=n / 30)) for n in range(150)]
        refused = [client.produce(bad, "x", in_=timedelta(seconds=each)) for each in WAYS_S]
        others += [client.produce(good, "x", in_=timedelta(seconds=n / 10)) for n in range(150)]
    return good, others, refused


def assert_all_came(live, topic, ids, within_ms=None):
    """Each of them came to the topic, once, and nothing else did; none later than that."""
    arrived = live.inbox(topic).take(len(ids))
    assert sorted(each.id for each in arrived) == sorted(ids)
    assert within_ms is None or max(each.late_ms for each in arrived) < within_ms


def letters(live, refused):
    """Their dead letters, by id."""
    dead = live.inbox(live.names.dead_letter)

    def found():
        return {each.id: each for each in dead.arrived if each.id in refused}

    dead.until(lambda: len(found()) == len(refused), f"{refused} dead")
    return found()


def failures(live):
    """How often queries have failed; wait until all of them run."""
    leader = live.pipeline._leader
    eventually(lambda: set(leader.status()["queries"].values()) == {"runs"}, leader.status)
    return sum(each.failures for each in leader._queries._queries)


def failed_jobs(caplog):
    """How many release jobs have failed since the test began."""
    return sum(each.message.startswith("release job failed") for each in caplog.records)


def test_topic_that_refuses_timestamps_is_isolated_from_the_start(live, caplog):
    bad, before = live.topic(config=REFUSING), failures(live)
    good, others, refused = send_beside_others(live, bad)

    assert_all_came(live, good, others, LATE_MS)
    # One that comes within its millisecond is taken.
    ends = live.inbox(bad, live.names.dead_letter)
    ends.until(lambda: {each.id for each in ends.arrived} >= set(refused), refused)
    for letter in (each for each in ends.arrived if each.topic != bad and each.id in refused):
        assert letter.by_name["due-error"] == b"refused-by-broker"
        assert b"imestamp" in letter.by_name["due-error-detail"]
        assert letter.by_name["due-topic"] == bad.encode()
    # No sink has failed.
    assert (failures(live), failed_jobs(caplog)) == (before, 0)


def test_topic_that_begins_to_refuse_fails_two_sinks_at_most(live, caplog):
    """Its settings are known from before: no table says that it takes no message without a key."""
    bad, before = live.topic(), failures(live)
    configure(live.admin, bad, "cleanup.policy", "compact")
    good, others, refused = send_beside_others(live, bad)

    assert_all_came(live, good, others, LATE_MS)
    for letter in letters(live, refused).values():
        assert letter.by_name["due-error"] == b"refused-by-broker"
        assert letter.by_name["due-attempts"] == b"2"
    assert failures(live) - before + failed_jobs(caplog) <= 2

    # Each record is sent by itself now: a refusal fails no sink.
    before = failures(live), failed_jobs(caplog)
    good, others, refused = send_beside_others(live, bad)
    with Producer(live.settings) as client:
        taken = [client.produce(bad, "x", key="k", in_=timedelta(seconds=s)) for s in WAYS_S]
    assert_all_came(live, good, others, LATE_MS)
    assert_all_came(live, bad, taken)
    letters(live, refused)
    assert (failures(live), failed_jobs(caplog)) == before


def test_topic_that_is_deleted_while_messages_go_out_delays_no_other(live, caplog):
    """The broker creates a topic that a message is for: it gets those that are due from then on."""
    bad, good, before = live.topic(), live.topic(), failures(live)
    inbox = live.inbox(bad)
    with Producer(live.settings) as client:
        others = [client.produce(good, "x", in_=timedelta(seconds=n / 20)) for n in range(400)]
        ids = [client.produce(bad, "x", in_=timedelta(seconds=n / 10)) for n in range(200)]
    inbox.until(lambda: len(inbox.arrived) > 20, "the first")
    live.admin.delete_topics([bad])[bad].result()
    deleted_ms = now_ms()

    assert_all_came(live, good, others, LATE_MS)
    due_later = {each for each in ids if MessageId.parse(each).due_ms > deleted_ms + SEEN_MS}
    assert len(due_later) > 100
    again = live.inbox_when_there(bad)
    again.until(lambda: {each.id for each in again.arrived} >= due_later, f"{due_later} again")
    assert len({each.id for each in again.arrived}) == len(again.arrived)
    # Two sinks may each hand over some before they see that the topic is gone.
    assert failures(live) - before + failed_jobs(caplog) <= 2
