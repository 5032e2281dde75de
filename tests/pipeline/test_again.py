"""The count of redeliveries, as kmq has it: what Python reads and writes, Spark does."""

import tomllib
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from duetime.kmq.markers import REDELIVERY_COUNT, decoded_count, encoded_count
from duetime.pipeline import again

pytestmark = pytest.mark.system

GOLDEN = tomllib.loads((Path(__file__).parents[1] / "golden" / "markers.toml").read_text())

HEADERS = "headers array<struct<key:string,value:binary>>"

#: Values of the header, and what they say.
COUNTS = [(bytes.fromhex(case["bytes"]), case["count"]) for case in GOLDEN["count"]] + [
    (None, 0),
    (b"", 0),
    (b"\x00", 0),
    (b"\x80", 0),
    (b"\xff", 0),
    (b"\x01\x02", 0),
    (b"\x01\x02\x03", 0),
    (b"\x7f\xff\xff\xff", 2**31 - 1),
    (b"\x80\x00\x00\x00", 0),
    (b"\xff\xff\xff\xff", 0),
    (b"\x00\x00\x00\x05 and more than eight bytes", 5),
]


def counted(spark, *headers):
    """What Spark reads of each record's headers."""
    rows = spark.createDataFrame([(each,) for each in headers], HEADERS)
    found = rows.select(again._count(F.col("headers")).alias("found"))
    return [row.found for row in found.collect()]


def test_a_count_is_read_alike_by_worker_and_tracker(spark):
    headers = [[("a", b"\x09"), (REDELIVERY_COUNT, data)] for data, _ in COUNTS]
    wanted = [count for _, count in COUNTS]
    assert [decoded_count(data) for data, _ in COUNTS] == wanted
    assert counted(spark, *headers) == wanted


def test_of_two_counts_the_first_is_meant_as_by_kmq(spark):
    first, second = (REDELIVERY_COUNT, b"\x02"), (REDELIVERY_COUNT, b"\x07")
    empty = (REDELIVERY_COUNT, None)
    assert counted(spark, [first, second], [empty, second], [], None) == [2, 0, 0, 0]


def test_a_count_is_written_as_kmq_writes_it(spark):
    cases = GOLDEN["count"]
    rows = spark.createDataFrame([(case["count"],) for case in cases], "count bigint")
    found = rows.select(again._count_header().alias("header")).collect()
    wanted = [bytes.fromhex(case["bytes"]) for case in cases]
    assert [bytes(row.header.value) for row in found] == wanted
    assert {row.header.key for row in found} == {REDELIVERY_COUNT}
    assert [encoded_count(case["count"]) for case in cases] == wanted
