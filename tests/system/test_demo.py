"""`duetime demo`, whole, without a terminal."""

import os
import re
import subprocess
import sys

import pytest
from tests.support.command import nothing_from_outside  # noqa: F401 (for each test)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]


def test_the_demo_delivers_each_message_once_and_cleans_up(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "duetime", "demo"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"1,000 +1,000 +0 +0 +0 ", done.stdout)
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []
