"""duetime sql on a wheel that is filled by hand."""

import json
import re
import subprocess
import sys

import pytest
from tests.support.snippets import commands

from duetime.cli.sql import HAS, _translated_errors
from duetime.core.errors import DuetimeError
from duetime.dataframes import PENDING
from duetime.kafka.offsets import OffsetRange
from duetime.spark.kafka_io import read_ranges

pytestmark = pytest.mark.usefixtures("on_broker", "topics")


def asking(*arguments):
    """Run the command in a process: it ends its Spark, and tests share theirs."""
    return subprocess.Popen(
        [sys.executable, "-m", "duetime", "sql", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_query_is_answered_and_a_bad_one_refused(wheel, now_ms):
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
    assert wrong[1].endswith(f": {HAS}\n")
    named = HAS.partition("columns ")[2].partition(", and")[0].split(", ")
    assert named == [each.split()[0] for each in re.split(r", (?=[a-z]+ [a-z])", PENDING)]


@pytest.mark.slow
def test_values_without_json_are_refused_or_named(wheel, now_ms):
    wheel.message("orders", now_ms + 300_000)
    asked = [
        asking("--json", "select 1 a, 2 b, 3 a"),
        asking("select array(named_struct('a', 1, 'a', 2)) rows"),
        asking("--json", "select double('nan') x, array(float('-inf')) y, double('inf') z"),
        asking("--json", "select raise_error(topic) from pending"),
    ]
    twice, nested, numbers, refused = (each.communicate() for each in asked)

    assert [each.returncode for each in asked] == [2, 2, 0, 2]
    for _, said in (twice, nested):
        assert said == "error: two columns are called a: name one of them with `as`\n"
    assert json.loads(numbers[0]) == {"x": "NaN", "y": ["-Infinity"], "z": "Infinity"}
    assert refused[1] == "error: the query cannot be answered: orders\n"


def test_a_kafka_that_went_away_is_named(spark, settings):
    gone = settings.model_copy(
        update={
            "bootstrap": "127.0.0.1:1",
            "java_properties": {"default.api.timeout.ms": "1000", "request.timeout.ms": "500"},
        }
    )
    waiting = read_ranges(spark, gone, [OffsetRange("t", 0, 0, 1)])
    said = r"failed on the way .*TimeoutException.*ask again"
    with pytest.raises(DuetimeError, match=said), _translated_errors():
        waiting.collect()
