"""A turn without a broker: the rows that the sink would get for records of the wheel."""

import time
from datetime import UTC, datetime

import pytest
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.message import WAITING_HEADERS, MessageId
from duetime.pipeline.lanes import looked_at_again, waited
from duetime.pipeline.planned import Observed
from duetime.pipeline.turn import Turn, count_cancelled
from duetime.pipeline.written import Written
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

SETTINGS = Settings()
NAMES = TopicNames(SETTINGS)


def now_ms():
    return time.time_ns() // 1_000_000


def waiting(due_ms, unique="m", *, key=None, value=b"x", own=(), **others):
    """(key, value, headers) of a record of the wheel; `others` are duetime's headers."""
    values = {"due-topic": b"orders", "due-at-ms": b"%d" % due_ms}
    if "due_id" not in others:
        values["due-id"] = str(MessageId(due_ms=due_ms, unique=unique)).encode()
    values |= {name.replace("_", "-"): value for name, value in others.items()}
    return key, value, [*((name, values.get(name)) for name in WAITING_HEADERS), *own]


def cancel(due_ms, unique="m"):
    return waiting(due_ms, unique, due_topic=None, value=None)


def frame(spark, records, *, topic="duetime.wheel.0", partition=7):
    stamped = datetime.now(UTC)
    rows = [(topic, partition, offset, stamped, *each) for offset, each in enumerate(records)]
    # One task: each of them would start a Python.
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), RECORD)


@pytest.fixture(scope="module")
def turned(spark):
    """What a turn makes of records: its rows, in their order. Building one takes a second."""
    turn = Turn(spark, SETTINGS, Written(spark, SETTINGS))
    return lambda *records: turn.rows(frame(spark, records)).collect()


@pytest.fixture
def laned(spark):
    """What the lanes make of records of the shortest lane."""

    def rows(*records):
        ready = waited(frame(spark, records, topic=NAMES.lanes, partition=0), SETTINGS)
        return looked_at_again(ready, SETTINGS).collect()

    return rows


def unique_of(row):
    return {one.key: one.value for one in row.headers}["due-id"].decode()[13:]


def test_a_message_is_sent_with_its_key_value_and_headers_and_without_its_address(turned):
    record = waiting(17, key=b"\xff", value=b"\x00\xfe", own=[("a", None), ("a", b"\xff")])
    (row,) = turned(record)
    headers = [(one.key, one.value) for one in row.headers]
    assert (row.topic, row.partition, row.key, row.value) == ("orders", None, b"\xff", b"\x00\xfe")
    known = [("due-at-ms", b"17"), ("due-id", b"000000000011-m")]
    assert headers == [*known, ("a", None), ("a", b"\xff")]


def test_a_message_goes_to_the_partition_that_its_sender_named(turned):
    (row,) = turned(waiting(17, due_partition=b"12"))
    assert row.partition == 12


def test_of_one_id_the_first_is_sent_and_the_others_are_dropped(turned):
    rows = turned(waiting(17, value=b"first"), waiting(17, value=b"second"), waiting(17, "other"))
    assert sorted(row.value for row in rows) == [b"first", b"x"]


def test_a_cancelled_message_is_not_sent_whichever_came_first(turned):
    rows = turned(
        waiting(17, "a"), cancel(17, "a"), cancel(18, "b"), waiting(18, "b"), waiting(18, "c")
    )
    assert [unique_of(row) for row in rows] == ["c"]


def test_a_turn_that_was_sent_is_over_though_nobody_can_say_how_many_were_cancelled(caplog):
    # What observed them is gone, as after a JVM that ended.
    count_cancelled(Observed(rows=None, node=None))
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_messages_come_out_by_due_time_and_by_arrival_where_that_is_the_same(turned):
    due = [5, 3, 3, 9, 1, 3]
    rows = turned(*(waiting(each, f"m{at}", key=b"k") for at, each in enumerate(due)))
    assert [unique_of(row) for row in rows] == ["m4", "m1", "m2", "m5", "m0", "m3"]


def test_what_came_early_and_cascaded_is_sent_before_what_came_late_and_did_not(turned):
    late = waiting(17, "late", due_state=b"9")
    early = [waiting(17, f"early{each}", due_state=b"8") for each in range(2)]
    rows = turned(late, *early)
    assert [unique_of(row) for row in rows] == ["early0", "early1", "late"]


def test_nothing_is_given_out_before_it_is_due(turned):
    due_ms = now_ms() + 700
    turned(waiting(due_ms))
    assert now_ms() >= due_ms


