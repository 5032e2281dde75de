"""topics and doctor on a real broker."""

import pytest
from confluent_kafka.admin import AdminClient
from tests.conftest import configure

from duetime.connection import librdkafka_properties
from duetime.topics import required_topics

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("on_broker")]


@pytest.fixture
def short_retention(settings, topics):  # noqa: ARG001 (they must be there)
    """The name of a topic whose messages Kafka would remove."""
    name = f"{settings.namespace}.wheel.1"
    configure(AdminClient(librdkafka_properties(settings)), name, "retention.ms", "1000")
    return name


def test_missing_topics_are_created_once(duetime, settings):
    first, second = duetime("topics"), duetime("topics")

    names = {topic.name for topic in required_topics(settings)}
    assert (first.code, second.code) == (0, 0)
    assert {line.split()[1] for line in first.out.splitlines() if "created" in line} == names
    assert second.out == f"✓ all {len(names)} topics are as they must be\n"


def test_nothing_is_sent_before_there_are_topics(duetime, settings):
    outcome = duetime("send", "orders", "--in", "5s", "--value", "v")

    assert outcome.code == 1
    assert f"topic {settings.namespace}.in is missing" in outcome.err
    assert f"topic {settings.namespace}.in is missing" in duetime("topics", "--check").err


def test_a_look_creates_nothing(duetime):
    first, second = duetime("topics", "--check"), duetime("topics", "--check")

    assert (first.code, second.code) == (1, 1)
    assert "is missing" in second.err


def test_a_topic_that_would_lose_messages_is_named_with_the_setting(duetime, short_retention):
    outcome = duetime("topics", "--check")

    assert outcome.code == 1
    assert f"✗ topic {short_retention}: retention.ms is 1000" in outcome.err


def test_the_doctor_finds_nothing_where_all_is_well(duetime, topics):  # noqa: ARG001
    outcome = duetime("doctor")

    assert outcome.code == 0, outcome.out
    assert {line[0] for line in outcome.out.splitlines()} == {"✓"}


def test_the_doctor_names_what_is_wrong(duetime, short_retention):
    outcome = duetime("doctor")

    assert outcome.code == 1
    (wrong,) = [line for line in outcome.out.splitlines() if line.startswith("✗")]
    assert short_retention in wrong
    assert "retention.ms" in wrong
