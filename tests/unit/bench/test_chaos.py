"""Recoveries, as the crash benchmark counts them."""

from duetime.bench.chaos import recoveries


def test_a_life_without_arrivals_counts_to_the_next_recovery():
    waits = [(9.0, True), (5.0, False), (6.0, False), (2.0, True), (3.0, True), (4.0, False)]
    assert list(recoveries(waits)) == [9.0, 13.0, 3.0]
