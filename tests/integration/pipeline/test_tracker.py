"""Markers as Spark reads them: kmq's, byte for byte, and no other records."""

import tomllib
from datetime import UTC, datetime

from tests.support import GOLDEN
from tests.support.servers import RECORD

from duetime.core.messages import LATEST_MS
from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline import tracker
from duetime.pipeline.tracker import ENDED
from duetime.queue.message import END_VALUE, GIVEN_BACK, LAST_OFFSET, MarkerKey, start_value

MARKERS = tomllib.loads((GOLDEN / "markers.toml").read_text())

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
    """Return the markers among the records, in their order."""
    rows = spark.createDataFrame(list(records), RECORD).coalesce(1)
    return tracker._markers(rows, SETTINGS).collect()


def timeouts_ms(spark, *values):
    return [row.timeout_ms for row in markers(spark, *(record(KEY, each) for each in values))]


def test_a_key_is_kmqs(spark):
    records = [
        record(bytes.fromhex(case["bytes"]), END_VALUE, partition=case["partition"])
        for case in MARKERS["key"]
    ]
    found = [(row.partition, row.offset) for row in markers(spark, *records)]
    # The largest number is no record's: there is none behind it.
    of_records = [case for case in MARKERS["key"] if case["offset"] <= LAST_OFFSET]
    assert found == [(case["partition"], case["offset"]) for case in of_records]
    assert len(of_records) == len(records) - 1


def test_a_start_marker_is_kmqs(spark):
    wanted = [case["timeout_ms"] for case in MARKERS["start"]]
    assert (
        timeouts_ms(spark, *(bytes.fromhex(case["bytes"]) for case in MARKERS["start"])) == wanted
    )


def test_an_end_marker_is_kmqs_and_an_empty_value_is_no_marker(spark):
    values = [bytes.fromhex(case["bytes"]) for case in MARKERS["end"] + MARKERS["nothing"]]
    assert timeouts_ms(spark, *values, None) == [ENDED]


def test_timeouts_are_limited_to_what_fits_into_an_id(spark):
    assert timeouts_ms(spark, start_value(-1), start_value(2**63 - 1)) == [0, LATEST_MS // 2]


def test_records_that_are_no_markers_are_dropped(spark):
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


def test_a_marker_has_its_queue_its_time_and_its_cause(spark):
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


def test_a_marker_of_a_queue_that_is_not_configured_is_dropped(spark):
    assert markers(spark, record(KEY, START_VALUE, topic="taken_out__markers")) == []


def test_a_record_that_wakes_the_tracker_is_no_marker(spark):
    wake = TopicNames(SETTINGS).tracker_wakeup
    assert markers(spark, record(None, b"", topic=wake), record(b"jobs", b"", topic=wake)) == []
