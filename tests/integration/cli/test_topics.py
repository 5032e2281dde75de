"""topics, doctor and status on a real broker."""

import json

import pytest
from confluent_kafka.admin import AdminClient
from tests.support.leading import leading
from tests.support.topics import configure

from duetime.core.topics import required_topics
from duetime.kafka.connection import librdkafka_properties

pytestmark = pytest.mark.usefixtures("on_broker")


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


def test_a_check_creates_nothing(duetime):
    first, second = duetime("topics", "--check"), duetime("topics", "--check")

    assert (first.code, second.code) == (1, 1)
    assert "is missing" in second.err


def test_a_topic_that_could_lose_messages_is_named_with_its_setting(duetime, short_retention):
    outcome = duetime("topics", "--check")

    assert outcome.code == 1
    assert f"✗ topic {short_retention}: retention.ms is 1000" in outcome.err


def test_the_status_shows_overdue_releases(duetime, settings, topics):  # noqa: ARG001
    found = (20_000, 1_234, 5_000, 9_000)
    with leading(settings, overdue_released=1_240, overdue_releases=[found]):
        told, as_json = duetime("status"), duetime("status", "--json")

    lines = told.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("overdue released"))
    assert lines[at].split()[2:] == ["1,240"]
    assert lines[at + 1].strip().startswith("1970-01-01T00:00:20.000Z (")
    due = "due from 1970-01-01T00:00:05.000Z to 1970-01-01T00:00:09.000Z"
    assert lines[at + 1].endswith(f"): 1,234, {due}")
    (release,) = json.loads(as_json.out)["overdue_releases"]
    assert tuple(release.values()) == found


def test_the_doctor_advises_segments_that_topics_changes(duetime, settings, topics):  # noqa: ARG001
    name = f"{settings.namespace}.wheel.2"
    configure(AdminClient(librdkafka_properties(settings)), name, "segment.ms", "60000")

    looked, doctor = duetime("topics", "--check"), duetime("doctor")
    changed, healthy = duetime("topics"), duetime("doctor")

    assert (looked.code, doctor.code, changed.code, healthy.code) == (0, 0, 0, 0)
    (advice,) = [line for line in doctor.out.splitlines() if line.startswith("!")]
    assert f"topic {name} should have other segments" in advice
    assert "`duetime topics` changes them" in advice
    assert f"changed {name}: segment.ms 60000 -> " in changed.out
    assert "!" not in healthy.out


def test_the_doctor_finds_nothing_wrong_on_a_healthy_cluster(duetime, topics):  # noqa: ARG001
    outcome = duetime("doctor")

    assert outcome.code == 0, outcome.out
    assert {line[0] for line in outcome.out.splitlines()} == {"✓"}


def test_the_doctor_names_what_is_wrong(duetime, short_retention):
    outcome = duetime("doctor")

    assert outcome.code == 1
    (wrong,) = [line for line in outcome.out.splitlines() if line.startswith("✗")]
    assert short_retention in wrong
    assert "retention.ms" in wrong
