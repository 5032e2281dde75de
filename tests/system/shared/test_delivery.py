"""Messages through the whole pipeline: sent to an intake topic, read from their destinations."""

import json
from collections import Counter
from datetime import timedelta

import pytest
from tests.support.clocks import eventually
from tests.support.live import now_ms
from tests.support.topics import TRACE

from duetime.client.status import status
from duetime.core.clock import SystemClock

ALL_BYTES = bytes(range(256))


def native(topic, **headers):
    """The headers of the native envelope."""
    named = {"due-topic": topic, **{f"due_{name}": value for name, value in headers.items()}}
    return [(name.replace("_", "-"), str(value).encode()) for name, value in named.items()]


@pytest.fixture(scope="module", autouse=True)
def far(live):
    """Messages beyond level 0, sent before all else: they come while others are tested."""
    topic, base_ms = live.topic(), now_ms() + 23_000
    due = [base_ms + 37 * each for each in range(300)]
    for number, due_ms in enumerate(due):
        headers = native(topic, at_ms=due_ms, id=f"far-{number}")
        live.send(live.names.native, str(number), f"k{number % 3}", headers)
    live.flush()
    return topic, due


@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", [0, 1, 50, 1_000, 5_000])
def test_messages_come_after_their_delay_each_once_and_never_early(live, sender, delay_ms):
    topic = live.topic()
    delay = timedelta(milliseconds=delay_ms)
    ids = {sender.produce(topic, str(each), key=f"k{each}", in_=delay) for each in range(50)}
    arrived = live.inbox(topic).take(50)
    assert {each.id for each in arrived} == ids
    assert min(each.late_ms for each in arrived) >= 0


def test_a_message_due_in_the_past_comes_at_once_with_the_time_it_was_due(live):
    topic = live.topic()
    live.send(live.names.native, "x", headers=native(topic, at_ms=17))
    (arrived,) = live.inbox(topic).take(1)
    assert arrived.by_name["due-at-ms"] == b"17"
    assert arrived.id.startswith("000000000011-@in.")


@pytest.mark.slow
def test_every_delay_up_to_level_1_at_once(live, sender):
    topic = live.topic(partitions=3)
    delays = [timedelta(milliseconds=19 * each) for each in range(700)]
    ids = Counter(sender.produce(topic, "x", key=str(each), in_=each) for each in delays)
    arrived = live.inbox(topic).take(700)
    assert Counter(each.id for each in arrived) == ids
    assert min(each.late_ms for each in arrived) >= 0


@pytest.mark.slow
def test_bytes_and_headers_stay_as_they_are_on_every_way(live):
    """At once, by the lanes, and by the wheel."""
    topic = live.topic()
    own = [
        ("all", ALL_BYTES),
        ("null", None),
        ("empty", b""),
        ("twice", b"1"),
        ("twice", b"\xff"),
        ("", b""),
        *TRACE,
    ]
    payloads = [
        (ALL_BYTES, ALL_BYTES[::-1]),
        (None, None),
        (b"", b""),
        (b"\x00", ALL_BYTES * 1_000),
    ]
    ways = [0, 300, 5_000]
    for delay_ms in ways:
        for key, value in payloads:
            live.send(live.names.native, value, key, native(topic, in_ms=delay_ms) + own)
    arrived = live.inbox(topic).take(len(ways) * len(payloads))
    found = Counter((each.key, each.value) for each in arrived)
    assert found == Counter(payloads * len(ways))
    for each in arrived:
        assert each.headers[2:] == own
        assert [name for name, _ in each.headers[:2]] == ["due-at-ms", "due-id"]


@pytest.mark.slow
def test_a_message_goes_to_the_partition_that_its_sender_names(live):
    topic = live.topic(partitions=7)
    for delay_ms in (0, 300, 5_000):
        live.send(live.names.native, "x", headers=native(topic, in_ms=delay_ms, partition=5))
    arrived = live.inbox(topic).take(3)
    assert {each.partition for each in arrived} == {5}


