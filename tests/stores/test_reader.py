from random import Random

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError
from duetime.message import DUE_ID, DUE_TOPIC, WAITING_HEADERS, MessageId
from duetime.stores import OffsetRange
from duetime.stores.kafka import KafkaStore
from duetime.stores.listing import Listing, Stretch
from duetime.stores.reader import WheelReader
from duetime.stores.records import RangeReader
from duetime.stores.selection import Selection
from duetime.wheel import Slot

pytestmark = pytest.mark.system

#: The same numbers in each run.
random = Random(17)  # noqa: S311 (no secret)

SECOND = 1_000
MINUTE = 60 * SECOND


@pytest.fixture
def reader(settings):
    looking = WheelReader(settings)
    yield looking
    looking.close()


def names(found):
    return [each.id.unique for each in found]


@pytest.mark.usefixtures("topics")
def test_an_empty_wheel_has_nothing_pending(reader, now_ms):
    assert reader.pending(now_ms) == []
    assert list(reader.messages(now_ms)) == []
    assert reader.find(MessageId(due_ms=now_ms + MINUTE, unique="none"), now_ms) is None


def test_a_missing_wheel_is_told_with_what_to_do(reader, now_ms):
    with pytest.raises(KafkaError, match="duetime topics"):
        reader.pending(now_ms)


def test_pending_counts_each_slot_in_order_of_time(reader, wheel, settings, now_ms):
    counts = {10 * SECOND: 3, 15 * SECOND: 1, 3 * MINUTE: 2, 40 * MINUTE: 4}
    for delay, times in counts.items():
        for _ in range(times):
            wheel.message("orders", now_ms + delay)
    pending = reader.pending(now_ms)
    assert [each.count for each in pending] == [3, 1, 2, 4]
    assert [each.slot.level for each in pending] == [0, 0, 1, 2]
    for each, delay in zip(pending, counts, strict=True):
        assert each.start_ms <= now_ms + delay < each.end_ms
        assert each.end_ms - each.start_ms == settings.wheel.width_ms(each.slot.level)


def test_what_is_settled_is_not_pending(reader, wheel, settings, now_ms):
    slots = [settings.wheel.place(now_ms + delay, now_ms) for delay in (8 * SECOND, 12 * SECOND)]
    for slot in slots:
        wheel.message("orders", settings.wheel.start_ms(slot))
    store = KafkaStore(settings)
    store.settle(store.due(slots[0]))
    assert [each.slot for each in reader.pending(now_ms)] == slots[1:]
    assert [each.slot for each in store.pending(now_ms)] == slots[1:]
    store.close()


def test_what_an_earlier_turn_of_the_ring_left_is_told_apart(reader, wheel, settings, now_ms):
    due_ms = now_ms + 10 * SECOND
    left = wheel.message("orders", due_ms)
    slot = settings.wheel.place(due_ms, now_ms)
    (before,) = reader.pending(now_ms)
    (after,) = reader.pending(due_ms + 5 * SECOND)
    assert before.slot == after.slot == slot
    assert names(reader.messages(due_ms + 5 * SECOND)) == [left.unique]
    assert reader.find(left, due_ms + 5 * SECOND).id == left


def test_messages_come_by_due_time_from_all_levels(reader, wheel, now_ms):
    later = [now_ms + random.randrange(5 * SECOND, 50 * MINUTE) for _ in range(60)]
    near = [now_ms + random.randrange(5 * SECOND, 60 * SECOND) for _ in range(60)]
    for due_ms in later + near:
        wheel.message("orders", due_ms)
    # What came in long ago waits on a higher level than what came in now.
    for due_ms in near:
        wheel.message("orders", due_ms, level=1)
    due = [each.id.due_ms for each in reader.messages(now_ms)]
    assert due == sorted(later + near + near)


