"""Pages of what waits, without a broker but for what a token must not learn."""

import time
import tracemalloc

import pytest

from duetime.api.errors import RequestTimedOut, of_error
from duetime.api.routes.messages import in_time, page_of
from duetime.core.errors import InvalidMessage
from duetime.core.messages import MessageId, PendingMessage, Retry, SortKey


def found(unique, value=None, *, due_ms=17, retry=None):
    return PendingMessage(
        id=MessageId(due_ms=due_ms, unique=unique),
        topic="orders",
        partition=None,
        cluster=None,
        expires_ms=None,
        key=None,
        value=value,
        headers=(),
        cancelled=False,
        retry=retry,
    )


def test_a_page_of_large_messages_holds_none_of_their_payloads():
    many = (found(f"m{each}", bytes(1_000_000)) for each in range(200))
    tracemalloc.start()
    page = page_of(many, lambda _: True, 1_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [each.value_bytes for each in page.messages] == [1_000_000] * 200
    assert peak < 20_000_000


def test_a_cursor_tells_a_retry_from_a_message_that_is_due_then():
    same_ms = [found("a", due_ms=1_000), found("a", due_ms=5, retry=Retry(1_000, 3, 6))]
    first, second = (page_of(iter([each, each]), lambda _: True, 1).cursor for each in same_ms)
    assert first != second
    assert {SortKey.parse(each).due_ms for each in (first, second)} == {1_000}


@pytest.mark.parametrize(
    "text", ["", "a", "0000000003e8-a/", "0000000003e8-a/x", f"1-a/{2**48}", "1-a/" + "1" * 5_000]
)
def test_a_cursor_that_is_none_is_refused(text):
    with pytest.raises(InvalidMessage):
        SortKey.parse(text)


def test_what_waits_is_read_no_longer_than_somebody_waits_for_it(monkeypatch):
    allows = in_time(lambda topic: topic == "orders", 30)
    assert allows("orders")
    assert not allows("invoices")
    late_s = time.monotonic() + 31
    monkeypatch.setattr("time.monotonic", lambda: late_s)
    with pytest.raises(RequestTimedOut) as given_up:
        allows("orders")
    # As whoever asked was told already: it is no error of duetime's own, and not logged.
    assert of_error(given_up.value).status_code == 503
