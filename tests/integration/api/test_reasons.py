"""What the API refuses, and the intake would, has one reason: a table of what is wrong in both."""

import pytest
from pyspark.sql import functions as F
from tests.support.api import NOWHERE, opened
from tests.support.golden_records import NOW_MS, headers_of, record
from tests.support.servers import RECORD

from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline.intake.query import Intake

SETTINGS = Settings(
    bootstrap=NOWHERE.bootstrap,
    max_message_bytes=2_000,
    allow={"duetime.in": {"topics": ["orders*", "duetime.*"]}},
)

#: A message of the API that can be taken, and the same as headers.
TAKEN = {"topic": "orders", "at": "2020-01-01T00:00:00Z", "id": "a"}
HEADERS = {"due-topic": "orders", "due-at-ms": "1577836800000", "due-id": "a"}

#: What makes each of them wrong; None takes a part away.
WRONG = [
    ("no-topic", {"topic": None}, {"due-topic": None}),
    ("bad-topic", {"topic": "a b"}, {"due-topic": "a b"}),
    ("bad-topic", {"topic": ".."}, {"due-topic": ".."}),
    ("bad-topic", {"topic": "x" * 250}, {"due-topic": "x" * 250}),
    ("internal-topic", {"topic": "__consumer_offsets"}, {"due-topic": "__consumer_offsets"}),
    ("internal-topic", {"topic": "duetime.in"}, {"due-topic": "duetime.in"}),
    ("internal-topic", {"topic": "orders__markers"}, {"due-topic": "orders__markers"}),
    ("not-allowed", {"topic": "invoices"}, {"due-topic": "invoices"}),
    ("not-allowed", {"cluster": "eu"}, {"due-cluster": "eu"}),
    ("bad-partition", {"partition": -1}, {"due-partition": "-1"}),
    ("bad-partition", {"partition": 1_000_000}, {"due-partition": "1000000"}),
    ("unknown-cluster", {"cluster": "a b"}, {"due-cluster": "a b"}),
    ("no-due-time", {"at": None}, {"due-at-ms": None}),
    ("two-due-times", {"in": "1s"}, {"due-in-ms": "1000"}),
    ("bad-due-time", {"at": None, "in": "-1s"}, {"due-at-ms": None, "due-in-ms": "-1"}),
    ("delay-too-long", {"at": "2200-01-01T00:00:00Z"}, {"due-at-ms": "7258118400000"}),
    ("bad-id", {"id": "a b"}, {"due-id": "a b"}),
    ("bad-id", {"id": "@a"}, {"due-id": "@a"}),
    ("bad-id", {"id": ""}, {"due-id": ""}),
    ("bad-id", {"id": "x" * 201}, {"due-id": "x" * 201}),
    ("too-large", {"value": "x" * 2_001}, {"value": "x" * 2_001}),
    ("too-large", {"headers": {"h": "x" * 2_000}}, {"h": "x" * 2_000}),
    ("bad-expiry", {"headers": {"due-expires-ms": "soon"}}, {"due-expires-ms": "soon"}),
    ("bad-expiry", {"headers": {"due-expires-ms": "-1"}}, {"due-expires-ms": "-1"}),
    (
        "bad-expiry",
        {"cron": "@daily", "headers": {"due-expires-ms": "1"}},
        {"due-cron": "@daily", "due-expires-ms": "1"},
    ),
]


def case(changed):
    own = HEADERS | changed
    value = own.pop("value", "v")
    headers = [[name, text] for name, text in own.items() if text is not None]
    return {"topic": TopicNames(SETTINGS).native, "value": value, "headers": headers}


@pytest.fixture(scope="module")
def refused(spark):
    """The reasons of the intake, in the order of the table."""
    records = [record(offset, case(changed)) for offset, (*_, changed) in enumerate(WRONG)]
    # One task: each of them would start a Python.
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    intake = Intake(SETTINGS)
    asked = intake.parse(frame).withColumn("now", F.lit(NOW_MS))
    rows = (
        asked.transform(intake.validate)
        .transform(intake.identify)
        .transform(intake.route)
        .collect()
    )
    return [dict(headers_of(row)).get("due-error", b"").decode() for row in rows]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with opened(SETTINGS, tmp_path_factory.mktemp("api")) as made:
        yield made


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda each: f"{each}-{WRONG[each][0]}")
def test_what_is_wrong_has_the_same_reason_in_the_api_and_in_the_intake(client, refused, number):
    reason, changed, _ = WRONG[number]
    message = {name: each for name, each in (TAKEN | changed).items() if each is not None}
    answer = client.post("/v1/messages", json=message)
    assert (answer.json()["reason"], refused[number]) == (reason, reason)