def test_messages_due_at_once_come_by_name_on_whatever_level_they_wait(reader, wheel, now_ms):
    for number in random.sample(range(20), 20):
        wheel.message("orders", now_ms + MINUTE, unique=f"m{number:02}", level=number % 3)
    assert names(reader.messages(now_ms)) == [f"m{number:02}" for number in range(20)]


def test_a_range_of_time_ends_before_its_end(reader, wheel, now_ms):
    at = [now_ms + delay for delay in (10 * SECOND, 10 * SECOND + 1, MINUTE, 20 * MINUTE)]
    for due_ms in at:
        wheel.message("orders", due_ms)
    found = reader.messages(now_ms, from_ms=at[1], to_ms=at[3])
    assert [each.id.due_ms for each in found] == at[1:3]


def test_messages_of_one_topic_up_to_a_limit(reader, wheel, now_ms):
    for number in range(10):
        wheel.message(("orders", "bills")[number % 2], now_ms + MINUTE + number)
    bills = names(reader.messages(now_ms, topic="bills"))
    assert bills == ["m1", "m3", "m5", "m7", "m9"]
    assert names(reader.messages(now_ms, topic="bills", limit=2)) == bills[:2]
    assert list(reader.messages(now_ms, topic="nothing")) == []
    assert list(reader.messages(now_ms, limit=0)) == []


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_cancelled_message_is_left_out_wherever_the_cancel_waits(reader, wheel, now_ms, level):
    due_ms = now_ms + 15 * SECOND
    cancelled = wheel.message("orders", due_ms, level=1)
    kept = wheel.message("orders", due_ms, level=1)
    wheel.cancel(cancelled, level=level)
    assert names(reader.messages(now_ms)) == [kept.unique]
    assert names(reader.messages(now_ms, topic="orders")) == [kept.unique]
    assert reader.find(cancelled, now_ms).cancelled
    assert not reader.find(kept, now_ms).cancelled


def test_a_cancel_that_names_another_instant_hides_nothing(reader, wheel, now_ms):
    kept = wheel.message("orders", now_ms + MINUTE)
    wrong_ms = now_ms + 2 * MINUTE
    values = (None, None, None, str(wrong_ms), str(kept))
    wheel.foreign(wrong_ms, list(zip(WAITING_HEADERS, values, strict=True)))
    assert names(reader.messages(now_ms)) == [kept.unique]
    assert not reader.find(kept, now_ms).cancelled


def test_a_cancel_alone_is_no_message(reader, wheel, now_ms):
    nothing = MessageId(due_ms=now_ms + MINUTE, unique="nothing")
    wheel.cancel(nothing)
    assert reader.find(nothing, now_ms) is None
    assert list(reader.messages(now_ms)) == []


def test_of_duplicates_the_first_is_listed(reader, wheel, now_ms):
    for value in ("first", "second"):
        wheel.message("orders", now_ms + MINUTE, unique="same", value=value)
    wheel.message("orders", now_ms + MINUTE, unique="same", value="nearer", level=0)
    assert names(reader.messages(now_ms)) == ["same"]
    wheel.message("orders", now_ms + 2 * MINUTE, unique="same", value="another time")
    assert names(reader.messages(now_ms)) == ["same", "same"]


@pytest.mark.parametrize("delay", [10 * SECOND, 3 * MINUTE, 50 * MINUTE])
def test_a_message_is_found_on_every_level(reader, wheel, now_ms, delay):
    wheel.message("bills", now_ms + delay)
    identity = wheel.message("orders", now_ms + delay)
    found = reader.find(identity, now_ms)
    assert (found.id, found.topic, found.cancelled) == (identity, "orders", False)
    assert reader.find(MessageId(due_ms=now_ms + delay, unique="other"), now_ms) is None


