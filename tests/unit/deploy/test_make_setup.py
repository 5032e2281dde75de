"""What `make setup` says where something is missing: one sentence, before anything is installed."""

import os
import shutil
import subprocess

import pytest
from tests.support import ROOT

MISSING = {
    "Java": ({"JAVA_HOME": "/nonexistent"}, [], "Java is missing: install Java 17 or newer"),
    "Python": ({}, ["PYTHON=/nonexistent"], "/nonexistent is missing or older than 3.11: install"),
    "room": ({}, ["ROOM_MIB=99999999"], "less than 99999999 MiB are free on this disk: make room"),
}


@pytest.mark.parametrize(("environment", "given", "words"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_said_in_one_sentence(tmp_path, environment, given, words):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        [shutil.which("make"), "setup", *given],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said, *makes = done.stderr.splitlines()
    assert said.startswith(f"setup: {words}")
    assert all(line.startswith("make") for line in makes)
    assert done.returncode
    assert not (tmp_path / ".venv").exists()
