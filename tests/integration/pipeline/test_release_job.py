"""Release job without a broker: the rows that the sink would get for records of the wheel."""

import time
from datetime import UTC, datetime

import pytest
from tests.support.servers import RECORD

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline.delivery.relays import route_lane_records, wait_in_lane
from duetime.pipeline.delivery.rows import parsed
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.job import ReleaseJob, count_cancelled
from duetime.spark.catalyst import Observed

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
    return key, value, [*((name, values.get(name)) for name in H.SCHEDULED), *own]


def cancel(due_ms, unique="m"):
    return waiting(due_ms, unique, due_topic=None, value=None)


def frame(spark, records, *, topic="duetime.wheel.0", partition=7):
    stamped = datetime.now(UTC)
    rows = [(topic, partition, offset, stamped, *each) for offset, each in enumerate(records)]
    # One task: each of them would start a Python.
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), RECORD)


@pytest.fixture(scope="module")
def job(spark):
    """Building one takes a second."""
    return ReleaseJob(spark, SETTINGS, DeliveryLog(spark, SETTINGS))


@pytest.fixture(scope="module")
def turned(job, spark):
    """Return the rows of a release job for some records, in order."""
    return lambda *records: job.rows(frame(spark, records)).collect()


@pytest.fixture
def laned(spark):
    """Return the rows of the lanes query for records of a lane, by default the shortest."""

    def rows(*records, lane=0):
        waiting = parsed(frame(spark, records, topic=NAMES.lanes, partition=lane))
        ready = wait_in_lane(waiting, SETTINGS)
        return route_lane_records(ready, SETTINGS).collect()

    return rows


def unique_of(row):
    return {one.key: one.value for one in row.headers}["due-id"].decode()[13:]


def test_message_is_sent_with_key_value_and_headers_without_address(turned):
    record = waiting(17, key=b"\xff", value=b"\x00\xfe", own=[("a", None), ("a", b"\xff")])
    (row,) = turned(record)
    headers = [(one.key, one.value) for one in row.headers]
    assert (row.topic, row.partition, row.key, row.value) == ("orders", None, b"\xff", b"\x00\xfe")
    known = [("due-at-ms", b"17"), ("due-id", b"000000000011-m")]
    assert headers == [*known, ("a", None), ("a", b"\xff")]


def test_message_goes_to_the_partition_that_its_sender_named(turned):
    (row,) = turned(waiting(17, due_partition=b"12"))
    assert row.partition == 12


def test_first_record_of_an_id_is_sent_and_the_others_are_dropped(turned):
    rows = turned(waiting(17, value=b"first"), waiting(17, value=b"second"), waiting(17, "other"))
    assert sorted(row.value for row in rows) == [b"first", b"x"]


def test_cancelled_message_is_not_sent_whichever_came_first(turned):
    rows = turned(
        waiting(17, "a"), cancel(17, "a"), cancel(18, "b"), waiting(18, "b"), waiting(18, "c")
    )
    assert [unique_of(row) for row in rows] == ["c"]


def test_sent_job_is_over_though_cancelled_messages_cannot_be_counted(caplog):
    # What observed them is gone, as after a JVM that ended.
    count_cancelled(Observed(rows=None, node=None))
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_messages_are_sent_by_due_time_then_by_arrival(turned):
    due = [5, 3, 3, 9, 1, 3]
    rows = turned(*(waiting(each, f"m{at}", key=b"k") for at, each in enumerate(due)))
    assert [unique_of(row) for row in rows] == ["m4", "m1", "m2", "m5", "m0", "m3"]


def test_message_that_cascaded_is_sent_before_a_later_arrival(turned):
    late = waiting(17, "late", due_state=b"9")
    early = [waiting(17, f"early{each}", due_state=b"8") for each in range(2)]
    rows = turned(late, *early)
    assert [unique_of(row) for row in rows] == ["early0", "early1", "late"]


def test_no_message_is_sent_before_it_is_due(turned):
    due_ms = now_ms() + 700
    turned(waiting(due_ms))
    assert now_ms() >= due_ms


