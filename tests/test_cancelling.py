"""A cancel's definite answer for what waits for a retry; the clock stands where a test wants it."""

import pytest
from confluent_kafka import Producer
from tests.conftest import SetClock

from duetime.cancelling import MARGIN_MS, cancel_surely, closes_ms
from duetime.connection import librdkafka_properties
from duetime.errors import TooLate
from duetime.failed import last_failure
from duetime.message import WAITING_HEADERS, MessageId
from duetime.topics import TopicNames

pytestmark = pytest.mark.system


@pytest.fixture
def settings(settings):
    """Under which the first retry is far enough away to be cancelled."""
    return settings.model_copy(update={"retry_backoff_ms": 20_000})


@pytest.fixture
def failed(settings, wheel, now_ms):
    """A message that has failed once and waits for its retry; and when that is."""
    identity = MessageId(due_ms=now_ms - 1_000, unique="failed")
    values = ("orders", None, str(now_ms), str(identity.due_ms), str(identity))
    producer = Producer(librdkafka_properties(settings))
    headers = list(zip(WAITING_HEADERS, values, strict=True))
    producer.produce(TopicNames(settings).failed, b"v", headers=headers)
    assert producer.flush(30) == 0
    retry_ms = last_failure(identity, settings, now_ms).retry_ms
    state = f"{now_ms}::{retry_ms}:1:{now_ms}"
    waits = ("orders", None, state, str(identity.due_ms), str(identity))
    wheel.foreign(retry_ms, list(zip(WAITING_HEADERS, waits, strict=True)))
    return identity, retry_ms


@pytest.fixture
def cancelled(wheel, failed):
    """The same, cancelled."""
    identity, retry_ms = failed
    values = (None, None, None, str(retry_ms), str(identity))
    wheel.foreign(retry_ms, list(zip(WAITING_HEADERS, values, strict=True)))
    return failed


def test_a_retry_that_is_cancelled_is_so_until_its_window_is_planned(settings, cancelled):
    identity, retry_ms = cancelled
    last_ms = closes_ms(retry_ms, settings) - MARGIN_MS
    for clock_ms in (retry_ms - 8_000, retry_ms - settings.horizon_ms + 1, last_ms - 1):
        cancel_surely(identity, settings, SetClock(clock_ms))
    with pytest.raises(TooLate, match="tried again just now"):
        cancel_surely(identity, settings, SetClock(last_ms))


def test_a_retry_that_is_near_is_too_late_to_cancel(settings, failed):
    identity, retry_ms = failed
    with pytest.raises(TooLate, match="tried again just now"):
        cancel_surely(identity, settings, SetClock(retry_ms - settings.horizon_ms + 1))