@pytest.mark.slow
def test_every_envelope_is_taken_in(live):
    topic, due_ms = live.topic(), now_ms() + 4_500
    document = '{"b": 1.10,  "a": [1e5, "\\u00e9"]}'
    traced = json.dumps({name: text.decode() for name, text in TRACE})
    airtel = (
        f'{{"topic": "{topic}", "key": "k", "value": {document}, "postTime": {due_ms}, '
        f'"headers": {traced}}}'
    )
    countdown = json.dumps({"topic": topic, "message": "hello", "countdown": 4.5})
    epoch = [("scheduler-epoch", str(due_ms // 1_000)), ("scheduler-target-topic", topic)]
    live.send(live.names.airtel, airtel)
    live.send(live.names.countdown, countdown, headers=[("CALLER_SERVICE", b"billing"), *TRACE])
    key = ("scheduler-target-key", "k")
    live.send(live.names.scheduler, b"\xff", "schedule", [*epoch, key, *TRACE])
    arrived = {
        each.id.partition("@")[2].partition(".")[0]: each for each in live.inbox(topic).take(3)
    }
    found = {name: (each.key, each.value) for name, each in arrived.items()}
    assert found == {
        "airtel": (b"k", document.encode()),
        "countdown": (None, b"hello"),
        "scheduler": (b"k", b"\xff"),
    }
    assert arrived["countdown"].headers[2:] == [("CALLER_SERVICE", b"billing"), *TRACE]
    for name in ("airtel", "scheduler"):
        assert arrived[name].headers[-len(TRACE) :] == list(TRACE)


@pytest.mark.slow
def test_messages_of_a_key_come_by_due_time_then_by_arrival(live):
    """Within a window; of the whole second, only 20 instants are used."""
    topic = live.topic(partitions=2)
    # All are in the wheel by then, on a busy machine as well.
    window_ms = (now_ms() // 1_000 + 20) * 1_000
    for number in range(1_000):
        due_ms = window_ms + (number * 7919 % 20) * 50
        headers = native(topic, at_ms=due_ms, id=f"m{number:04}")
        live.send(live.names.native, str(number), f"k{number % 4}", headers)
    arrived = live.inbox(topic).take(1_000)
    for key in {each.key for each in arrived}:
        ids = [each.id for each in arrived if each.key == key]
        assert ids == sorted(ids)


@pytest.mark.slow
def test_200_destinations_at_once(live, sender):
    topics = live.topics(200)
    ids = {sender.produce(topic, "x", in_=timedelta(seconds=5)) for topic in topics}
    arrived = live.inbox(*topics).take(200)
    assert {each.id for each in arrived} == ids
    assert {each.topic for each in arrived} == set(topics)
    assert min(each.late_ms for each in arrived) >= 0


@pytest.mark.slow
def test_a_message_sent_twice_under_one_id_comes_once(live):
    topic, due_ms = live.topic(), now_ms() // 1_000 * 1_000 + 7_000
    for _ in range(3):
        live.send(live.names.native, "x", headers=native(topic, at_ms=due_ms, id="order-17"))
    live.send(live.names.native, "x", headers=native(topic, at_ms=due_ms + 1, id="order-18"))
    arrived = live.inbox(topic).until_id(f"{due_ms + 1:012x}-order-18")
    assert [each.id[13:] for each in arrived] == ["order-17", "order-18"]


def test_far_messages_cascade_and_come_each_once_and_never_early(live, far):
    topic, due = far
    arrived = live.inbox(topic).take(len(due))
    assert Counter(each.value for each in arrived) == Counter(
        b"%d" % each for each in range(len(due))
    )
    assert min(each.late_ms for each in arrived) >= 0


@pytest.mark.slow
def test_a_message_that_was_left_in_a_far_slot_is_released_as_overdue(live, wheel):
    topic, due_ms = live.topic(), now_ms() + 6_000
    left = [wheel.message(topic, due_ms, level=level) for level in (1, 2)]
    past = [wheel.message(topic, due_ms - 60_000, level=level) for level in (0, 1, 2)]
    arrived = live.inbox(topic).take(5)
    assert {each.id for each in arrived} == {str(each) for each in left + past}
    assert min(each.late_ms for each in arrived) >= 0
    # The leader tells of it when it renews its lease.
    eventually(lambda: is_told(live, due_ms))


def is_told(live, due_ms):
    """Whether a release of what was overdue then is reported."""
    found = status(live.settings, SystemClock()).overdue_releases
    return any(each.from_ms <= due_ms < each.to_ms for each in found)
