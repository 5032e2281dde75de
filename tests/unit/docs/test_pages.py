"""The documents say what the code says."""

import re
from http import HTTPStatus

import pytest
from tests.support import ROOT

from duetime.api.errors import BUSY, STATUS
from duetime.client.consumer_retries import HANDLER_FAILED
from duetime.core.clock import parse_instant
from duetime.core.errors import DuetimeError, Reason
from duetime.core.setting_types import Cluster, QueueSettings
from duetime.core.settings import Settings
from duetime.core.topics import required_topics

DOCS = ROOT / "docs"

#: What the HTTP API says of an error beside the reasons of records: Starlette's phrases, and those
#: of our errors that have one word each.
PROBLEMS = {
    *(
        status.phrase.lower().replace(" ", "-")
        for status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
    ),
    *(kind.reason for kind, _ in STATUS if kind.reason != DuetimeError.reason),
    *("internal", "timeout", BUSY),
}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_in_the_docs_with_its_help(name):
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("configuration*.md")]
    row = next(line for line in "".join(pages).splitlines() if line.startswith(f"| `{name}` |"))

    description = " ".join(Settings.model_fields[name].description.split())
    assert description.removesuffix(".") in row


@pytest.mark.parametrize("name", QueueSettings.model_fields)
def test_every_setting_of_a_queue_is_in_the_docs_with_its_help(name):
    page = (DOCS / "queue-reference.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))

    description = " ".join(QueueSettings.model_fields[name].description.split())
    assert description.removesuffix(".") in row


@pytest.mark.parametrize("reason", [*Reason, HANDLER_FAILED])
def test_every_reason_of_a_refusal_or_a_death_is_in_the_docs(reason):
    assert f"`{reason}`" in (DOCS / "reasons.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", sorted(PROBLEMS))
def test_every_reason_of_a_problem_is_in_the_docs(reason):
    text = (DOCS / "api-reference.md").read_text(encoding="utf-8")
    errors = text.partition("## Errors")[2].partition("\n## ")[0]
    assert f"`{reason}`" in errors


#: Settings under which every kind of topic is needed.
ALL_TOPICS = Settings(
    store="aerospike://127.0.0.1:3000/test",
    aerospike_expiry_notifications=True,
    clusters={"eu": Cluster(bootstrap="eu:9092")},
    queues={"jobs": QueueSettings(partitions=2)},
    delayed_topics={"orders.delayed": {"delayed.delivery.enable": True}},
)

OTHER_INTAKES = "the other intake topics"
#: What the page calls topics whose names are a configuration's, by their names here.
CALLED = {
    "duetime.outbox.eu": "duetime.outbox.<cluster>",
    "duetime.isolated.eu": "duetime.isolated.<cluster>",
    "jobs": "a [queue]",
    "jobs__markers": "__markers",
    "jobs__undelivered": "__undelivered",
    "orders.delayed": "a [delayed topic]",
    "event_delayer_publisher": OTHER_INTAKES,
    "duetime.in.countdown": OTHER_INTAKES,
    "duetime.in.scheduler": OTHER_INTAKES,
}


def names(cell, called):
    """Whether a row is about what is called so: a name stands in backticks."""
    return f"`{called}`" in cell or (called in CALLED.values() and called in cell)


@pytest.mark.parametrize("topic", required_topics(ALL_TOPICS), ids=lambda each: each.name)
def test_every_topic_has_a_row_with_its_partitions_and_what_keeps_it(topic):
    table = (DOCS / "topics.md").read_text(encoding="utf-8").partition("## Topics")[2]
    called = re.sub(r"wheel\.\d", "wheel.0", CALLED.get(topic.name, topic.name))
    rows = [
        line.split("|") for line in table.partition("\n## ")[0].splitlines() if line[:2] == "| "
    ]
    _, _, partitions, settings, _ = next(row for row in rows if names(row[1], called))
    assert set(re.findall(r"\d+", partitions)) <= {str(topic.partitions)}
    assert ("compact`" in settings) == (topic.settings.get("cleanup.policy") == "compact")


def test_an_id_that_is_shown_is_the_time_that_is_shown_beside_it():
    shown = [
        (found[1], found[2])
        for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
        for found in re.finditer(
            r'"([0-9a-f]{12})-[^"]*"[^{}]*?"due(?:_at_ms)?": "?([^",}]+)',
            page.read_text(encoding="utf-8"),
        )
    ]
    assert len(shown) >= 2
    for due, said in shown:
        assert int(due, 16) == (int(said) if said.isdigit() else parse_instant(said))


def test_the_readme_starts_with_the_way_to_start():
    head = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()[:40]

    for needed in ("make demo", "make up", "duetime.client"):
        assert any(needed in line for line in head)
