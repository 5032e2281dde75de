"""Golden records: what each envelope's senders write, and what becomes of it.

The files beside this one hold them, and docs/contracts.md shows two. All go through the intake in
one job, under one clock.
"""

import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import functions as F
from tests.conftest import RECORD
from tests.snippets import of

from duetime.config import Settings
from duetime.pipeline.intake import Intake
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

NOW_MS = 1_800_000_000_000
SETTINGS = Settings(max_message_bytes=20_000)


def golden():
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for case in document.pop("case"):
            yield document | case | {"id": f"{path.stem}: {case['name']}"}


#: What docs/contracts.md shows of the contracts in JSON, in its order, and says of each.
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
    # The last one is what a callback is told.
    *blocks, _ = of("json", page="contracts.md")
    for block, said in zip(blocks, SAID, strict=True):
        yield said | {"value": block.text, "id": str(block)}


CASES = [*golden(), *shown()]


def raw(text):
    """Bytes as the files write them: text, `hex:` and digits, or nothing for null."""
    if text is None:
        return None
    return bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()


def pairs(headers):
    return [(name, raw(value[0] if value else None)) for name, *value in headers]


def value_of(case):
    value = raw(case.get("value"))
    if "value_fill" in case:
        return value.replace(b"VALUE", b"x" * case["value_fill"])
    return value and value * case.get("value_times", 1)


def record(offset, case):
    since_epoch = timedelta(milliseconds=case.get("timestamp_ms", NOW_MS))
    headers = pairs(case.get("headers", ())) or None
    stamped = datetime(1970, 1, 1, tzinfo=UTC) + since_epoch
    return (case["topic"], 0, offset, stamped, raw(case.get("key")), value_of(case), headers)


@pytest.fixture(scope="module")
def rows(spark):
    """What the sink would get, in the order of the cases."""
    records = [record(offset, case) for offset, case in enumerate(CASES)]
    # One task: each of them would start a Python.
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    intake = Intake(SETTINGS)
    asked = intake.understood(frame).withColumn("now", F.lit(NOW_MS))
    return asked.transform(intake.judged).transform(intake.routed).collect()


def headers_of(row):
    return [(one.key, None if one.value is None else bytes(one.value)) for one in row.headers]


def payload(row):
    return tuple(None if each is None else bytes(each) for each in (row.key, row.value))


def wanted_payload(case):
    if case.get("untouched"):
        return raw(case.get("key")), value_of(case)
    return raw(case.get("delivered_key")), raw(case.get("delivered_value"))


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
        ladder = SETTINGS.ladder
        waits = [ladder.wait_ms(lane) for lane in range(ladder.lanes)]
        return names.lanes, waits.index(case["lane_ms"])
    slot = SETTINGS.wheel.place(case["due_ms"], NOW_MS)
    assert slot.level == case["wheel"]
    return names.wheel(slot.level), SETTINGS.wheel.partition(slot)


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
