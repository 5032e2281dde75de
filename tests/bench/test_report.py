import pytest

from duetime.bench.reader import Arrivals
from duetime.bench.report import Second, percentile, report, timeline


def arrivals(*records):
    made = Arrivals()
    for due_ms, late_ms, message_id in records:
        made.add(due_ms, late_ms, message_id)
    return made


def test_each_message_once_and_on_time_is_flawless():
    made = report(arrivals((1_000, 0, b"a"), (2_000, 3, b"b")), sent=2)
    assert (made.sent, made.delivered, made.lost) == (2, 2, 0)
    assert made.flawless


def test_what_was_sent_and_did_not_come_is_lost():
    made = report(arrivals((1_000, 0, b"a")), sent=3)
    assert (made.delivered, made.lost) == (1, 2)
    assert not made.flawless


def test_a_second_record_of_one_message_is_a_duplicate_and_hides_no_loss():
    made = report(arrivals((1_000, 0, b"a"), (1_000, 5, b"a"), (1_000, 9, b"a")), sent=2)
    assert (made.delivered, made.duplicated, made.lost) == (1, 2, 1)
    assert not made.flawless


def test_a_message_before_its_time_is_early():
    made = report(arrivals((1_000, -1, b"a"), (1_000, 0, b"b")), sent=2)
    assert made.early == 1
    assert not made.flawless


def test_a_run_in_which_nothing_came_has_no_lateness():
    made = report(arrivals(), sent=5)
    assert (made.lost, made.p50_ms, made.p99_ms, made.p999_ms, made.max_ms) == (5, *[None] * 4)


def test_percentiles_are_values_that_so_many_do_not_exceed():
    thousand = arrivals(*((0, late_ms, b"%d" % late_ms) for late_ms in reversed(range(1, 1_001))))
    made = report(thousand, sent=1_000)
    assert (made.p50_ms, made.p99_ms, made.p999_ms, made.max_ms) == (500, 990, 999, 1_000)


@pytest.mark.parametrize(
    ("ordered", "percent", "expected"),
    [([7], 50, 7), ([7], 99.9, 7), ([1, 2], 50, 1), ([1, 2], 99, 2), ([1, 2, 3], 100, 3)],
)
def test_percentiles_of_few_values(ordered, percent, expected):
    assert percentile(ordered, percent) == expected


def test_the_timeline_counts_seconds_of_due_time_from_the_first():
    made = timeline(
        arrivals((5_999, 1, b"a"), (5_000, 3, b"b"), (7_000, 2, b"c"), (5_500, 2, b"d"))
    )
    assert made == [
        Second(second=0, messages=3, p50_ms=2, p99_ms=3, max_ms=3),
        Second(second=2, messages=1, p50_ms=2, p99_ms=2, max_ms=2),
    ]


def test_nothing_has_an_empty_timeline():
    assert timeline(arrivals()) == []
