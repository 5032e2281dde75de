"""What a type checker says of a program that uses duetime."""

import subprocess
import sys
from importlib.resources import files

import pytest
from tests.support import SUPPORT

USE = SUPPORT / "typed_program.py"


def test_the_package_says_that_it_has_types():
    assert files("duetime").joinpath("py.typed").is_file()


@pytest.mark.slow
def test_a_program_with_strict_types_may_use_the_clients(tmp_path):
    # As its user has it: without our configuration, and told nothing of what is in duetime.
    check = ["--strict", "--config-file=", "--cache-dir", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", *check, USE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
