from datetime import timedelta

import pytest

from duetime.delayed.retries import Policy

POLICY = Policy(group="shop", backoff_ms=1_000, backoff_max_ms=60_000)


def test_the_wait_doubles_with_each_try_up_to_the_longest():
    waits_ms = [POLICY.wait_ms(attempts, None) for attempts in (1, 2, 3, 6, 7, 10_000)]
    assert waits_ms == [1_000, 2_000, 4_000, 32_000, 60_000, 60_000]


@pytest.mark.parametrize(("seconds", "wait_ms"), [(0.2, 200), (0, 0), (-5, 0), (90, 90_000)])
def test_who_says_when_is_heard(seconds, wait_ms):
    assert POLICY.wait_ms(3, timedelta(seconds=seconds)) == wait_ms
