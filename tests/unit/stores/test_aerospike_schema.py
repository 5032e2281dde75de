"""The Aerospike store without a server: bins, lease table, addresses."""

import os

import aerospike
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core import headers as H
from duetime.core.errors import ConfigError, StoreError
from duetime.core.settings import Settings, load_settings
from duetime.stores.aerospike.schema import (
    LeasedSpan,
    LeaseTable,
    bins_from_row,
    record_from_bins,
    server_address,
    ttl_s,
)
from duetime.stores.factory import check_store
from duetime.stores.row_store import Record, Row, pack

NOW_MS = 1_800_000_000_000

#: The server's limit of a bin's name, in characters.
LONGEST_BIN = 15


def record(*, key=b"k", value=b"v", state=b"1", own=()):
    values = (b"orders", None, state, b"17", b"000000000011-m")
    return Record(3, 5, NOW_MS, key, value, [*zip(H.SCHEDULED, values, strict=True), *own])


def bins(given_record, due_ms=17):
    return bins_from_row(Row("000000000011-m", "000000000011-m", due_ms, pack(given_record)))


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
def test_bins_round_trip_a_record(given_record):
    assert record_from_bins(bins(given_record)) == given_record


def test_bins_have_the_published_names():
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


def test_leased_spans_are_not_free():
    table = LeaseTable({"w": held(10, 20, "a"), "x": held(30, 40, "b"), "y": held(15, 25, "c")})
    assert list(table.free(0, 50)) == [(0, 10), (25, 30), (40, 50)]
    assert list(table.free(10, 25)) == []
    assert list(table.free(12, 35)) == [(25, 30)]
    assert list(LeaseTable().free(0, 50)) == [(0, 50)]


def held(start_ms, end_ms, owner="a", until_ms=100):
    return LeasedSpan(start_ms=start_ms, end_ms=end_ms, owner=owner, until_ms=until_ms)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6),
    st.integers(0, 60),
    st.integers(1, 40),
)
def test_free_and_leased_times_partition_a_span(spans, start, length):
    table = LeaseTable(
        {str(number): held(at, at + size) for number, (at, size) in enumerate(spans)}
    )
    free = {ms for part in table.free(start, start + length) for ms in range(*part)}
    taken = {ms for at, size in spans for ms in range(at, at + size)}
    assert free == set(range(start, start + length)) - taken


def test_only_idle_spans_expire():
    table = LeaseTable(
        {"ended": held(0, 1, until_ms=50), "busy": held(1, 2, until_ms=50), "x": held(2, 3)}
    )
    assert table.expired(50, {"busy"}).keys() == {"ended"}


def test_a_lost_span_cannot_be_removed():
    table = LeaseTable({"a": held(0, 1, "a"), "b": held(1, 2, "b")})
    assert table.without({"a", "b"}, "a").spans.keys() == {"b"}
    assert table.held({"a", "b"}, "a").keys() == {"a"}


def test_a_lease_table_round_trips():
    table = LeaseTable({"a": held(0, 1)}, 7)
    assert LeaseTable.of(table.stored()) == table


def test_an_address_has_a_namespace_and_optional_credentials():
    settings = load_settings(store="aerospike://user:pass%20word@host:3100/delayed")
    found = server_address(settings)
    assert (found.host, found.port, found.namespace) == ("host", 3_100, "delayed")
    assert (found.user, found.password) == ("user", "pass word")
    assert "word" not in f"{found!r} {found} {settings.store!r}"
    assert server_address(load_settings(store="aerospike://host/test")).port == 3_000


@pytest.mark.parametrize("place", ["host", "host:3000/", "host:3000/a/b", "host:x/a", "/a"])
def test_an_invalid_address_is_rejected(place):
    with pytest.raises(ConfigError, match="aerospike://host:port/namespace"):
        server_address(Settings(store=f"aerospike://{place}"))


def test_an_unreachable_server_is_reported_in_one_sentence():
    with pytest.raises(StoreError, match=r"Aerospike at 127\.0\.0\.1:1/test does not answer"):
        check_store(Settings(store="aerospike://:secret@127.0.0.1:1/test"))


def test_id_and_message_have_different_digests():
    ids, cache = (
        aerospike.calc_digest("test", name, "id")
        for name in ("kafka_message_id", "kafka_message_cache")
    )
    assert ids != cache


def test_the_size_limit_respects_the_server():
    assert Settings(store="aerospike://host/test").largest_bytes == 900_000
    smaller = Settings(store="aerospike://host/test", max_message_bytes=5_000)
    assert smaller.largest_bytes == 5_000
    assert Settings().largest_bytes == Settings().max_message_bytes