def test_a_message_is_found_byte_for_byte(reader, wheel, now_ms):
    every = bytes(range(256))
    headers = [("a", every), ("a", b""), ("b", None), ("", b"nameless"), ("ü", b"1")]
    identity = wheel.message(
        "orders", now_ms + MINUTE, key=every, value=every * 10, headers=headers, partition=3
    )
    found = reader.find(identity, now_ms)
    assert (found.key, found.value, found.partition) == (every, every * 10, 3)
    assert list(found.headers) == headers
    empty = reader.find(wheel.message("orders", now_ms + MINUTE, value=b""), now_ms)
    null = reader.find(wheel.message("orders", now_ms + MINUTE), now_ms)
    assert (empty.value, null.value, null.key, list(null.headers)) == (b"", None, None, [])


def test_a_payload_is_not_in_what_is_found_as_text(reader, wheel, now_ms):
    secret = {"key": "hush", "value": "hush", "headers": {"a": "hush"}}
    identity = wheel.message("orders", now_ms + MINUTE, **secret)
    assert "hush" not in repr(reader.find(identity, now_ms))


def test_records_of_others_are_passed_over(reader, wheel, now_ms):
    address = (b"orders", None, b"1", b"1", b"no id")
    wheel.foreign(now_ms + MINUTE, None)
    wheel.foreign(now_ms + MINUTE, [(DUE_TOPIC, b"orders"), (DUE_ID, b"1")])
    wheel.foreign(now_ms + MINUTE, list(zip(WAITING_HEADERS, address, strict=True)))
    wheel.foreign(now_ms + MINUTE, [(name, b"\xff\xfe") for name in WAITING_HEADERS])
    kept = wheel.message("orders", now_ms + MINUTE)
    assert names(reader.messages(now_ms)) == [kept.unique]
    assert reader.find(kept, now_ms) is not None


def test_a_slot_larger_than_what_may_be_held_is_read_in_parts(wheel, settings, now_ms):
    start_ms = now_ms + 40 * MINUTE
    due = [start_ms + random.randrange(10) for _ in range(200)]
    sent = sorted((each, str(offset)) for offset, each in enumerate(due))
    for number, due_ms in enumerate(due):
        wheel.message("orders", due_ms, unique=str(number))
    cancelled = MessageId(due_ms=due[7], unique="7")
    wheel.cancel(cancelled)
    topic, partition = wheel._slot(start_ms, None)
    stretch = Stretch(
        slot=Slot(2, settings.wheel.number(2, start_ms)),
        start_ms=start_ms,
        end_ms=start_ms + 10,
        range=OffsetRange(topic, partition, 0, 201),
    )
    selection = Selection.of(to_ms=start_ms + 10)
    with RangeReader(settings) as reader:
        listing = Listing(
            reader=reader, stretches=[stretch], selection=selection, held_bytes=20_000
        )
        listed = names(listing)
    assert listed == [offset for _, offset in sent if offset != "7"]


def test_what_is_settled_while_it_is_read_is_passed_over(wheel, settings, now_ms):
    for _ in range(10):
        wheel.message("orders", now_ms + MINUTE)
    topic, partition = wheel._slot(now_ms + MINUTE, None)
    admin = AdminClient(librdkafka_properties(settings))
    with RangeReader(settings) as reader:
        for removed, left in ((4, 6), (10, 0)):
            for answer in admin.delete_records(
                [TopicPartition(topic, partition, removed)]
            ).values():
                answer.result()
            ranges = [OffsetRange(topic, partition, 0, 10)]
            assert len(list(reader.entries(ranges))) == left


def test_a_partition_that_grows_is_read_as_it_was(wheel, settings, now_ms):
    for _ in range(10):
        wheel.message("orders", now_ms + MINUTE)
    topic, partition = wheel._slot(now_ms + MINUTE, None)
    with RangeReader(settings) as reader:
        first, second = (OffsetRange(topic, partition, *ends) for ends in ((0, 4), (2, 7)))
        assert [each.offset for each in reader.entries([first])] == [0, 1, 2, 3]
        assert [each.offset for each in reader.entries([second])] == [2, 3, 4, 5, 6]
        assert list(reader.entries([])) == []
