"""The example of examples/kmq, as its reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import EXAMPLE

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = Path(__file__).parents[2] / "examples" / "kmq"


def run(program, *arguments):
    """What it prints."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_messages_are_done_in_the_end(live):
    arguments = [live.settings.bootstrap, EXAMPLE]
    run("sender.py", *arguments)
    assert re.search("all 100 messages are done", run("processor.py", *arguments))


@pytest.mark.hostile
@pytest.mark.timeout(600)
def test_all_of_it_in_one_process_comes_to_its_end():
    assert re.search("all 100 messages are done", run("embedded.py"))
