"""Markers are kmq's own, byte for byte."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.kmq import markers
from duetime.kmq.markers import MarkerKey

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "markers.toml").read_text())


@pytest.mark.parametrize("case", GOLDEN["key"])
def test_a_key_is_kmqs(case):
    key, data = MarkerKey(case["partition"], case["offset"]), bytes.fromhex(case["bytes"])
    assert key.encoded() == data
    assert MarkerKey.decoded(data) == key


@pytest.mark.parametrize("case", GOLDEN["start"])
def test_a_start_marker_is_kmqs(case):
    data = bytes.fromhex(case["bytes"])
    assert markers.start_value(case["timeout_ms"]) == data
    assert markers.decoded_timeout(data) == case["timeout_ms"]


def test_an_end_marker_is_kmqs():
    assert bytes.fromhex(GOLDEN["end"][0]["bytes"]) == markers.END_VALUE


@pytest.mark.parametrize("case", GOLDEN["end"] + GOLDEN["nothing"])
def test_an_end_marker_and_nothing_have_no_timeout(case):
    assert markers.decoded_timeout(bytes.fromhex(case["bytes"])) is None


@pytest.mark.parametrize("case", GOLDEN["count"])
def test_a_count_is_kmqs(case):
    data = bytes.fromhex(case["bytes"])
    assert markers.encoded_count(case["count"]) == data
    assert markers.decoded_count(data) == case["count"]


@given(st.binary(max_size=20) | st.none())
def test_whatever_somebody_wrote_is_read_as_a_marker_or_as_none(data):
    key = MarkerKey.decoded(data)
    assert key is None or key.encoded() == data
    timeout_ms = markers.decoded_timeout(data)
    assert timeout_ms is None or markers.start_value(timeout_ms) == data
