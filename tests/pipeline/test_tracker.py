"""Markers as Spark reads them: kmq's, byte for byte, and nothing else."""

import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.kmq.markers import END_VALUE, GIVEN_BACK, LAST_OFFSET, MarkerKey, start_value
from duetime.message import LATEST_MS
from duetime.pipeline import tracker
from duetime.pipeline.unacknowledged import ENDED
from duetime.tables import QueueSettings
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "markers.toml").read_text())

SETTINGS = Settings(queues={"jobs": QueueSettings(), "others": QueueSettings(markers="theirs")})

APPENDED_MS = 1_800_000_000_123

KEY = MarkerKey(3, 17).encoded()

START_VALUE = start_value(1_000)

#: What a key may say, and a record cannot have; -2 is Spark's word for its earliest record.
NO_OFFSETS = [-1, -2, -3, -(2**63), 2**63 - 1]


def record(key, value, *, topic="jobs__markers", partition=3, headers=()):
    appended = datetime.fromtimestamp(APPENDED_MS / 1_000, UTC)
    return topic, partition, 5, appended, key, value, list(headers)


def markers(spark, *records):
    """What is followed of them, in their order."""
    rows = spark.createDataFrame(list(records), RECORD).coalesce(1)
    return tracker._markers(rows, SETTINGS).collect()


def timeouts_ms(spark, *values):
    return [row.timeout_ms for row in markers(spark, *(record(KEY, each) for each in values))]


def test_a_key_is_kmqs(spark):
    records = [
        record(bytes.fromhex(case["bytes"]), END_VALUE, partition=case["partition"])
        for case in GOLDEN["key"]
    ]
    found = [(row.partition, row.offset) for row in markers(spark, *records)]
    # The largest number is no record's: there is none behind it.
    of_records = [case for case in GOLDEN["key"] if case["offset"] <= LAST_OFFSET]
    assert found == [(case["partition"], case["offset"]) for case in of_records]
    assert len(of_records) == len(records) - 1


def test_a_start_marker_is_kmqs(spark):
    wanted = [case["timeout_ms"] for case in GOLDEN["start"]]
    assert timeouts_ms(spark, *(bytes.fromhex(case["bytes"]) for case in GOLDEN["start"])) == wanted


def test_an_end_marker_is_kmqs_and_nothing_is_none(spark):
    values = [bytes.fromhex(case["bytes"]) for case in GOLDEN["end"] + GOLDEN["nothing"]]
    assert timeouts_ms(spark, *values, None) == [ENDED]


def test_no_timeout_is_below_0_or_beyond_what_an_id_can_say(spark):
    assert timeouts_ms(spark, start_value(-1), start_value(2**63 - 1)) == [0, LATEST_MS // 2]


def test_what_is_no_marker_is_left_out(spark):
    junk = [
        (None, END_VALUE),
        (b"", END_VALUE),
        (KEY[:-1], END_VALUE),
        (KEY + b"\x00", END_VALUE),
        (b"\xff" * 12, END_VALUE),
        # Of offsets that no record has.
        *((MarkerKey(3, offset).encoded(), START_VALUE) for offset in NO_OFFSETS),
        # Of another partition than it is in.
        (MarkerKey(4, 17).encoded(), END_VALUE),
        # A start marker without its time-out, and one with more.
        (KEY, b"\x01"),
        (KEY, start_value(1_000)[:-1]),
        (KEY, start_value(1_000) + b"\x00"),
        # Neither begun nor done.
        (KEY, b"\x02"),
        (KEY, b"\xff" + start_value(1_000)[1:]),
    ]
    assert markers(spark, *(record(key, value) for key, value in junk)) == []


def test_a_marker_is_followed_with_its_queue_its_time_and_why_it_was_given_back(spark):
    given_back = [(GIVEN_BACK, b"retry")]
    first, second = markers(
        spark,
        record(KEY, start_value(1_000), headers=given_back),
        record(KEY, END_VALUE, topic="theirs", headers=[("a", b"b")]),
    )
    assert first.asDict() == {
        "topic": "jobs",
        "partition": 3,
        "at": 5,
        "appended_ms": APPENDED_MS,
        "offset": 17,
        "timeout_ms": 1_000,
        "given_back": "retry",
    }
    assert (second.topic, second.given_back) == ("others", "")


def test_a_marker_of_a_queue_that_is_not_configured_is_left_out(spark):
    assert markers(spark, record(KEY, START_VALUE, topic="taken_out__markers")) == []


def test_what_wakes_the_tracker_is_no_marker(spark):
    wake = TopicNames(SETTINGS).wake
    assert markers(spark, record(None, b"", topic=wake), record(b"jobs", b"", topic=wake)) == []
