"""Whatever anybody writes into any topic: no query stops, and real messages still come."""

import random
import uuid
from collections import Counter
from datetime import timedelta

import pytest
from tests.support.live import sources

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.timer_wheel import Slot

#: Seeded, so that a failure comes again.
CHANCE = random.Random(20_261_224)  # noqa: S311 (no secret)

CANCELS = H.DUE_OP, H.CANCEL.encode()

NAMES = ["due-at-ms", "due-in-ms", "due-id", "due-op", "scheduler-epoch", "", "x", "é"]
VALUES = [None, b"", b"1", b"-1", b"cancel", b"9" * 18, b"9" * 1_000, b"1e5", b"\xff\xfe"]


def garbage(count):
    """Noise under names that mean something, never with a destination."""
    for _ in range(count):
        headers = [
            (CHANCE.choice(NAMES), CHANCE.choice(VALUES)) for _ in range(CHANCE.randrange(6))
        ]
        yield CHANCE.choice([None, noise(50)]), CHANCE.choice([None, noise(500)]), headers


def noise(most):
    return CHANCE.choice(
        [CHANCE.randbytes(CHANCE.randrange(most)), b'{"topic": "t', b"null", b"[[[["]
    )


def huge():
    yield None, b"[" * 900_000, []
    yield b"k" * 400_000, b'{"value":' * 60_000, []
    yield b"k", b"v", [(str(each), b"x") for each in range(10_000)]
    # Beyond 100,000 librdkafka, with which this test reads, does not read any.
    yield b"k", b"v", [("", None)] * 90_000
    yield b"k", b" " * 950_000, [("n" * 50_000, b"")]


@pytest.fixture
def running(live):
    """The queries' runs before and after a test are the same: none was started again."""
    runs = [each.query.runId for each in live.pipeline._leader._queries._queries]
    yield
    assert [each.query.runId for each in live.pipeline._leader._queries._queries] == runs
    assert not any(each.query.exception() for each in live.pipeline._leader._queries._queries)


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_garbage_in_every_intake_topic_is_rejected_while_messages_flow(live, sender):
    topic, rejected, ids = live.topic(), live.rejected(), []
    records = [(intake, each) for intake in live.names.intake for each in [*garbage(200), *huge()]]
    CHANCE.shuffle(records)
    live.flush()
    live.sources.clear()
    for number, (intake, (key, value, headers)) in enumerate(records):
        live.send(intake, value, key, headers)
        delay = timedelta(milliseconds=number * 11 % 7_000)
        ids.append(sender.produce(topic, str(number), in_=delay))
    live.flush()
    arrived = live.inbox(topic).take(len(ids))
    assert Counter(each.id for each in arrived) == Counter(ids)
    assert min(each.late_ms for each in arrived) >= 0
    assert len(live.sources) == len(records)
    rejected.until(lambda: sources(rejected) >= live.sources, "all that was garbage")


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_foreign_records_in_the_wheel_and_in_lanes_stop_nothing(live, sender):
    topic, rejected = live.topic(), live.rejected()
    live.flush()
    live.sources.clear()
    for name, partition in inner_places(live):
        for key, value, headers in foreign():
            live.send(name, value, key, headers, partition)
    live.flush()
    ids = {sender.produce(topic, "x", in_=timedelta(milliseconds=90 * each)) for each in range(100)}
    assert {each.id for each in live.inbox(topic).take(len(ids))} == ids
    # In the wheel they are found when the time of their slot comes.
    rejected.until(lambda: sources(rejected) >= live.sources, "all that was foreign")
    told = [each for each in rejected.arrived if each.by_name["due-error-source"] in live.sources]
    assert {each.by_name["due-error"] for each in told} == {b"malformed"}


def test_topics_of_another_namespaces_pipeline_are_no_destinations(live):
    other, rejected = f"n{uuid.uuid4().hex[:8]}", live.rejected()
    control, theirs = f"{other}.control", f"{other}.orders"
    live.create([control, theirs, f"{other}.leader", f"{other}.wheel.0"])
    live.flush()
    live.sources.clear()

    live.send(
        live.names.native, b"x", b"an-id", [(H.DUE_TOPIC, control), (H.DUE_IN_MS, b"0"), CANCELS]
    )
    live.flush()
    (source,) = live.sources
    live.send(live.names.native, b"y", b"k", [(H.DUE_TOPIC, theirs), (H.DUE_IN_MS, b"0")])

    assert live.inbox(theirs).take(1)[0].value == b"y"
    rejected.until(lambda: source in sources(rejected), "what would have cancelled")
    (told,) = [each for each in rejected.arrived if each.by_name["due-error-source"] == source]
    assert told.by_name["due-error"] == b"internal-topic"


def inner_places(live):
    """Every lane, and some slots whose time comes soon."""
    wheel, names = live.settings.wheel, live.names
    soon = wheel.number(0, SystemClock().now_ms()) + 5
    slots = [(names.wheel(0), wheel.partitions_of(Slot(0, soon + each))[0]) for each in range(5)]
    return slots + [(names.lanes, lane) for lane in range(live.settings.delay_lanes.lanes)]


def foreign():
    address = [b"no topic", None, b"17", b"17", b"000000000011-x"]
    return [
        (None, None, []),
        (b"k", b"v", [("a", b"1")]),
        (b"k", b"v", [(name, b"\xff") for name in H.SCHEDULED]),
        (b"k", b"v", list(zip(H.SCHEDULED, address, strict=True))),
    ]
