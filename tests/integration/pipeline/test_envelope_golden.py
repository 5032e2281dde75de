"""Golden records: records of each envelope's senders, and the sink rows that follow from them.

The toml files in this directory hold them, and docs/envelopes.md shows two. All go through intake
in one job, under one clock.
"""

import tomllib

import pytest
from pyspark.sql import functions as F
from tests.support import GOLDEN
from tests.support.golden_records import NOW_MS, headers_of, pairs, payload, raw, record, value_of
from tests.support.servers import RECORD
from tests.support.snippets import of

from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline.intake.query import Intake

SETTINGS = Settings(max_message_bytes=20_000)


def golden():
    for path in sorted((GOLDEN / "envelopes").glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for case in document.pop("case"):
            yield document | case | {"id": f"{path.stem}: {case['name']}"}


#: The JSON records in docs/envelopes.md, in their order, with the results that it states.
SAID = [
    {
        "topic": "event_delayer_publisher",
        "to": "orders",
        "due_ms": 1_766_595_600_000,
        "delivered_key": "42",
        "delivered_value": '{"any": "JSON"}',
        "delivered": [["a", "b"], ["due-callback", "https://..."]],
    },
    {
        "topic": "duetime.in.countdown",
        "timestamp_ms": NOW_MS - 60_000,
        "to": "orders",
        "due_ms": NOW_MS - 57_500,
        "delivered_value": "any JSON",
    },
]


def shown():
    blocks = of("json", page="envelopes.md")
    for block, said in zip(blocks, SAID, strict=True):
        yield said | {"value": block.text, "id": str(block)}


CASES = [*golden(), *shown()]


@pytest.fixture(scope="module")
def rows(spark):
    """Return the sink rows, in the order of the cases."""
    records = [record(offset, case) for offset, case in enumerate(CASES)]
    # One task: each of them would start a Python.
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    intake = Intake(SETTINGS)
    asked = intake.parse(frame).withColumn("now", F.lit(NOW_MS))
    return (
        asked.transform(intake.validate)
        .transform(intake.identify)
        .transform(intake.route)
        .collect()
    )


def wanted_payload(case):
    if case.get("untouched"):
        return raw(case.get("key")), value_of(case)
    return raw(case.get("delivered_key")), raw(case.get("delivered_value"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "case"), list(enumerate(CASES)), ids=[each["id"] for each in CASES]
)
def test_golden(offset, case, rows):
    row, names = rows[offset], TopicNames(SETTINGS)
    if "refused" in case:
        assert_refused(row, case, offset)
    elif "to" in case:
        assert (row.topic, row.partition) == (case["to"], case.get("partition"))
        assert_delivered(headers_of(row), case, offset)
        assert payload(row) == wanted_payload(case)
    else:
        assert (row.topic, row.partition) == place(case, names)
        assert_waits(row, case, offset)


def place(case, names):
    if "lane_ms" in case:
        ladder = SETTINGS.delay_lanes
        waits = [ladder.wait_ms(lane) for lane in range(ladder.lanes)]
        return names.lanes, waits.index(case["lane_ms"])
    slot = SETTINGS.wheel.place(case["due_ms"], NOW_MS)
    assert slot.level == case["wheel"]
    return names.wheel(slot.level), SETTINGS.wheel.partitions_of(slot)[0]


def assert_waits(row, case, offset):
    headers = headers_of(row)
    if case.get("cancel"):
        assert headers[:2] == [("due-topic", None), ("due-partition", None)]
        assert payload(row) == (raw(case["key"]), None)
    else:
        partition = case.get("partition")
        assert headers[0][0] == "due-topic"
        assert headers[0][1]
        assert headers[1] == ("due-partition", raw(partition and str(partition)))
        assert payload(row) == wanted_payload(case)
    taken_ms = case.get("timestamp_ms", NOW_MS)
    assert headers[2] == ("due-state", f"{taken_ms}{case.get('state', '')}".encode())
    assert_delivered(headers[3:], case, offset)


def assert_delivered(headers, case, offset):
    assert headers[0] == ("due-at-ms", str(case["due_ms"]).encode())
    name, identity = headers[1]
    due, _, unique = identity.decode().partition("-")
    due_ms = case.get("first_due_ms", case["due_ms"])
    assert (name, due) == ("due-id", f"{due_ms:012x}")
    if "unique" in case:
        assert unique == case["unique"].replace("OFFSET", str(offset))
    assert headers[2:] == pairs(case.get("delivered", ()))


def assert_refused(row, case, offset):
    *headers, error, detail, source = headers_of(row)
    assert error == ("due-error", case["refused"].encode())
    assert detail[0] == "due-error-detail"
    assert detail[1]
    assert source == ("due-error-source", f"{case['topic']}/0/{offset}".encode())
    assert (row.topic, row.partition) == (TopicNames(SETTINGS).rejected, None)
    assert payload(row) == (raw(case.get("key")), value_of(case))
    assert headers == pairs(case.get("headers", ()))


def test_every_file_of_golden_records_is_an_intake_topic():
    assert {case["topic"] for case in CASES} == set(TopicNames(SETTINGS).intake)
