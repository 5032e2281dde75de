"""The example of examples/kmq, as its reader runs it."""

import re
import subprocess
import sys

import pytest
from tests.support import ROOT
from tests.support.live import EXAMPLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = ROOT / "examples" / "kmq"


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
@pytest.mark.timeout(1_200)
def test_all_of_it_in_one_process_comes_to_its_end():
    assert re.search("all 100 messages are done", run("embedded.py"))