def test_what_is_due_later_goes_to_a_nearer_slot_with_everything_it_carries(turned):
    due_ms = now_ms() + 60_000
    record = waiting(due_ms, due_partition=b"3", key=b"k", own=[("a", b"1")])
    (row,) = turned(record)
    slot = SETTINGS.wheel.place(due_ms, now_ms())
    assert (row.topic, row.partition) == (NAMES.wheel(0), SETTINGS.wheel.partition(slot))
    assert (row.key, row.value, [tuple(one) for one in row.headers]) == record


def test_a_cancel_that_is_due_later_goes_on_and_takes_its_message_along(turned):
    due_ms = now_ms() + 60_000
    (row,) = turned(waiting(due_ms), cancel(due_ms))
    assert row.topic == NAMES.wheel(0)
    assert [tuple(one) for one in row.headers] == cancel(due_ms)[2]


@pytest.mark.parametrize("in_s", [60, 3_000, 100_000, 10_000_000, 10**9])
def test_on_every_level_a_message_and_its_cancel_go_on_to_the_same_slot_alone(turned, in_s):
    # They were in different chunks of a slot above.
    due_ms = now_ms() + in_s * 1_000
    (message,), (routed,) = turned(waiting(due_ms)), turned(cancel(due_ms))
    level = SETTINGS.wheel.place(due_ms, now_ms()).level
    assert message.topic == routed.topic == NAMES.wheel(level)
    assert message.partition == routed.partition
    both = [(row.key, row.value, [tuple(one) for one in row.headers]) for row in (message, routed)]
    (left,) = turned(*both)
    assert [tuple(one) for one in left.headers] == both[1][2]


def test_what_is_routed_on_does_not_wait_for_what_is_sent_at_its_time(turned):
    soon_ms, later_ms = now_ms() + 2_000, now_ms() + 60_000
    rows = turned(waiting(1, "past"), waiting(soon_ms, "soon"), waiting(later_ms, "later"))
    assert [unique_of(row) for row in rows] == ["later", "past", "soon"]


def test_what_a_turn_took_up_as_later_is_routed_on_even_if_it_is_near_by_then(turned):
    # Due one after another for longer than the horizon: each would be soon when its turn came.
    began_ms = now_ms()
    rows = turned(*(waiting(began_ms + 2_000 * each, f"m{each}") for each in range(30)))
    assert rows[0].topic == NAMES.wheel(0)
    assert {row.topic for row in rows} == {"orders", NAMES.wheel(0)}


FOREIGN = [
    (b"k", b"v", None),
    (None, None, None),
    (b"k", b"v", [("a", b"1")]),
    (b"k", b"v", [("due-topic", b"orders")]),
    (
        b"k",
        b"v",
        [("due-id", b"x"), ("due-at-ms", b"1"), ("due-topic", b"t"), ("due-partition", None)],
    ),
    waiting(17, due_topic=b"no topic"),
    waiting(17, due_topic=b"orders\n"),
    waiting(17, due_topic=b""),
    waiting(17, due_topic=b"\xff\xfe"),
    waiting(17, due_topic=b"t" * 250),
    waiting(17, due_partition=b"-1"),
    waiting(17, due_partition=b"9999999999"),
    waiting(17, due_partition=b"\xff"),
    waiting(-1, due_id=b"x"),
    waiting(2**60, due_id=b"x"),
    (b"k", b"v", [(name, None) for name in WAITING_HEADERS]),
    (b"k", b"v", [(name, b"\xff" * 20) for name in WAITING_HEADERS]),
]


@pytest.mark.parametrize("kind", ["turned", "laned"])
def test_foreign_records_are_rejected_untouched_and_real_ones_among_them_sent(kind, request):
    records = [*FOREIGN, waiting(17)]
    rows = request.getfixturevalue(kind)(*records)
    rejected = [row for row in rows if row.topic == NAMES.rejected]
    assert [row.topic for row in rows if row not in rejected] == ["orders"]
    untouched = [(row.key, row.value, [tuple(one) for one in row.headers[:-3]]) for row in rejected]
    assert untouched == [(key, value, headers or []) for key, value, headers in FOREIGN]
    assert {tuple(row.headers[-3]) for row in rejected} == {("due-error", b"unreadable")}


def test_a_lane_holds_a_record_until_its_wait_is_over_and_looks_again(laned):
    (row,) = laned(waiting(now_ms() + 60_000))
    assert (row.topic, row.partition) == (NAMES.lanes, SETTINGS.ladder.lanes - 1)


def test_a_lane_gives_out_a_message_when_it_is_due_and_never_before(laned):
    due_ms = now_ms() + 5
    (row,) = laned(waiting(due_ms))
    assert row.topic == "orders" or now_ms() < due_ms
    assert now_ms() >= due_ms


def test_a_cancel_has_no_business_in_a_lane(laned):
    (row,) = laned(cancel(17))
    assert row.topic == NAMES.rejected
