from random import Random

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from duetime.core import headers as H
from duetime.core.errors import KafkaError
from duetime.core.messages import MessageId, SortKey
from duetime.core.timer_wheel import Slot
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange
from duetime.kafka.range_reader import RangeReader
from duetime.stores import MessageFilter
from duetime.stores.wheel_reader import Listing, SlotRange
from duetime.stores.wheel_store import KafkaStore

#: The same numbers in each run.
random = Random(17)  # noqa: S311 (no secret)

SECOND = 1_000
MINUTE = 60 * SECOND


def names(found):
    return [each.id.unique for each in found]


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_an_empty_wheel_has_nothing_pending(wheel_reader, now_ms):
    assert wheel_reader.pending(now_ms) == []
    assert list(wheel_reader.messages(now_ms)) == []
    assert wheel_reader.find(MessageId(due_ms=now_ms + MINUTE, unique="none"), now_ms) is None


def test_a_missing_wheel_raises_with_advice(wheel_reader, now_ms):
    with pytest.raises(KafkaError, match="duetime topics"):
        wheel_reader.pending(now_ms)


def test_pending_counts_each_slot_in_order_of_time(wheel_reader, wheel, settings, now_ms):
    counts = {10 * SECOND: 3, 15 * SECOND: 1, 3 * MINUTE: 2, 40 * MINUTE: 4}
    for delay, times in counts.items():
        for _ in range(times):
            wheel.message("orders", now_ms + delay)
    pending = wheel_reader.pending(now_ms)
    assert [each.count for each in pending] == [3, 1, 2, 4]
    assert [each.slot.level for each in pending] == [0, 0, 1, 2]
    for each, delay in zip(pending, counts, strict=True):
        assert each.start_ms <= now_ms + delay < each.end_ms
        assert each.end_ms - each.start_ms == settings.wheel.width_ms(each.slot.level)


def test_a_settled_slot_is_not_pending(wheel_reader, wheel, settings, now_ms):
    slots = [settings.wheel.place(now_ms + delay, now_ms) for delay in (8 * SECOND, 12 * SECOND)]
    for slot in slots:
        wheel.message("orders", settings.wheel.start_ms(slot))
    store = KafkaStore(settings)
    store.settle(store.acquire(slots[0]))
    assert [each.slot for each in wheel_reader.pending(now_ms)] == slots[1:]
    store.close()


def test_records_of_an_earlier_turn_are_told_apart(wheel_reader, wheel, settings, now_ms):
    due_ms = now_ms + 10 * SECOND
    left = wheel.message("orders", due_ms)
    slot = settings.wheel.place(due_ms, now_ms)
    (before,) = wheel_reader.pending(now_ms)
    (after,) = wheel_reader.pending(due_ms + 5 * SECOND)
    assert before.slot == after.slot == slot
    assert names(wheel_reader.messages(due_ms + 5 * SECOND)) == [left.unique]
    assert wheel_reader.find(left, due_ms + 5 * SECOND).id == left


@pytest.mark.slow
def test_messages_of_all_levels_are_listed_by_due_time(wheel_reader, wheel, now_ms):
    later = [now_ms + random.randrange(5 * SECOND, 50 * MINUTE) for _ in range(60)]
    near = [now_ms + random.randrange(5 * SECOND, 60 * SECOND) for _ in range(60)]
    for due_ms in later + near:
        wheel.message("orders", due_ms)
    # A message scheduled long ago waits on a higher level than one scheduled now.
    for due_ms in near:
        wheel.message("orders", due_ms, level=1)
    due = [each.id.due_ms for each in wheel_reader.messages(now_ms)]
    assert due == sorted(later + near + near)


def test_messages_due_at_once_are_listed_by_name(wheel_reader, wheel, now_ms):
    for number in random.sample(range(20), 20):
        wheel.message("orders", now_ms + MINUTE, unique=f"m{number:02}", level=number % 3)
    assert names(wheel_reader.messages(now_ms)) == [f"m{number:02}" for number in range(20)]


