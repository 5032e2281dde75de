"""What becomes of a record of the failed topic, without a broker."""

from datetime import UTC, datetime

import pytest
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.message import WAITING_HEADERS
from duetime.pipeline.failures import judged
from duetime.pipeline.jvm import jvm
from duetime.pipeline.progress import progress
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

SETTINGS = Settings(namespace="failing", clusters={"eu": {"bootstrap": "eu:9092"}})
NAMES = TopicNames(SETTINGS)

TOPIC = "orders"


def failed(reason, state):
    """The record of a message that waited with this state."""
    values = {"due-topic": TOPIC, "due-state": state, "due-at-ms": "17", "due-id": "000000000011-m"}
    own = [(name, values.get(name)) for name in WAITING_HEADERS]
    headers = [*own, ("a", "b"), ("due-error", reason), ("due-error-detail", "so it is")]
    as_bytes = [(name, value and value.encode()) for name, value in headers]
    return NAMES.failed, 0, 5, datetime.now(UTC), b"k", b"x", as_bytes


@pytest.fixture
def known(spark):
    """Puts into the JVM what is known of TOPIC on a cluster."""
    properties = jvm(spark).java.lang.System

    def put(cluster, said):
        properties.setProperty(f"{SETTINGS.at(cluster).namespace}.to", "unknown")
        properties.setProperty(f"{SETTINGS.at(cluster).namespace}.to.{TOPIC}", said)

    return put


@pytest.mark.parametrize("state", ["1:::::eu", "1::2000:3:1000:eu"], ids=["first", "fourth"])
def test_a_message_for_a_topic_of_another_cluster_that_has_come_to_be_goes_on_and_is_further(
    spark, known, state
):
    known("eu", "1")
    record = failed("unknown-topic", state)
    before = spark.createDataFrame(spark.sparkContext.parallelize([record], 1), RECORD)
    (row,) = judged(before, SETTINGS).collect()
    assert row.topic == NAMES.outbox("eu")
    kept = {one.key: one.value for one in row.headers}
    assert (kept["due-topic"], kept["due-at-ms"], kept["a"]) == (TOPIC.encode(), b"17", b"b")
    after = (row.topic, 0, 9, record[3], row.key, row.value, row.headers)
    places = spark.createDataFrame(spark.sparkContext.parallelize([record, after], 1), RECORD)
    (was,), (now,) = places.select(progress(SETTINGS)).collect()
    # Who recovers the outbox finds both, and takes this for where the message is.
    assert now > was


def test_where_it_is_not_there_yet_it_waits_for_a_retry(spark, known):
    known("eu", "unknown")
    record = failed("unknown-topic", "1:::::eu")
    before = spark.createDataFrame(spark.sparkContext.parallelize([record], 1), RECORD)
    (row,) = judged(before, SETTINGS.model_copy(update={"retry_backoff_ms": 600_000})).collect()
    assert row.topic.startswith(f"{SETTINGS.namespace}.wheel.")
    (attempts,) = {one.value.split(b":")[3] for one in row.headers if one.key == "due-state"}
    assert attempts == b"1"
