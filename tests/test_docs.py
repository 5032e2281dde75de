"""The documents say what the code says."""

from pathlib import Path

import pytest

from duetime.config import Settings
from duetime.errors import Reason

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_in_the_docs_with_its_help(name):
    rows = (DOCS / "configuration.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in rows if line.startswith(f"| `{name}` |"))

    assert Settings.model_fields[name].description in row


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_refusal_is_in_the_docs(reason):
    assert f"`{reason}`" in (DOCS / "contracts.md").read_text(encoding="utf-8")


def test_the_readme_starts_with_the_way_to_start():
    head = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()[:40]

    for needed in ("make demo", "make up", "duetime.client", "docs/how-it-works.md"):
        assert any(needed in line for line in head)