def test_a_time_range_excludes_its_end(wheel_reader, wheel, now_ms):
    at = [now_ms + delay for delay in (10 * SECOND, 10 * SECOND + 1, MINUTE, 20 * MINUTE)]
    for due_ms in at:
        wheel.message("orders", due_ms)
    found = wheel_reader.messages(now_ms, from_ms=at[1], to_ms=at[3])
    assert [each.id.due_ms for each in found] == at[1:3]


def test_messages_are_filtered_by_topic_and_limited(wheel_reader, wheel, now_ms):
    for number in range(10):
        wheel.message(("orders", "bills")[number % 2], now_ms + MINUTE + number)
    bills = names(wheel_reader.messages(now_ms, topic="bills"))
    assert bills == ["m1", "m3", "m5", "m7", "m9"]
    assert names(wheel_reader.messages(now_ms, topic="bills", limit=2)) == bills[:2]
    assert list(wheel_reader.messages(now_ms, topic="nothing")) == []
    assert list(wheel_reader.messages(now_ms, limit=0)) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_cancelled_message_is_not_listed_on_any_level(wheel_reader, wheel, now_ms, level):
    due_ms = now_ms + 15 * SECOND
    cancelled = wheel.message("orders", due_ms, level=1)
    kept = wheel.message("orders", due_ms, level=1)
    wheel.cancel(cancelled, level=level)
    assert names(wheel_reader.messages(now_ms)) == [kept.unique]
    assert names(wheel_reader.messages(now_ms, topic="orders")) == [kept.unique]
    assert wheel_reader.find(cancelled, now_ms).cancelled
    assert not wheel_reader.find(kept, now_ms).cancelled


def test_a_cancel_for_another_due_time_hides_nothing(wheel_reader, wheel, now_ms):
    kept = wheel.message("orders", now_ms + MINUTE)
    wrong_ms = now_ms + 2 * MINUTE
    values = (None, None, None, str(wrong_ms), str(kept))
    wheel.foreign(wrong_ms, list(zip(H.SCHEDULED, values, strict=True)))
    assert names(wheel_reader.messages(now_ms)) == [kept.unique]
    assert not wheel_reader.find(kept, now_ms).cancelled


def test_a_cancel_alone_is_not_listed(wheel_reader, wheel, now_ms):
    nothing = MessageId(due_ms=now_ms + MINUTE, unique="nothing")
    wheel.cancel(nothing)
    assert wheel_reader.find(nothing, now_ms) is None
    assert list(wheel_reader.messages(now_ms)) == []


@pytest.mark.slow
def test_the_first_of_duplicates_is_listed(wheel_reader, wheel, now_ms):
    for value in ("first", "second"):
        wheel.message("orders", now_ms + MINUTE, unique="same", value=value)
    wheel.message("orders", now_ms + MINUTE, unique="same", value="nearer", level=0)
    assert names(wheel_reader.messages(now_ms)) == ["same"]
    wheel.message("orders", now_ms + 2 * MINUTE, unique="same", value="another time")
    assert names(wheel_reader.messages(now_ms)) == ["same", "same"]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [10 * SECOND, 3 * MINUTE, 50 * MINUTE])
def test_a_message_is_found_on_every_level(wheel_reader, wheel, now_ms, delay):
    wheel.message("bills", now_ms + delay)
    identity = wheel.message("orders", now_ms + delay)
    found = wheel_reader.find(identity, now_ms)
    assert (found.id, found.topic, found.cancelled) == (identity, "orders", False)
    assert wheel_reader.find(MessageId(due_ms=now_ms + delay, unique="other"), now_ms) is None


