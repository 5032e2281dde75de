"""The command, run in this process."""

import io
import os
import sys
from dataclasses import dataclass

import pytest
from tests.support.topics import FROM_OUTSIDE

from duetime.cli import main

#: What tests set, and where the jars are.
KEPT = {"DUETIME_JARS", *(f"DUETIME_{name.upper()}" for name in FROM_OUTSIDE)}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    """Ignore the environment and configuration files of this machine."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("DUETIME_") and name not in KEPT:
            monkeypatch.delenv(name)
    # `up` is ready without a warm-up.
    monkeypatch.setenv("DUETIME_WARM_UP_SECONDS", "0")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    # Removes what --config sets.
    monkeypatch.setenv("DUETIME_CONFIG", "")
    monkeypatch.delenv("DUETIME_CONFIG")


@pytest.fixture
def duetime(capfd, monkeypatch):
    """Run `duetime ARGUMENTS...` with this standard input."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


def by_name(checks):
    return {check.name: check for check in checks}
