"""duetime sql on a wheel that is filled by hand."""

import json
import subprocess
import sys

import pytest
from tests.snippets import commands

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("on_broker", "topics")]


def asking(*arguments):
    """The command in a process of its own: it ends its Spark, and tests share theirs."""
    return subprocess.Popen(
        [sys.executable, "-m", "duetime", "sql", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_query_over_what_waits_is_answered_and_a_bad_one_is_told(wheel, now_ms):
    due_ms = now_ms + 300_000
    for topic in ("orders", "orders", "bills"):
        wheel.message(topic, due_ms, key="k", headers={"h": "1"})

    # As docs/sql.md has it.
    shown = [words[1:] for words in commands("sql.md") if words[0] == "sql"]
    asked = [
        *(asking(*each) for each in shown),
        asking("--json", "select * from pending where topic = 'bills'"),
        asking("select colour from pending"),
    ]
    counted, soon, listed, wrong = (each.communicate() for each in asked)

    assert [each.returncode for each in asked] == [0, 0, 0, 2]
    assert counted[1] == ""
    # Without `first`, which is a time.
    assert [line.split()[:2] for line in counted[0].splitlines()] == [
        ["topic", "messages"],
        ["orders", "2"],
        ["bills", "1"],
    ]
    rows = [json.loads(line) for line in soon[0].splitlines()]
    assert [(row.keys(), row["key"]) for row in rows] == [({"id", "due", "key"}, "k")] * 2
    (line,) = listed[0].splitlines()
    row = json.loads(line)
    assert (row["topic"], row["key"], row["headers"]) == (
        "bills",
        "k",
        [{"key": "h", "value": "1"}],
    )
    assert row["due"].endswith("Z")
    # The words are Spark's, and nothing follows them.
    assert wrong[1].startswith("error: the query cannot be answered: A column")
    assert len(wrong[1].splitlines()) == 1