def test_a_found_message_has_the_same_bytes(wheel_reader, wheel, now_ms):
    every = bytes(range(256))
    headers = [("a", every), ("a", b""), ("b", None), ("", b"nameless"), ("ü", b"1")]
    identity = wheel.message(
        "orders", now_ms + MINUTE, key=every, value=every * 10, headers=headers, partition=3
    )
    found = wheel_reader.find(identity, now_ms)
    assert (found.key, found.value, found.partition) == (every, every * 10, 3)
    assert list(found.headers) == headers
    empty = wheel_reader.find(wheel.message("orders", now_ms + MINUTE, value=b""), now_ms)
    null = wheel_reader.find(wheel.message("orders", now_ms + MINUTE), now_ms)
    assert (empty.value, null.value, null.key, list(null.headers)) == (b"", None, None, [])


def test_the_text_of_a_message_hides_its_payload(wheel_reader, wheel, now_ms):
    secret = {"key": "hush", "value": "hush", "headers": {"a": "hush"}}
    identity = wheel.message("orders", now_ms + MINUTE, **secret)
    assert "hush" not in repr(wheel_reader.find(identity, now_ms))


def test_foreign_records_are_skipped(wheel_reader, wheel, now_ms):
    address = (b"orders", None, b"1", b"1", b"no id")
    wheel.foreign(now_ms + MINUTE, None)
    wheel.foreign(now_ms + MINUTE, [(H.DUE_TOPIC, b"orders"), (H.DUE_ID, b"1")])
    wheel.foreign(now_ms + MINUTE, list(zip(H.SCHEDULED, address, strict=True)))
    wheel.foreign(now_ms + MINUTE, [(name, b"\xff\xfe") for name in H.SCHEDULED])
    kept = wheel.message("orders", now_ms + MINUTE)
    assert names(wheel_reader.messages(now_ms)) == [kept.unique]
    assert wheel_reader.find(kept, now_ms) is not None


def test_a_large_slot_is_read_in_parts(wheel, settings, now_ms):
    start_ms = now_ms + 40 * MINUTE
    due = [start_ms + random.randrange(10) for _ in range(200)]
    sent = sorted((each, str(offset)) for offset, each in enumerate(due))
    for number, due_ms in enumerate(due):
        wheel.message("orders", due_ms, unique=str(number))
    cancelled = MessageId(due_ms=due[7], unique="7")
    wheel.cancel(cancelled)
    topic, partition = wheel.partition(start_ms)
    slot_range = SlotRange(
        slot=Slot(2, settings.wheel.number(2, start_ms)),
        start_ms=start_ms,
        end_ms=start_ms + 10,
        range=OffsetRange(topic, partition, 0, 201),
    )
    message_filter = MessageFilter(after=SortKey(0, ""), to_ms=start_ms + 10)
    with RangeReader(settings) as reader:
        listing = Listing(
            reader=reader,
            slot_ranges=[slot_range],
            message_filter=message_filter,
            max_held_bytes=20_000,
        )
        listed = names(listing)
    assert listed == [offset for _, offset in sent if offset != "7"]


@pytest.mark.slow
def test_records_deleted_during_a_read_are_skipped(wheel, settings, now_ms):
    for _ in range(10):
        wheel.message("orders", now_ms + MINUTE)
    topic, partition = wheel.partition(now_ms + MINUTE)
    admin = AdminClient(librdkafka_properties(settings))
    with RangeReader(settings) as reader:
        for removed, left in ((4, 6), (10, 0)):
            for answer in admin.delete_records(
                [TopicPartition(topic, partition, removed)]
            ).values():
                answer.result()
            ranges = [OffsetRange(topic, partition, 0, 10)]
            assert len(list(reader.entries(ranges))) == left


def test_records_appended_during_a_read_are_not_read(wheel, settings, now_ms):
    for _ in range(10):
        wheel.message("orders", now_ms + MINUTE)
    topic, partition = wheel.partition(now_ms + MINUTE)
    with RangeReader(settings) as reader:
        first, second = (OffsetRange(topic, partition, *ends) for ends in ((0, 4), (2, 7)))
        assert [each.offset for each in reader.entries([first])] == [0, 1, 2, 3]
        assert [each.offset for each in reader.entries([second])] == [2, 3, 4, 5, 6]
        assert list(reader.entries([])) == []
