"""What a queue's topics must not be."""

import pytest

from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings
from duetime.core.topics import required_topics

DAY_MS = 86_400_000


def queue_topics(max_visibility_timeout_ms):
    own = QueueSettings(partitions=2, max_visibility_timeout_ms=max_visibility_timeout_ms)
    wanted = required_topics(Settings(queues={"jobs": own}))
    return {each.name: each for each in wanted}


def problems(name, max_visibility_timeout_ms=60_000, **altered):
    topic = queue_topics(max_visibility_timeout_ms)[name]
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
def test_settings_that_remove_messages_or_markers_early_are_problems(name, altered, told):
    (problem,) = problems(name, **altered)
    assert problem.startswith(f"topic {name}: ")
    assert told in problem


def test_markers_are_kept_for_twice_the_longest_timeout():
    altered = {"max_visibility_timeout_ms": 2 * DAY_MS, "retention_ms": str(4 * DAY_MS - 1)}
    (problem,) = problems("jobs__markers", **altered)
    assert f"set {4 * DAY_MS} or more" in problem


@pytest.mark.parametrize("name", ["jobs", "jobs__markers"])
@pytest.mark.parametrize(
    "limit", ["message_timestamp_after_max_ms", "message_timestamp_difference_max_ms"]
)
def test_senders_timestamps_far_ahead_are_a_problem_of_a_queue(name, limit):
    by_senders = {"message_timestamp_type": "CreateTime"}
    assert problems(name, **by_senders) == []
    assert problems(name, **by_senders, **{limit: str(DAY_MS)}) == []

    (problem,) = problems(name, **by_senders, **{limit: str(DAY_MS + 1)})

    assert f"{limit.replace('_', '.')} is {DAY_MS + 1}" in problem
