import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from duetime.bench import app, show
from duetime.bench.loadgen import parse_range
from duetime.core.errors import InvalidMessage


def test_delays_are_read_as_a_range_or_as_one_duration():
    assert parse_range("5s..30s") == (5_000, 30_000)
    assert parse_range("0.05s..2s") == (50, 2_000)
    assert parse_range("250ms") == (250, 250)


@pytest.mark.parametrize("text", ["30s..5s", "5..30", "-5s..5s", "..5s", "5s...", "soon", ""])
def test_an_invalid_range_is_refused(text):
    with pytest.raises(InvalidMessage):
        parse_range(text)


@pytest.mark.parametrize(
    "name",
    [
        *("lateness", "catchup", "intake", "pending", "lookup", "flood", "crash", "failover"),
        *("outage", "scale", "delayed", "queue", "api", "wheel", "bulk"),
    ],
)
def test_every_benchmark_has_help(name):
    answer = CliRunner().invoke(app, [name, "--help"])
    assert answer.exit_code == 0
    assert "--json" in answer.output
    assert "--kafka" in answer.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["lateness", "--rate", "0"],
        ["lateness", "--runs", "0"],
        ["catchup", "--messages", "-1"],
        ["intake", "--messages", "many"],
        ["wheel", "--years", "0"],
        ["speed"],
    ],
)
def test_an_invalid_option_is_refused(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_the_commands_start_without_spark():
    program = "import sys, duetime.bench; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_json_is_one_line_on_stdout(capsys):
    show("lateness", {"sent": 1, "spread": {"p99_ms": [1, 2]}}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"sent": 1, "spread": {"p99_ms": [1, 2]}}


def test_a_table_has_every_figure_and_the_timeline(capsys):
    result = {"sent": 12_000, "spread": {"p99_ms": [30, 45]}, "timeline": [{"second": 7}]}
    show("lateness", result, as_json=False)
    shown = capsys.readouterr().out
    for text in ("sent", "12,000", "p99_ms 30 to 45", "timeline", "second", "7"):
        assert text in shown
