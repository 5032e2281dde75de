"""The command, run in this process as its user runs it."""

import io
import os
import sys
from dataclasses import dataclass

import pytest
from tests.conftest import FROM_OUTSIDE

from duetime.cli import main

#: What tests/conftest.py sets, and where the jars are.
KEPT = {"DUETIME_JARS", *(f"DUETIME_{name.upper()}" for name in FROM_OUTSIDE)}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    """Neither this machine's environment nor a file in the working directory has a say."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("DUETIME_") and name not in KEPT:
            monkeypatch.delenv(name)
    # `up` is ready as soon as it runs.
    monkeypatch.setenv("DUETIME_WARM_UP_SECONDS", "0")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    # What --config puts there is taken away again.
    monkeypatch.setenv("DUETIME_CONFIG", "")
    monkeypatch.delenv("DUETIME_CONFIG")


@pytest.fixture
def duetime(capfd, monkeypatch):
    """Runs `duetime ARGUMENTS...`; `stdin` is what is piped in."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run
