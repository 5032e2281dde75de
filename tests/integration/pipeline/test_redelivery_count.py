"""The count of redeliveries, as kmq has it: Spark reads and writes the same as Python."""

import tomllib

from pyspark.sql import functions as F
from tests.support import GOLDEN

from duetime.pipeline import redelivery
from duetime.queue.message import REDELIVERY_COUNT, decoded_count

MARKERS = tomllib.loads((GOLDEN / "markers.toml").read_text())

HEADERS = "headers array<struct<key:string,value:binary>>"

#: Values of the header, and their counts.
COUNTS = [(bytes.fromhex(case["bytes"]), case["count"]) for case in MARKERS["count"]] + [
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
    """Return the count that Spark reads in each record's headers."""
    rows = spark.createDataFrame([(each,) for each in headers], HEADERS)
    found = rows.select(redelivery._count(F.col("headers")).alias("found"))
    return [row.found for row in found.collect()]


def test_a_count_is_read_alike_by_worker_and_tracker(spark):
    headers = [[("a", b"\x09"), (REDELIVERY_COUNT, data)] for data, _ in COUNTS]
    wanted = [count for _, count in COUNTS]
    assert [decoded_count(data) for data, _ in COUNTS] == wanted
    assert counted(spark, *headers) == wanted


def test_the_first_of_two_counts_is_read_as_kmq_does(spark):
    first, second = (REDELIVERY_COUNT, b"\x02"), (REDELIVERY_COUNT, b"\x07")
    empty = (REDELIVERY_COUNT, None)
    assert counted(spark, [first, second], [empty, second], [], None) == [2, 0, 0, 0]


def test_a_count_is_written_as_kmq_writes_it(spark):
    cases = MARKERS["count"]
    rows = spark.createDataFrame([(case["count"],) for case in cases], "count bigint")
    found = rows.select(redelivery._count_header().alias("header")).collect()
    wanted = [bytes.fromhex(case["bytes"]) for case in cases]
    assert [bytes(row.header.value) for row in found] == wanted
    assert {row.header.key for row in found} == {REDELIVERY_COUNT}
