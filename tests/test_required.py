"""What a queue's topics must not be."""

import pytest

from duetime.config import Settings
from duetime.required import required_topics
from duetime.tables import QueueSettings

DAY_MS = 86_400_000


def queue_topics(timeout_max_ms):
    own = QueueSettings(partitions=2, timeout_max_ms=timeout_max_ms)
    wanted = required_topics(Settings(queues={"jobs": own}))
    return {each.name: each for each in wanted}


def problems(name, timeout_max_ms=60_000, **altered):
    topic = queue_topics(timeout_max_ms)[name]
    settings = {key.replace("_", "."): value for key, value in altered.items()}
    return list(topic.problems(topic.partitions, dict(topic.settings) | settings))


@pytest.mark.parametrize("name", ["jobs", "jobs__markers", "jobs__undelivered"])
def test_as_they_are_created_they_are_as_they_must_be(name):
    assert problems(name) == []


@pytest.mark.parametrize(
    ("name", "altered", "told"),
    [
        ("jobs", {"retention_ms": "59999"}, "retention.ms is 59999"),
        ("jobs", {"cleanup_policy": "compact"}, "cleanup.policy is compact"),
        ("jobs__markers", {"retention_ms": str(DAY_MS - 1)}, f"set {DAY_MS} or more"),
        ("jobs__markers", {"retention_bytes": "1000000"}, "retention.bytes is 1000000"),
        ("jobs__markers", {"cleanup_policy": "compact"}, "cleanup.policy is compact"),
    ],
)
def test_where_a_message_or_a_marker_could_be_gone_too_soon_it_is_told(name, altered, told):
    (problem,) = problems(name, **altered)
    assert problem.startswith(f"topic {name}: ")
    assert told in problem


def test_markers_are_kept_for_twice_the_longest_timeout():
    altered = {"timeout_max_ms": 2 * DAY_MS, "retention_ms": str(4 * DAY_MS - 1)}
    (problem,) = problems("jobs__markers", **altered)
    assert f"set {4 * DAY_MS} or more" in problem


@pytest.mark.parametrize("name", ["jobs", "jobs__markers"])
@pytest.mark.parametrize(
    "limit", ["message_timestamp_after_max_ms", "message_timestamp_difference_max_ms"]
)
def test_senders_who_stamp_a_queue_may_not_be_far_ahead_whatever_the_broker_calls_it(name, limit):
    by_senders = {"message_timestamp_type": "CreateTime"}
    assert problems(name, **by_senders) == []
    assert problems(name, **by_senders, **{limit: str(DAY_MS)}) == []

    (problem,) = problems(name, **by_senders, **{limit: str(DAY_MS + 1)})

    assert f"{limit.replace('_', '.')} is {DAY_MS + 1}" in problem
