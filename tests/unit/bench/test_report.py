import pytest

from duetime.bench.testbed import DEFECTS, Arrival, percentiles, report, timeline_of


def arrivals(*records):
    return [Arrival(*each) for each in records]


def defects(made):
    return [made[name] for name in DEFECTS]


def test_each_message_once_and_on_time_is_flawless():
    made = report(arrivals((1_000, 0, b"a"), (2_000, 3, b"b")), sent=2)
    assert (made["sent"], made["delivered"]) == (2, 2)
    assert defects(made) == [0, 0, 0]


def test_a_message_that_did_not_arrive_is_lost():
    made = report(arrivals((1_000, 0, b"a")), sent=3)
    assert made["delivered"] == 1
    assert defects(made) == [2, 0, 0]


def test_a_duplicate_does_not_hide_a_lost_message():
    made = report(arrivals((1_000, 0, b"a"), (1_000, 5, b"a"), (1_000, 9, b"a")), sent=2)
    assert made["delivered"] == 1
    assert defects(made) == [1, 2, 0]


def test_a_message_before_its_time_is_early():
    made = report(arrivals((1_000, -1, b"a"), (1_000, 0, b"b")), sent=2)
    assert defects(made) == [0, 0, 1]


def test_a_run_without_arrivals_has_no_lateness():
    made = report(arrivals(), sent=5)
    assert made["lost"] == 5
    assert [made[f"{name}_ms"] for name in ("p50", "p99", "p999", "max")] == [None] * 4


def test_percentiles_are_nearest_rank():
    thousand = arrivals(*((0, late_ms, b"%d" % late_ms) for late_ms in reversed(range(1, 1_001))))
    made = report(thousand, sent=1_000)
    lateness = [made[f"{name}_ms"] for name in ("p50", "p99", "p999", "max")]
    assert lateness == [500, 990, 999, 1_000]


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ([7], "p50", 7),
        ([7], "p999", 7),
        ([2, 1], "p50", 1),
        ([1, 2], "p99", 2),
        ([3, 1, 2], "max", 3),
    ],
)
def test_percentiles_of_few_values(values, name, expected):
    assert percentiles(values, [name], "request_") == {f"request_{name}_ms": expected}


def test_the_timeline_counts_seconds_from_the_first_due_time():
    made = timeline_of(
        arrivals((5_999, 1, b"a"), (5_000, 3, b"b"), (7_000, 2, b"c"), (5_500, 2, b"d"))
    )
    assert made == [
        {"second": 0, "messages": 3, "p50_ms": 2, "p99_ms": 3, "max_ms": 3},
        {"second": 2, "messages": 1, "p50_ms": 2, "p99_ms": 2, "max_ms": 2},
    ]


def test_nothing_has_an_empty_timeline():
    assert timeline_of(arrivals()) == []
