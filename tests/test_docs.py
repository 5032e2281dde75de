"""The documents say what the code says."""

from http import HTTPStatus
from pathlib import Path

import pytest

from duetime.api.problems import STATUS
from duetime.config import Settings
from duetime.errors import DuetimeError, Reason
from duetime.retry import HANDLER_FAILED

DOCS = Path(__file__).parents[1] / "docs"

#: What the HTTP API says of an error beside the reasons of records: Starlette's phrases, and those
#: of our errors that have one word each.
PROBLEMS = {
    *(
        status.phrase.lower().replace(" ", "-")
        for status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
    ),
    *(kind.reason for kind, _ in STATUS if kind.reason != DuetimeError.reason),
    *("internal", "timeout"),
}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_in_the_docs_with_its_help(name):
    rows = (DOCS / "configuration.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in rows if line.startswith(f"| `{name}` |"))

    assert Settings.model_fields[name].description in row


@pytest.mark.parametrize("reason", [*Reason, HANDLER_FAILED])
def test_every_reason_of_a_refusal_or_a_death_is_in_the_docs(reason):
    assert f"`{reason}`" in (DOCS / "contracts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reason", sorted(PROBLEMS))
def test_every_reason_of_a_problem_is_in_the_docs(reason):
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    errors = text.partition("## Errors")[2].partition("\n## ")[0]
    assert f"`{reason}`" in errors


def test_the_readme_starts_with_the_way_to_start():
    head = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()[:40]

    for needed in ("make demo", "make up", "duetime.client", "docs/how-it-works.md"):
        assert any(needed in line for line in head)
