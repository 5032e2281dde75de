"""Aerospike as a store, as far as it goes without a server: fields, leases, addresses."""

import os

import aerospike
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.config import Settings, load_settings
from duetime.errors import ConfigError, StoreError
from duetime.message import WAITING_HEADERS
from duetime.stores.aerospike.connect import address
from duetime.stores.aerospike.fields import bins_of, record_of, ttl_s
from duetime.stores.aerospike.leases import Ledger, Span
from duetime.stores.opening import check_store
from duetime.stores.rows import Record, Row, packed

NOW_MS = 1_800_000_000_000

#: Of a bin's name, in characters. Source: the server's limit.
LONGEST_BIN = 15


def record(*, key=b"k", value=b"v", state=b"1", own=()):
    values = (b"orders", None, state, b"17", b"000000000011-m")
    return Record(3, 5, NOW_MS, key, value, [*zip(WAITING_HEADERS, values, strict=True), *own])


def bins(given_record, due_ms=17):
    return bins_of(Row("000000000011-m", "000000000011-m", due_ms, packed(given_record)))


@pytest.mark.parametrize(
    "given_record",
    [
        record(),
        record(key=None, value=None),
        record(key=b"", value=b""),
        record(key=b"\xff\x00", value=os.urandom(1_000), own=[("a", None), ("a", b"\xff")]),
        Record(-1, -1, 0, b"foreign", None, []),
    ],
)
def test_a_record_comes_back_from_its_bins_as_it_was(given_record):
    assert record_of(bins(given_record)) == given_record


def test_the_bins_have_the_published_names_where_the_server_takes_them():
    callback = ("due-callback", b"https://example.com/failed")
    found = bins(record(own=[callback], state=b"1::9:4:8"), due_ms=NOW_MS)
    assert max(len(name) for name in found) <= LONGEST_BIN
    named = {name: found[name] for name in ("id", "topic", "postTime", "failureUrl", "tries")}
    assert named == {
        "id": "000000000011-m",
        "topic": "orders",
        "postTime": NOW_MS,
        "failureUrl": "https://example.com/failed",
        "tries": 4,
    }


def test_an_id_never_expires_before_its_message_is_due():
    assert [ttl_s(NOW_MS + ms, NOW_MS) for ms in (-1, 0, 1, 1_000, 1_001)] == [1, 1, 1, 1, 2]
    # The server refuses more than 10 years.
    assert ttl_s(2**48, 0) == 315_360_000


def test_a_stretch_that_somebody_holds_is_left_out():
    ledger = Ledger({"w": held(10, 20, "a"), "x": held(30, 40, "b"), "y": held(15, 25, "c")})
    assert list(ledger.free(0, 50)) == [(0, 10), (25, 30), (40, 50)]
    assert list(ledger.free(10, 25)) == []
    assert list(ledger.free(12, 35)) == [(25, 30)]
    assert list(Ledger().free(0, 50)) == [(0, 50)]


def held(start_ms, end_ms, owner="a", until_ms=100):
    return Span(start_ms=start_ms, end_ms=end_ms, owner=owner, until_ms=until_ms)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6),
    st.integers(0, 60),
    st.integers(1, 40),
)
def test_what_is_free_and_what_is_held_are_all_of_a_stretch_and_never_both(spans, start, length):
    ledger = Ledger({str(number): held(at, at + size) for number, (at, size) in enumerate(spans)})
    free = {ms for part in ledger.free(start, start + length) for ms in range(*part)}
    taken = {ms for at, size in spans for ms in range(at, at + size)}
    assert free == set(range(start, start + length)) - taken


def test_a_span_is_taken_over_when_its_lease_has_ended_unless_it_is_worked_on():
    ledger = Ledger(
        {"ended": held(0, 1, until_ms=50), "busy": held(1, 2, until_ms=50), "x": held(2, 3)}
    )
    assert ledger.ended(50, {"busy"}).keys() == {"ended"}


def test_who_lost_a_span_cannot_let_go_of_it():
    ledger = Ledger({"a": held(0, 1, "a"), "b": held(1, 2, "b")})
    assert ledger.without({"a", "b"}, "a").spans.keys() == {"b"}
    assert ledger.held({"a", "b"}, "a").keys() == {"a"}


def test_a_ledger_is_stored_as_plain_values_and_read_again():
    ledger = Ledger({"a": held(0, 1)}, 7)
    assert Ledger.of(ledger.stored()) == ledger


def test_an_address_has_a_namespace_and_perhaps_a_user():
    settings = load_settings(store="aerospike://user:pass%20word@host:3100/delayed")
    found = address(settings)
    assert (found.host, found.port, found.namespace) == ("host", 3_100, "delayed")
    assert (found.user, found.password) == ("user", "pass word")
    assert "word" not in f"{found!r} {found} {settings.store!r}"
    assert address(load_settings(store="aerospike://host/test")).port == 3_000


@pytest.mark.parametrize("place", ["host", "host:3000/", "host:3000/a/b", "host:x/a", "/a"])
def test_an_address_that_is_none_is_refused(place):
    with pytest.raises(ConfigError, match="aerospike://host:port/namespace"):
        address(Settings(store=f"aerospike://{place}"))


def test_where_nobody_answers_one_sentence_says_so():
    with pytest.raises(StoreError, match=r"Aerospike at 127\.0\.0\.1:1/test does not answer"):
        check_store(Settings(store="aerospike://:secret@127.0.0.1:1/test"))


def test_the_digest_that_a_notice_has_is_the_ids_and_not_the_messages():
    ids, cache = (
        aerospike.calc_digest("test", name, "id")
        for name in ("kafka_message_id", "kafka_message_cache")
    )
    assert ids != cache


def test_a_message_that_the_server_would_refuse_is_too_large_already_at_the_intake():
    assert Settings(store="aerospike://host/test").largest_bytes == 900_000
    smaller = Settings(store="aerospike://host/test", max_message_bytes=5_000)
    assert smaller.largest_bytes == 5_000
    assert Settings().largest_bytes == Settings().max_message_bytes
