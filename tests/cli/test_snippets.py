"""The commands of all pages, on a broker whose topics are there, and without a pipeline."""

import json

import pytest
from tests.conftest import created_topics, small_settings
from tests.test_snippets import COMMANDS

from duetime.tables import QueueSettings

#: As docs/queue.md calls it.
QUEUE = "jobs"

#: What is parsed alone, in tests/test_snippets.py; other tests run most of it.
PARSED = (
    # They last until they are ended.
    ("api",),
    ("run",),
    ("up",),
    # They take minutes, and a pipeline.
    ("bench",),
    # It needs Spark.
    ("sql",),
)

#: Answers that are no success: of what is named without its arguments, and of what is not there.
ANSWERS = {
    "cancel": (2, "Missing argument"),
    "dead": (2, "duetime dead --help"),
    "dead redrive": (2, "say which"),
    "dead show 1": (4, "no dead letter has the number 1"),
    "queue redrive jobs 3 4": (4, "no dead letter has the number 3, 4"),
    "queue stats": (2, "Missing argument"),
    "recurring": (2, "duetime recurring --help"),
    "reschedule": (2, "Missing argument"),
    "send": (2, "Missing argument"),
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


@pytest.mark.system
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
