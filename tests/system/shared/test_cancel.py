"""Cancelling: what is taken is certain to be heard, and what is not is told."""

from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import REGISTRY
from tests.support.clocks import eventually

from duetime.core.clock import SystemClock


def cancelled():
    return REGISTRY.get_sample_value("duetime_cancelled_messages_total")


def instant(due_ms):
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=due_ms)


@pytest.fixture
def window_ms():
    """A second that is still far enough away to be cancelled in."""
    return (SystemClock().now_ms() // 1_000 + 9) * 1_000


def ask_to_cancel(live, identity):
    live.send(live.names.control, key=identity, headers=[("due-op", b"cancel")])
    live.flush()


def answer_to_cancel(rejected, identity):
    """Why the cancel of this message was refused."""
    answers = lambda: [each for each in rejected.arrived if each.key == identity.encode()]  # noqa: E731
    rejected.until(answers, "an answer to the cancel")
    return answers()[0].by_name["due-error"]


def test_a_cancelled_message_does_not_come_and_its_neighbours_do(live, sender, window_ms):
    topic = live.topic()
    ids = [sender.produce(topic, "x", at=instant(window_ms + 10 * each)) for each in range(10)]
    for cancelled in ids[2:8:2]:
        sender.cancel(cancelled)
    arrived = live.inbox(topic).until_id(ids[-1])
    assert [each.id for each in arrived] == [*ids[:2], ids[3], ids[5], *ids[7:]]


@pytest.mark.slow
def test_what_was_left_out_is_counted_and_a_cancel_of_nothing_is_not(live, sender, window_ms):
    topic = live.topic()
    before = cancelled()
    ids = [sender.produce(topic, "x", at=instant(window_ms + each)) for each in range(3)]
    for each in (ids[0], ids[1], ids[1], f"{window_ms:012x}-nobody"):
        ask_to_cancel(live, each)
    live.inbox(topic).until_id(ids[2])
    eventually(lambda: cancelled() == before + 2, cancelled)


@pytest.mark.slow
def test_a_cancel_that_comes_before_its_message_is_heard(live, sender, window_ms):
    topic = live.topic()
    ask_to_cancel(live, f"{window_ms:012x}-order-17")
    sender.produce(topic, "x", at=instant(window_ms), id="order-17")
    witness = sender.produce(topic, "x", at=instant(window_ms + 1))
    arrived = live.inbox(topic).until_id(witness)
    assert [each.id for each in arrived] == [witness]


@pytest.mark.slow
def test_a_message_that_waits_on_a_far_level_is_cancelled_there(live, sender):
    far_ms = SystemClock().now_ms() + 24_000
    topic = live.topic()
    ids = [sender.produce(topic, "x", at=instant(far_ms + each)) for each in range(3)]
    sender.cancel(ids[1])
    arrived = live.inbox(topic).until_id(ids[2])
    assert [each.id for each in arrived] == [ids[0], ids[2]]


@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", [0, 1_000, 3_000])
def test_a_cancel_that_is_too_late_says_so_and_the_message_comes(live, sender, delay_ms):
    topic = live.topic()
    identity = sender.produce(topic, "x", in_=timedelta(milliseconds=delay_ms))
    sender.flush()
    rejected = live.rejected()
    ask_to_cancel(live, identity)
    assert answer_to_cancel(rejected, identity) == b"too-late"
    assert [each.id for each in live.inbox(topic).take(1)] == [identity]


@pytest.mark.slow
def test_a_cancel_after_its_window_is_planned_is_too_late(live, sender, window_ms):
    topic, rejected = live.topic(), live.rejected()
    inbox = live.inbox(topic)
    identity = sender.produce(topic, "x", at=instant(window_ms))
    # By now the window of the other one is planned, or is being delivered.
    inbox.until_id(sender.produce(topic, "x", at=instant(window_ms - 2_500)))
    ask_to_cancel(live, identity)
    assert answer_to_cancel(rejected, identity) == b"too-late"
    inbox.until_id(identity)


@pytest.mark.slow
def test_cancelling_twice_or_what_does_not_exist_harms_nothing(live, sender, window_ms):
    topic = live.topic()
    cancelled, witness = (
        sender.produce(topic, "x", at=instant(window_ms + each)) for each in (0, 1)
    )
    for identity in (cancelled, cancelled, f"{window_ms:012x}-never-sent"):
        ask_to_cancel(live, identity)
    arrived = live.inbox(topic).until_id(witness)
    assert [each.id for each in arrived] == [witness]
