"""Where messages may not go: in Python and in Spark alike, and by the tables of a configuration."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyspark.sql import functions as F
from tests.support.servers import RECORD

from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import END, NAMESPACE_TOPIC, is_internal
from duetime.core.records import MessageSpec, message_record
from duetime.core.setting_types import Allowed, Cluster, DelayedTopic, QueueSettings, fits
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames, required_topics, reserved_topics
from duetime.pipeline.delivery.delivery_errors import UNKNOWN, table_name
from duetime.pipeline.intake import canonical_request
from duetime.pipeline.intake.query import Intake

EU = Cluster(bootstrap="127.0.0.1:1", probe_topic="duetime.probes")

SETTINGS = Settings(
    clusters={"eu": EU, "us": Cluster(bootstrap="127.0.0.1:2")},
    queues={"jobs": QueueSettings(), "tasks": QueueSettings(markers="tasks-at-work")},
    delayed_topics={"orders.delayed": DelayedTopic(), "off.delayed": DelayedTopic(enable=False)},
)

#: Other topics of the cluster: a namespace, and topics that only look like one.
THERE = ("staging.leader", "staging.wheel.0", "staging.retry", "team.leader", "orders.wheel.0")

NAMES = ("staging", "team", "orders", "duetime", "a", "__x", "stagingx")
ENDINGS = (
    "", ".leader", ".wheel.0", ".wheel.12", ".wheel.", ".lanes", ".retry", ".control", ".in",
    ".outbox.eu", ".schedules", ".orders", ".retry.x", "__markers", "__markers.x", ".wheel.0x",
)  # fmt: skip
FULL_NAMES = (
    "jobs",
    "jobs__markers",
    "tasks-at-work",
    "tasks__markers",
    "tasks",
    "orders.delayed",
    "off.delayed",
)
TOPICS = [*(f"{name}{ending}" for name in NAMES for ending in ENDINGS), *FULL_NAMES]


@pytest.fixture(scope="module")
def known(spark):
    """Publishes which topics the cluster has, as the pipeline does; nothing of cluster us."""
    system, published = spark._jvm.java.lang.System, []

    def publish(name, said):
        system.setProperty(name, said)
        published.append(name)

    for at in (SETTINGS, SETTINGS.at("eu")):
        publish(table_name(at), UNKNOWN)
    for topic in THERE:
        publish(f"{table_name(SETTINGS)}.{topic}", "1")
    publish(f"{table_name(SETTINGS)}.gone.leader", UNKNOWN)
    yield
    for name in published:
        system.clearProperty(name)


def internal_by_spark(spark, topics, cluster=None):
    rows = spark.createDataFrame([(each,) for each in topics], "topic string")
    found = canonical_request.is_internal(SETTINGS, F.col("topic"), F.lit(cluster).cast("string"))
    return [row.found for row in rows.coalesce(1).select(found.alias("found")).collect()]


def internal_by_python(topics, there=THERE):
    own = SETTINGS.namespace, reserved_topics(SETTINGS)
    return [is_internal(each, *own, exists=there.__contains__) for each in topics]


def test_spark_finds_the_topics_internal_that_python_does(spark, known):  # noqa: ARG001
    by_python = internal_by_python(TOPICS)

    assert internal_by_spark(spark, TOPICS) == by_python
    assert {True, False} == set(by_python)


OF_NAMESPACE = st.from_regex(NAMESPACE_TOPIC.removesuffix(END), fullmatch=True)
DRAWN = st.one_of(
    OF_NAMESPACE,
    OF_NAMESPACE.map(lambda topic: f"staging.{topic.partition('.')[2]}"),
    st.builds(
        "{}.{}".format, st.sampled_from(NAMES), st.from_regex(r"[a-z._0-9-]{1,9}", fullmatch=True)
    ),
)


#: A job each, so few.
@pytest.mark.slow
@hypothesis_settings(max_examples=10, deadline=None)
@given(st.lists(DRAWN, min_size=20))
def test_spark_finds_any_topics_internal_that_python_does(spark, known, topics):  # noqa: ARG001
    assert internal_by_spark(spark, topics) == internal_by_python(topics)


@pytest.mark.parametrize("cluster", ["eu", "us"])
def test_namespaces_are_recognised_per_cluster(spark, known, cluster):  # noqa: ARG001
    found = internal_by_spark(spark, TOPICS, cluster)

    assert found == internal_by_python(TOPICS, there=())


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("staging.retry", True),
        ("staging.control", True),
        ("staging.wheel.7", True),
        # A user's topic with such a name, and one of the namespace's users.
        ("orders.retry", False),
        ("team.control", False),
        ("staging.orders", False),
        # Another namespace's intake topics are destinations: it validates their records itself.
        ("staging.in", False),
        ("jobs__markers", True),
        ("tasks-at-work", True),
        ("others__markers", True),
        ("orders.delayed", True),
        ("off.delayed", False),
    ],
)
def test_internal_topics_are_no_destinations(topic, expected):
    assert internal_by_python([topic]) == [expected]


def test_internal_topics_of_another_namespace_are_recognised():
    other = Settings(namespace="staging", clusters=SETTINGS.clusters, store="redis://localhost")
    names = TopicNames(other)
    own = [topic.name for topic in required_topics(other) if topic.name not in names.intake]

    there = (names.leader, names.wheel(0))
    assert own
    for topic in (*own, names.control):
        assert is_internal(topic, "duetime", exists=there.__contains__), topic


LIMITED = SETTINGS.model_copy(
    update={
        "allow": {
            "duetime.in": Allowed(topics=("orders-*", "a?"), clusters=("e*",)),
            "event_delayer_publisher": Allowed(topics=()),
        }
    }
)

#: The intake topic, the destination and the cluster, and why it is refused.
CASES = [
    ("duetime.in", "orders-1", None, None),
    ("duetime.in", "orders-1", "eu", None),
    ("duetime.in", "orders-1", "us", "not-allowed"),
    ("duetime.in", "ab", None, None),
    ("duetime.in", "abc", None, "not-allowed"),
    ("duetime.in", "orders", None, "not-allowed"),
    ("duetime.in", "my-orders-1", None, "not-allowed"),
    ("duetime.in", "duetime.wheel.0", None, "internal-topic"),
    ("duetime.in", "duetime.warmup", None, None),
    ("duetime.in", "duetime.warmup", "eu", "internal-topic"),
    ("duetime.in", "duetime.probes", "eu", None),
    ("duetime.in", "duetime.probes", None, "internal-topic"),
    # What comes in by transactions is under the same table: redriven dead letters do.
    ("duetime.in.tx", "orders-1", "eu", None),
    ("duetime.in.tx", "abc", None, "not-allowed"),
    ("duetime.in.scheduler", "anything", "us", None),
    ("event_delayer_publisher", "orders-1", None, "not-allowed"),
]


def intake_record(number, topic, to, cluster):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    value = b'{"topic": "%s", "value": "v", "postTime": 1577836800000}' % to.encode()
    if topic == "event_delayer_publisher":
        return (topic, 0, number, at, None, value, [])
    named = {"due-topic": to, "due-at-ms": "1577836800000"}
    if cluster:
        named["due-cluster"] = cluster
    if topic == "duetime.in.scheduler":
        named = {"scheduler-epoch": "1577836800", "scheduler-target-topic": to}
    return (
        topic,
        0,
        number,
        at,
        b"k",
        b"v",
        [(name, text.encode()) for name, text in named.items()],
    )


def test_table_of_transactional_intake_is_in_place_of_the_other(spark):
    allow = LIMITED.allow | {"duetime.in.tx": Allowed(topics=("a*",))}
    intake = Intake(LIMITED.model_copy(update={"allow": allow}))
    records = [intake_record(n, "duetime.in.tx", to, None) for n, to in enumerate(("abc", "b"))]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    judged = frame.transform(intake.parse).transform(intake.validate)
    reasons = [row.reason for row in judged.select("error.reason").collect()]
    assert reasons == [None, "not-allowed"]


def test_intake_topic_sends_only_to_allowed_destinations(spark):
    records = [intake_record(number, *case[:3]) for number, case in enumerate(CASES)]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    intake = Intake(LIMITED)

    judged = frame.transform(intake.parse).transform(intake.validate)

    reasons = [row.reason for row in judged.select("error.reason").collect()]
    assert reasons == [expected for *_, expected in CASES]


@pytest.mark.parametrize("case", [each for each in CASES if each[0] == "duetime.in"], ids=str)
def test_client_rejects_a_destination_that_is_not_allowed(case):
    _, topic, cluster, expected = case
    wanted = MessageSpec(topic=topic, cluster=cluster)
    if topic in {"duetime.warmup", "duetime.probes"}:
        # Destinations of synthetic messages, which no client may send to.
        expected = Reason.INTERNAL_TOPIC
    found = None
    try:
        message_record(wanted, LIMITED, due_ms=2, now_ms=1, unique="a")
    except InvalidMessage as error:
        found = error.reason

    assert found == expected


@pytest.mark.parametrize("topic", ["orders-1", "any"])
def test_without_a_table_everything_is_allowed(topic):
    assert message_record(
        MessageSpec(topic=topic, cluster="us"), SETTINGS, due_ms=2, now_ms=1, unique="a"
    )


@pytest.mark.parametrize(
    "patterns", [(), ("*",), ("a.b",), ("a*", "?b"), ("orders-*-eu", "x"), ("..",)]
)
def test_spark_reads_patterns_as_python_does(spark, patterns):
    names = [
        "a",
        "ab",
        "a.b",
        "axb",
        "b",
        "orders-1-eu",
        "orders--eu",
        "orders-1-eux",
        "x",
        "..",
        "xx",
    ]
    rows = spark.createDataFrame([(each,) for each in names], "name string").coalesce(1)

    found = [
        row[0] for row in rows.select(canonical_request.fits(F.col("name"), patterns)).collect()
    ]

    assert found == [fits(each, patterns) for each in names]


def test_allow_table_of_an_unknown_intake_topic_is_an_error():
    with pytest.raises(ValueError, match=r"allow names duetime\.inn, which is no intake topic"):
        Settings(allow={"duetime.inn": {"topics": ["*"]}})
    with pytest.raises(ValueError, match="topics"):
        Settings(allow={"duetime.in": {}})
    with pytest.raises(ValueError, match="pattern"):
        Settings(allow={"duetime.in": {"topics": ["a[b]"]}})
