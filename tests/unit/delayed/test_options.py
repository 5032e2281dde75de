from datetime import timedelta

import pytest

from duetime.delayed.group import ConsumerOptions

OPTIONS = ConsumerOptions.of({"group.id": "shop", "delayed.backoff.ms": "1000"})


def test_the_backoff_doubles_up_to_its_maximum():
    waits_ms = [OPTIONS.retry_wait_ms(attempts, None) for attempts in (1, 2, 3, 6, 7, 10_000)]
    assert waits_ms == [1_000, 2_000, 4_000, 32_000, 60_000, 60_000]


@pytest.mark.parametrize(("seconds", "wait_ms"), [(0.2, 200), (0, 0), (-5, 0), (90, 90_000)])
def test_an_explicit_delay_replaces_the_backoff(seconds, wait_ms):
    assert OPTIONS.retry_wait_ms(3, timedelta(seconds=seconds)) == wait_ms
