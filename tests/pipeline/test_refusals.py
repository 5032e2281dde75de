"""Where messages may not go: in Python and in Spark alike, and by the tables of a configuration."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyspark.sql import functions as F
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.errors import InvalidMessage, Reason
from duetime.message import END, NAMESPACE_TOPIC, is_internal
from duetime.outgoing import Wanted, scheduled
from duetime.pipeline import refusals
from duetime.pipeline.intake import Intake
from duetime.pipeline.obstacles import UNKNOWN, table_name
from duetime.required import required_topics
from duetime.tables import Allowed, Cluster, QueueSettings, fits
from duetime.topics import TopicNames, markers

pytestmark = pytest.mark.system

EU = Cluster(bootstrap="127.0.0.1:1", probe_topic="duetime.probes")

SETTINGS = Settings(
    clusters={"eu": EU, "us": Cluster(bootstrap="127.0.0.1:2")},
    queues={"jobs": QueueSettings(), "tasks": QueueSettings(markers="tasks-at-work")},
)

#: What the cluster has besides: a namespace, and topics that only look like one.
THERE = ("staging.leader", "staging.wheel.0", "staging.failed", "team.leader", "orders.wheel.0")

NAMES = ("staging", "team", "orders", "duetime", "a", "__x", "stagingx")
ENDINGS = (
    "", ".leader", ".wheel.0", ".wheel.12", ".wheel.", ".lanes", ".failed", ".control", ".in",
    ".outbox.eu", ".series", ".orders", ".failed.x", "__markers", "__markers.x", ".wheel.0x",
)  # fmt: skip
FULL_NAMES = ("jobs", "jobs__markers", "tasks-at-work", "tasks__markers", "tasks", "orders.delayed")
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
    found = refusals.is_internal(SETTINGS, F.col("topic"), F.lit(cluster).cast("string"))
    return [row.found for row in rows.coalesce(1).select(found.alias("found")).collect()]


def internal_by_python(topics, there=THERE):
    own = SETTINGS.namespace, markers(SETTINGS)
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
@hypothesis_settings(max_examples=10, deadline=None)
@given(st.lists(DRAWN, min_size=20))
def test_spark_finds_any_topics_internal_that_python_does(spark, known, topics):  # noqa: ARG001
    assert internal_by_spark(spark, topics) == internal_by_python(topics)


@pytest.mark.parametrize("cluster", ["eu", "us"])
def test_another_cluster_has_namespaces_of_its_own(spark, known, cluster):  # noqa: ARG001
    found = internal_by_spark(spark, TOPICS, cluster)

    assert found == internal_by_python(TOPICS, there=())


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("staging.failed", True),
        ("staging.control", True),
        ("staging.wheel.7", True),
        # A topic of somebody's who calls it so, and one of the namespace's users.
        ("orders.failed", False),
        ("team.control", False),
        ("staging.orders", False),
        # What others take in, they judge by themselves.
        ("staging.in", False),
        ("jobs__markers", True),
        ("tasks-at-work", True),
        ("others__markers", True),
        # Its records appear on `orders` and nowhere else.
        ("orders.delayed", False),
    ],
)
def test_which_topics_are_no_destinations(topic, expected):
    assert internal_by_python([topic]) == [expected]


def test_every_topic_of_a_namespace_but_its_intake_is_known_by_its_name():
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
    ("duetime.in.scheduler", "anything", "us", None),
    ("event_delayer_publisher", "orders-1", None, "not-allowed"),
]


def intake_record(number, topic, to, cluster):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    value = b'{"topic": "%s", "value": "v", "postTime": 1577836800000}' % to.encode()
    if topic == "event_delayer_publisher":
        return (topic, 0, number, at, None, value, [])
    named = {
        "duetime.in": {"due-topic": to, "due-at-ms": "1577836800000"},
        "duetime.in.scheduler": {"scheduler-epoch": "1577836800", "scheduler-target-topic": to},
    }[topic] | ({"due-cluster": cluster} if cluster and topic == "duetime.in" else {})
    return (
        topic,
        0,
        number,
        at,
        b"k",
        b"v",
        [(name, text.encode()) for name, text in named.items()],
    )


def test_what_comes_in_goes_where_its_intake_topic_may_send_to(spark):
    records = [intake_record(number, *case[:3]) for number, case in enumerate(CASES)]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    intake = Intake(LIMITED)

    judged = frame.transform(intake.understood).transform(intake.judged)

    reasons = [row.reason for row in judged.select("refused.reason").collect()]
    assert reasons == [expected for *_, expected in CASES]


@pytest.mark.parametrize("case", [each for each in CASES if each[0] == "duetime.in"], ids=str)
def test_a_client_refuses_what_its_intake_topic_may_not_send(case):
    _, topic, cluster, expected = case
    wanted = Wanted(topic=topic, cluster=cluster)
    if topic in {"duetime.warmup", "duetime.probes"}:
        # The pipeline's own, which are nobody else's destinations.
        expected = Reason.INTERNAL_TOPIC
    found = None
    try:
        scheduled(wanted, LIMITED, due_ms=2, now_ms=1, unique="a")
    except InvalidMessage as error:
        found = error.reason

    assert found == expected


@pytest.mark.parametrize("topic", ["orders-1", "any"])
def test_without_a_table_everything_is_allowed(topic):
    assert scheduled(Wanted(topic=topic, cluster="us"), SETTINGS, due_ms=2, now_ms=1, unique="a")


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

    found = [row[0] for row in rows.select(refusals.fits(F.col("name"), patterns)).collect()]

    assert found == [fits(each, patterns) for each in names]


def test_a_table_for_no_intake_topic_is_refused_by_name():
    with pytest.raises(ValueError, match=r"allow names duetime\.inn, which is no intake topic"):
        Settings(allow={"duetime.inn": {"topics": ["*"]}})
    with pytest.raises(ValueError, match="topics"):
        Settings(allow={"duetime.in": {}})
    with pytest.raises(ValueError, match="pattern"):
        Settings(allow={"duetime.in": {"topics": ["a[b]"]}})
