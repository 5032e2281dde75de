"""Markers have kmq's bytes."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import GOLDEN

from duetime.queue import message
from duetime.queue.message import MarkerKey

MARKERS = tomllib.loads((GOLDEN / "markers.toml").read_text())


@pytest.mark.parametrize("case", MARKERS["key"])
def test_a_marker_key_has_kmqs_bytes(case):
    key, data = MarkerKey(case["partition"], case["offset"]), bytes.fromhex(case["bytes"])
    assert key.encoded() == data
    assert MarkerKey.decoded(data) == key


@pytest.mark.parametrize("case", MARKERS["start"])
def test_a_start_marker_has_kmqs_bytes(case):
    data = bytes.fromhex(case["bytes"])
    assert message.start_value(case["timeout_ms"]) == data
    assert message.decoded_timeout(data) == case["timeout_ms"]


def test_an_end_marker_has_kmqs_bytes():
    assert bytes.fromhex(MARKERS["end"][0]["bytes"]) == message.END_VALUE


@pytest.mark.parametrize("case", MARKERS["end"] + MARKERS["nothing"])
def test_only_a_start_marker_has_a_timeout(case):
    assert message.decoded_timeout(bytes.fromhex(case["bytes"])) is None


@pytest.mark.parametrize("case", MARKERS["count"])
def test_a_redelivery_count_has_kmqs_bytes(case):
    data = bytes.fromhex(case["bytes"])
    assert message.decoded_count(data) == case["count"]


@given(st.binary(max_size=20) | st.none())
def test_any_bytes_are_a_marker_or_none(data):
    key = MarkerKey.decoded(data)
    assert key is None or key.encoded() == data
    timeout_ms = message.decoded_timeout(data)
    assert timeout_ms is None or message.start_value(timeout_ms) == data