def test_message_due_later_is_routed_unchanged_to_a_nearer_slot(turned):
    due_ms = now_ms() + 60_000
    record = waiting(due_ms, due_partition=b"3", key=b"k", own=[("a", b"1")])
    (row,) = turned(record)
    slot = SETTINGS.wheel.place(due_ms, now_ms())
    assert (row.topic, row.partition) == (NAMES.wheel(0), SETTINGS.wheel.partitions_of(slot)[0])
    assert (row.key, row.value, [tuple(one) for one in row.headers]) == record


def test_cancel_due_later_is_routed_on_and_drops_its_message(turned):
    due_ms = now_ms() + 60_000
    (row,) = turned(waiting(due_ms), cancel(due_ms))
    assert row.topic == NAMES.wheel(0)
    assert [tuple(one) for one in row.headers] == cancel(due_ms)[2]


@pytest.mark.slow
@pytest.mark.parametrize("in_s", [60, 3_000, 100_000, 10_000_000, 10**9])
def test_message_and_its_cancel_are_routed_to_the_same_slot(turned, in_s):
    # They were in different chunks of a slot above.
    due_ms = now_ms() + in_s * 1_000
    (message,), (routed,) = turned(waiting(due_ms)), turned(cancel(due_ms))
    level = SETTINGS.wheel.place(due_ms, now_ms()).level
    assert message.topic == routed.topic == NAMES.wheel(level)
    assert message.partition == routed.partition
    both = [(row.key, row.value, [tuple(one) for one in row.headers]) for row in (message, routed)]
    (left,) = turned(*both)
    assert [tuple(one) for one in left.headers] == both[1][2]


@pytest.mark.slow
def test_routing_on_does_not_wait_for_messages_sent_at_their_time(turned):
    soon_ms, later_ms = now_ms() + 2_000, now_ms() + 60_000
    rows = turned(waiting(1, "past"), waiting(soon_ms, "soon"), waiting(later_ms, "later"))
    assert [unique_of(row) for row in rows] == ["later", "past", "soon"]


@pytest.mark.slow
def test_message_read_as_later_is_routed_on_even_if_near_by_its_turn(turned):
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
    (b"k", b"v", [(name, None) for name in H.SCHEDULED]),
    (b"k", b"v", [(name, b"\xff" * 20) for name in H.SCHEDULED]),
]


@pytest.mark.parametrize("kind", ["turned", "laned"])
def test_foreign_records_are_rejected_untouched_and_valid_ones_sent(kind, request):
    records = [*FOREIGN, waiting(17)]
    rows = request.getfixturevalue(kind)(*records)
    rejected = [row for row in rows if row.topic == NAMES.rejected]
    assert [row.topic for row in rows if row not in rejected] == ["orders"]
    untouched = [(row.key, row.value, [tuple(one) for one in row.headers[:-3]]) for row in rejected]
    assert untouched == [(key, value, headers or []) for key, value, headers in FOREIGN]
    assert {tuple(row.headers[-3]) for row in rejected} == {("due-error", b"malformed")}


def test_lane_holds_a_record_until_its_wait_is_over(laned):
    longest = SETTINGS.delay_lanes.lanes - 1
    (row,) = laned(waiting(now_ms() + 60_000), lane=longest)
    assert (row.topic, row.partition) == (NAMES.lanes, longest)


@pytest.mark.parametrize("lane", [0, 5])
def test_message_goes_to_no_longer_lane_when_the_clock_was_set_back(laned, lane):
    """Else a crash would lose it: recovery takes the record in the shortest lane for its latest."""
    (row,) = laned(waiting(now_ms() + 60_000), lane=lane)
    assert (row.topic, row.partition) == (NAMES.lanes, lane)


def test_lane_sends_a_message_when_it_is_due_and_never_before(laned):
    due_ms = now_ms() + 5
    (row,) = laned(waiting(due_ms))
    assert row.topic == "orders" or now_ms() < due_ms
    assert now_ms() >= due_ms


def test_cancel_in_a_lane_is_rejected(laned):
    (row,) = laned(cancel(17))
    assert row.topic == NAMES.rejected


def test_jobs_that_run_at_once_do_not_share_a_producer(job):
    """A sink waits until its producer holds no record, of any sink."""
    with job._producer() as first, job._producer() as second, job._producer() as third:
        assert len({first, second, third}) == 3
    with job._producer() as reused:
        assert reused == first
