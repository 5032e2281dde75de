"""The example of examples/kmq, as its reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import EXAMPLE

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = Path(__file__).parents[2] / "examples" / "kmq"


def test_all_messages_are_done_in_the_end(live):
    arguments = [live.settings.bootstrap, EXAMPLE]
    for program in ("sender.py", "processor.py"):
        done = subprocess.run(
            [sys.executable, PROGRAMS / program, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
    assert re.search("all 100 messages are done", done.stdout)
