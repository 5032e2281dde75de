"""The commands of all pages, on a broker whose topics are there, and without a pipeline."""

import json

import pytest
from tests.support.snippets import COMMANDS
from tests.support.topics import created_topics, small_settings

from duetime.core.setting_types import QueueSettings

#: As docs/queue.md calls it.
QUEUE = "jobs"

#: What is parsed alone, in tests/unit/docs/test_snippets.py; other tests run most of it.
PARSED = (
    # They last until they are ended.
    ("api",),
    ("run",),
    ("up",),
    # They take minutes, and a pipeline.
    ("bench",),
    ("demo",),
    # It needs Spark.
    ("sql",),
)

#: Answers that are no success: of what is named without its arguments, and of what is not there.
ANSWERS = {
    "cancel": (2, "Missing argument"),
    "cancel 019b514d9e80-order-17": (3, "too late"),
    "cancel 1": (2, "12 hex digits"),
    "dead-letters": (2, "a command is missing"),
    "dead-letters redrive": (2, "no dead letters selected"),
    "dead-letters redrive 17 18": (4, "17, 18"),
    "dead-letters show": (2, "Missing argument"),
    "dead-letters show 17": (4, "17"),
    "queue": (2, "a command is missing"),
    "queue dead": (2, "Missing argument"),
    "queue peek": (2, "Missing argument"),
    "queue redrive": (2, "Missing argument"),
    "queue redrive jobs 3 4": (4, "3, 4"),
    "queue stats": (2, "Missing argument"),
    "reschedule": (2, "Missing argument"),
    "reschedule 019b514d9e80-order-17 --in 2h": (3, "019b514d9e80-order-17"),
    "reschedule 1 --in 1h": (2, "12 hex digits"),
    "schedules": (2, "a command is missing"),
    "schedules pause": (2, "Missing argument"),
    "schedules pause daily-report": (4, "daily-report"),
    "schedules resume": (2, "Missing argument"),
    "schedules resume daily-report": (4, "daily-report"),
    "schedules show": (2, "Missing argument"),
    "schedules stop": (2, "Missing argument"),
    "schedules stop daily-report": (4, "daily-report"),
    "schedules stop five-minutes": (4, "five-minutes"),
    "send": (2, "Missing argument"),
    # The wheel of the tests reaches an hour.
    "send orders --at 2030-01-01T09:00:00+01:00 --key 42 --value hello --id new-year": (2, "wheel"),
    "show": (2, "Missing argument"),
    "show 1": (2, "12 hex digits"),
    "status": (1, "no pipeline leads"),
}

#: In place of the two times that a page leaves open.
FROM, TO = "2026-12-24T18:00:00Z", "2026-12-24T19:00:00Z"

#: Where its file is on the machine where duetime is deployed.
DEPLOYED = "/etc/duetime/"

RUN = [each for each in COMMANDS if not any(each[: len(some)] == some for some in PARSED)]


@pytest.fixture(scope="module")
def settings(broker):
    """One namespace for all of them, with its topics."""
    found = small_settings(broker.bootstrap, queues={QUEUE: QueueSettings(partitions=1)})
    with created_topics(found):
        yield found


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_a_command_is_answered_as_it_should_be(duetime, on_broker, monkeypatch, tmp_path, words):  # noqa: ARG001
    words = [here(each, tmp_path) for each in words]
    monkeypatch.setenv("DUETIME_QUEUES", json.dumps({QUEUE: {"partitions": 1}}))
    times = iter((FROM, TO))
    outcome = duetime(*(next(times) if each == "..." else each for each in words))

    code, said = ANSWERS.get(" ".join(words), (0, ""))
    assert outcome.code == code, outcome.err
    assert said in outcome.err
    assert outcome.out or code


def here(word, directory):
    """The same; a file that is where duetime is deployed is in this directory, and empty."""
    if not word.startswith(DEPLOYED):
        return word
    file = directory / word.removeprefix(DEPLOYED)
    file.touch()
    return str(file)


def test_every_answer_is_that_of_a_command_of_the_pages():
    assert set(ANSWERS) <= set(map(" ".join, RUN))
    assert all(any(each[: len(some)] == some for each in COMMANDS) for some in PARSED)
